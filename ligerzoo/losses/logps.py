"""Log-probabilities of whole rows, and what the losses over them have in common: masks, shapes, divisors.

The log-probability of a row is the sum of those of its tokens that count, log p(y | x) = sum_t log p(y_t | x, y_<t);
"averaged", it is divided by their number |y|.

`name` is the function that an error is about.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.names import about_choice
from ligerzoo.losses.objective import HeadOptions, LogpOptions, check_head, check_logits, token_results


def sequence_logps(
    hidden: Tensor, weight: Tensor | None, target: Tensor, *, average: bool = False, **head: Unpack[LogpOptions]
) -> Tensor:
    """(B,) fp32: the log-probability of each row of targets, averaged over its tokens or not; 0 of no token.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits.
        weight: (V, H), the head; None if `hidden` are logits.
        target: (B, T) token ids, what each hidden state should predict, or `ignore_index`.
        average: divide by the number of tokens that count.
        head: see `LogpOptions`.

    Raises:
        TypeError: `head` has an option that heads do not have.
        ValueError: shapes do not fit.
    """
    check_head("sequence_logps", head)
    check_rows("sequence_logps", hidden, target)
    if weight is None:
        check_logits("sequence_logps", hidden, head)
    return summed(token_results(hidden, weight, target, head)[0], counted(target, head), average)


def counted(target: Tensor, head: HeadOptions) -> Tensor:
    """(B, T) bool: which targets count."""
    return target != head.get("ignore_index", -100)


def summed(logps: Tensor, mask: Tensor, average: bool = False) -> Tensor:
    """(B,): the sum, or the mean, over the tokens of a row that count; 0 if none does."""
    total = torch.where(mask, logps, 0.0).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if average else total


_HIGHEST_EXPONENT = 30.0
"""Its exponential is 1e13. In fp32 two such exponentials can still be multiplied, and a gradient norm that has one can
be squared."""


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x) up to x = 30, and beyond that its tangent at 30, exp(30) (1 + x - 30): finite, and with a finite slope
    that still points the right way. A clamp would have no slope."""
    bounded = x.clamp(max=_HIGHEST_EXPONENT).exp()
    return torch.where(x > _HIGHEST_EXPONENT, math.exp(_HIGHEST_EXPONENT) * (1 + x - _HIGHEST_EXPONENT), bounded)


@torch.no_grad()
def mean_logits(hidden: Tensor, weight: Tensor | None, mask: Tensor, head: HeadOptions) -> Tensor | None:
    """(B,): of each row the sum, over the tokens that count, of the mean of a token's logits (scaled, not divided by a
    temperature). It needs no logits, for the mean over the classes of h @ weight.T is h @ weight.mean(0). None with a
    softcap, which is not linear."""
    if head.get("softcap") is not None:
        return None
    dtype, bias = accumulation_dtype(hidden.dtype), head.get("bias")
    if weight is None:
        sums = summed(hidden.mean(-1, dtype=dtype), mask)
    else:
        # Sums first: a row's hidden states in fp32 would take twice the memory of those given.
        row_sums = torch.where(mask[..., None], hidden, 0.0).sum(1, dtype=dtype)
        sums = (row_sums * weight.mean(0, dtype=dtype)).sum(-1)
    if bias is not None:
        sums = sums + mask.sum(-1) * bias.mean(dtype=dtype)
    return head.get("logit_scale", 1.0) * sums


def divisor(given: int | Tensor | None, default: int | Tensor, like: Tensor) -> int | float | Tensor:
    """What a sum is divided by: `given`, else `default`, but at least 1; exact in the dtype that losses of the hidden
    states `like` have."""
    if given is None:
        given = default.clamp(min=1) if isinstance(default, Tensor) else max(1, default)
    return given.to(accumulation_dtype(like.dtype)) if isinstance(given, Tensor) else given


def check_rows(name: str, hidden: Tensor, target: Tensor, **of_rows: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raises ValueError unless there are (B, T, H) hidden states for (B, T) targets, and what else is given has the
    shape that it should have."""
    if hidden.dim() != 3 or hidden.shape[:2] != target.shape:
        raise ValueError(
            f"{name}: hidden {tuple(hidden.shape)} and target {tuple(target.shape)}; expected (B, T, H) and (B, T)"
        )
    for what, (tensor, shape) in of_rows.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name}: {what} has shape {tuple(tensor.shape)}; expected {shape}")


def check_number(name: str, **numbers: Any) -> None:
    """Raises ValueError for a divisor that is no number above 0; None and tensors without dimensions pass."""
    for what, number in numbers.items():
        is_number = number.dim() == 0 if isinstance(number, Tensor) else number is None or number > 0
        if not is_number:
            raise ValueError(f"{name}: {what}={number!r}; expected a number above 0, or a 0-d tensor of one")


def check_together(name: str, why: str, **numbers: int | Tensor | None) -> None:
    """Raises ValueError if some of these are given and others are not."""
    if len({number is None for number in numbers.values()}) > 1:
        given = " and ".join(f"{what}={number!r}" for what, number in numbers.items())
        raise ValueError(f"{name}: {given}; expected both or neither: {why}")


def check_choice(name: str, known: Any, **choices: str) -> None:
    """Raises ValueError for a choice, such as a variant, that is none of those known."""
    for what, choice in choices.items():
        if choice not in known:
            raise ValueError(
                f"{name}: {what}={choice!r}; expected one of {', '.join(map(repr, known))}{about_choice(choice)}"
            )
