"""Functions of logits: temperature, repetition penalty, top-k, top-p and min-p."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def penalize_repetition(logits: Tensor, occurred: Tensor, penalty: float | Tensor) -> Tensor:
    """Makes tokens that have occurred less likely: divides positive logits by `penalty` and multiplies negative ones.

    Args:
        logits: (B, V).
        occurred: (B, V) bool, whether the token has occurred.
        penalty: a positive number, or (B, 1) of them. 1 has no effect; less than 1 makes these tokens more likely
            (Keskar et al. 2019).
    """
    return torch.where(occurred, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(
    logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Tensor:
    """Applies the temperature, then each filter that is not None, to logits (..., V)."""
    logits = apply_temperature(logits, temperature)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    return logits


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divides logits by a positive temperature: below 1 sharpens the distribution, above 1 flattens it."""
    return logits / temperature


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Sets all logits to -inf but the `top_k` largest and those equal to the smallest of these (Fan et al. 2018)."""
    smallest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < smallest, -math.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest most likely tokens whose total probability reaches `top_p`; sets the other logits to -inf.

    Ties are broken in favour of the lower token id. `top_p` is in (0, 1]; 1 keeps all tokens (Holtzman et al. 2019).
    """
    if top_p == 1:
        return logits  # rounded probabilities may sum to 1 before the last token
    descending, order = logits.sort(descending=True, stable=True)
    probabilities = descending.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    dropped_in_order = mass_before >= top_p
    dropped_in_order[..., 0] = False  # a tiny top_p may round to 0
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, dropped_in_order)
    return logits.masked_fill(dropped, -math.inf)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Sets the logits of tokens to -inf whose probability is below `min_p` times the largest (Nguyen et al. 2024).

    `min_p` is in [0, 1].
    """
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -math.inf)
