"""Log-probabilities of whole rows, and what the losses over them have in common: masks, shapes, divisors.

The log-probability of a row is the sum of those of its tokens that count, log p(y | x) = sum_t log p(y_t | x, y_<t);
"averaged", it is divided by their number |y|.

`name` is the function that an error is about.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from ligerzoo.kernels import token_logps
from ligerzoo.kernels.dispatch import wide
from ligerzoo.losses.objective import HeadOptions, check_head


def sequence_logps(
    hidden: Tensor, weight: Tensor, target: Tensor, *, average: bool = False, **head: Unpack[HeadOptions]
) -> Tensor:
    """(B,) fp32: the log-probability of each row of targets, averaged over its tokens or not; 0 of no token.

    Args:
        hidden: (B, T, H) hidden states.
        weight: (V, H), the head.
        target: (B, T) token ids, what each hidden state should predict, or `ignore_index`.
        average: divide by the number of tokens that count.
        head: see `HeadOptions`.

    Raises:
        TypeError: `head` has an option that heads do not have.
        ValueError: shapes do not fit.
    """
    check_head("sequence_logps", head)
    check_rows("sequence_logps", hidden, target)
    return summed(token_logps(hidden, weight, target, **head), counted(target, head), average)


def counted(target: Tensor, head: HeadOptions) -> Tensor:
    """(B, T) bool: which targets count."""
    return target != head.get("ignore_index", -100)


def summed(logps: Tensor, mask: Tensor, average: bool = False) -> Tensor:
    """(B,): the sum, or the mean, over the tokens of a row that count; 0 if none does."""
    total = torch.where(mask, logps, 0.0).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if average else total


def divisor(given: int | Tensor | None, default: int | Tensor, like: Tensor) -> int | float | Tensor:
    """What a sum is divided by: `given`, else `default`, but at least 1; exact in the dtype that losses of the hidden
    states `like` have."""
    if given is None:
        given = default.clamp(min=1) if isinstance(default, Tensor) else max(1, default)
    return given.to(wide(like.dtype)) if isinstance(given, Tensor) else given


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
            raise ValueError(f"{name}: {what}={choice!r}; expected one of {', '.join(map(repr, known))}")
