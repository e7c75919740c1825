"""Log-probabilities of sequences, and helpers that the losses share: masks and divisors.

The log-probability of a sequence is the sum over its non-ignored targets, log p(y | x) = sum_t log p(y_t | x, y_<t).
The average divides it by the number |y| of these targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.checks import check_sequences
from ligerzoo.losses.objective import token_logps_and_entropy
from ligerzoo.losses.options import LogpOptions, LossInputs, NumItems, takes
from ligerzoo.tensor_checks import check_tensor


@dataclass(frozen=True, kw_only=True)
class SequenceLogpOptions(LogpOptions):
    """Options of `sequence_logps`.

    Attributes:
        average_log_prob: divide by the number of non-ignored targets.
    """

    average_log_prob: bool = False


@takes(SequenceLogpOptions)
def sequence_logps(inputs: LossInputs, options: SequenceLogpOptions) -> Tensor:
    """Returns the log-probability of each sequence of targets, differentiable, without holding all logits.

    Returns:
        (B,) fp32 (fp64 for fp64 input); 0 for a sequence without targets.
    """
    check_sequences(inputs, options.bias)
    logps, _ = token_logps_and_entropy(inputs, options)
    return (masked_mean if options.average_log_prob else masked_sum)(logps, options.target_mask(inputs.target))


@takes(LogpOptions)
def label_logps(inputs: LossInputs, options: LogpOptions) -> Tensor:
    """Returns the log-probability of each target, differentiable, without holding all logits.

    Returns:
        (B, T) fp32 (fp64 for fp64 input); 0 at ignored targets.
    """
    return token_logps_and_entropy(inputs, options)[0]


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
        raise LigerzooError(f"got sequences {tuple(sequences.shape)}", where=name, expected="(N, L)")
    tokens = hidden.flatten(0, 1)
    index = sequences % len(tokens)  # the last token pads: it predicts nothing, so it needs no gradient
    rows = F.embedding(index, tokens, padding_idx=len(tokens) - 1)
    return rows, target.flatten()[index].masked_fill(sequences < 0, -100)


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


def log_ratios(logps: Tensor, mask: Tensor, ref_logps: Tensor, average: bool) -> Tensor:
    """Computes log p(y | x) - log p_ref(y | x) of (B, T) log-probabilities: (B,); divided by |y| to `average`."""
    difference = masked_sum(logps, mask) - ref_logps
    return difference / mask.sum(-1).clamp(min=1) if average else difference


@torch.no_grad()
def summed_mean_logits(inputs: LossInputs, mask: Tensor, options: LogpOptions) -> Tensor | None:
    """Averages each token's logits over the vocabulary, and sums over the tokens in the mask: (B,).

    The logits include `logit_scale`, but not the temperature. No logits are computed: the mean over the vocabulary of
    h @ weight.T is h @ weight.mean(0). Returns None with a softcap, which is not linear.
    """
    if options.softcap is not None:
        return None
    hidden, weight = inputs.hidden, inputs.weight
    dtype = accumulation_dtype(hidden.dtype)
    if weight is None:
        sums = masked_sum(hidden.mean(-1, dtype=dtype), mask)
    else:
        # Sum first: all hidden states in fp32 would need twice the memory.
        hidden_sums = torch.where(mask[..., None], hidden, 0.0).sum(1, dtype=dtype)
        sums = (hidden_sums * weight.mean(0, dtype=dtype)).sum(-1)
    if options.bias is not None:
        sums = sums + mask.sum(-1) * options.bias.mean(dtype=dtype)
    return options.logit_scale * sums


def items_or(num_items: NumItems, default: int | Tensor, hidden: Tensor) -> int | Tensor:
    """Returns `num_items`, or by default `default` but at least 1; tensors in the dtype of the loss of `hidden`."""
    if num_items is None:
        num_items = default.clamp(min=1) if isinstance(default, Tensor) else max(1, default)
    return num_items.to(accumulation_dtype(hidden.dtype)) if isinstance(num_items, Tensor) else num_items
