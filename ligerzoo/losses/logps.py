"""Log-probabilities of sequences, and helpers that the losses share: masks and divisors.

The log-probability of a sequence is the sum over its non-ignored targets, log p(y | x) = sum_t log p(y_t | x, y_<t).
The average divides it by the number |y| of these targets.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.checks import check_logits, check_tensors
from ligerzoo.losses.objective import HeadOptions, LogpOptions, check_head_options, token_logps_and_entropy
from ligerzoo.tensor_checks import check_tensor


def sequence_logps(
    hidden: Tensor, weight: Tensor | None, target: Tensor, *, average_log_prob: bool = False,
    **head: Unpack[LogpOptions],
) -> Tensor:  # fmt: skip
    """Returns the log-probability of each sequence of targets, differentiable, without holding all logits.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits.
        weight: (V, H) weight of the LM head; None if `hidden` holds logits.
        target: (B, T) token ids, already shifted: `target[b, t]` is the token that `hidden[b, t]` predicts.
            `ignore_index` marks ignored tokens.
        average_log_prob: divide by the number of non-ignored targets.
        head: options of the LM head and `temperature`, see `LogpOptions`.

    Returns:
        (B,) fp32 (fp64 for fp64 input); 0 for a sequence without targets.

    Raises:
        TypeError: an option is unknown, or an argument has another type.
        ValueError: shapes, dtypes or targets are invalid, or an option is out of range.
    """
    name = "sequence_logps"
    check_head_options(sequence_logps, head)
    check_tensors(name, hidden, weight, target, head.get("bias"))
    if weight is None:
        check_logits(name, hidden, head.get("bias"))
    logps, _ = token_logps_and_entropy(name, hidden, weight, target, head)
    mask = target_mask(target, head)
    return masked_mean(logps, mask) if average_log_prob else masked_sum(logps, mask)


def unpacked(name: str, hidden: Tensor, target: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Gathers the sequences of packed rows, one to a row, as the losses over sequences take them.

    Args:
        name: the loss that error messages name.
        hidden: (B, T, H) hidden states.
        target: (B, T) token ids, already shifted.
        sequences: (N, L) int64: for each sequence the indices b T + t of the tokens that predict its targets, then -1.

    Returns:
        (N, L, H) hidden states and (N, L) targets, -100 where `sequences` is negative. Gradients go to the tokens of
        the sequences.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: `sequences` has another dtype, shape or device.
    """
    check_tensor(name, "sequences", sequences, "integer", device=hidden.device)
    if sequences.dim() != 2:
        raise ValueError(f"{name}: got sequences {tuple(sequences.shape)}; expected (N, L)")
    tokens = hidden.flatten(0, 1)
    index = sequences % len(tokens)  # the last token pads: it predicts nothing, so it needs no gradient
    rows = F.embedding(index, tokens, padding_idx=len(tokens) - 1)
    return rows, target.flatten()[index].masked_fill(sequences < 0, -100)


def target_mask(target: Tensor, head: HeadOptions) -> Tensor:
    """Returns (B, T) bool: True at non-ignored targets."""
    return target != head.get("ignore_index", -100)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sums (B, T) over the tokens in the mask: (B,)."""
    return torch.where(mask, x, 0.0).sum(-1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Averages (B, T) over the tokens in the mask: (B,), 0 for a sequence without any."""
    return masked_sum(x, mask) / mask.sum(-1).clamp(min=1)


_MAX_EXPONENT = 30.0
"""exp(30) is 1e13: in fp32 the product of two such values is finite, and so is the square of a gradient norm."""


def safe_exp(x: Tensor) -> Tensor:
    """Computes exp(x), continued by its tangent exp(30) (1 + x - 30) for x > 30: finite in fp32.

    The slope beyond 30 is constant. A clamp would have slope 0 there, and training could not reduce x.
    """
    is_large = x > _MAX_EXPONENT
    power = torch.where(is_large, _MAX_EXPONENT, x).exp()  # the slope of a clamp at 30 is 0 since torch 2.15
    return torch.where(is_large, math.exp(_MAX_EXPONENT) * (1 + x - _MAX_EXPONENT), power)


@torch.no_grad()
def summed_mean_logits(hidden: Tensor, weight: Tensor | None, mask: Tensor, head: HeadOptions) -> Tensor | None:
    """Averages each token's logits over the vocabulary, and sums over the tokens in the mask: (B,).

    The logits include `logit_scale`, but not the temperature. No logits are computed: the mean over the vocabulary of
    h @ weight.T is h @ weight.mean(0). Returns None with a softcap, which is not linear.
    """
    if head.get("softcap") is not None:
        return None
    dtype, bias = accumulation_dtype(hidden.dtype), head.get("bias")
    if weight is None:
        sums = masked_sum(hidden.mean(-1, dtype=dtype), mask)
    else:
        # Sum first: all hidden states in fp32 would need twice the memory.
        hidden_sums = torch.where(mask[..., None], hidden, 0.0).sum(1, dtype=dtype)
        sums = (hidden_sums * weight.mean(0, dtype=dtype)).sum(-1)
    if bias is not None:
        sums = sums + mask.sum(-1) * bias.mean(dtype=dtype)
    return head.get("logit_scale", 1.0) * sums


def divisor(num_items: int | Tensor | None, default: int | Tensor, hidden: Tensor) -> int | float | Tensor:
    """Returns `num_items`, or by default `default` but at least 1; tensors in the dtype of the loss of `hidden`."""
    if num_items is None:
        num_items = default.clamp(min=1) if isinstance(default, Tensor) else max(1, default)
    return num_items.to(accumulation_dtype(hidden.dtype)) if isinstance(num_items, Tensor) else num_items
