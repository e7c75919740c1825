"""Context extension ("rope scaling"): changes the frequencies of a rotary embedding for longer sequences.

Each method is a function of frequencies. Rope types and parameters have the names that Hugging Face uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

REQUIRED_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
"""The required parameters of each rope type."""

_OPTIONAL_PARAMETERS = (
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim",
)  # fmt: skip
MAX_ROTARY_DIM = 2**16
"""Largest number of rotated features per head."""


def default_frequencies(dim: int, theta: float | Tensor) -> Tensor:
    """(R/2,) fp32: theta^(-2i/R) (Su et al. 2021, section 3.2.2)."""
    device = theta.device if isinstance(theta, Tensor) else "cpu"
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def linear_frequencies(frequencies: Tensor, factor: float) -> Tensor:
    """Position interpolation (Chen et al. 2023): divides all positions by `factor`."""
    return frequencies / factor


def dynamic_frequencies(dim: int, theta: float, factor: float, max_position: int, longest: Tensor) -> Tensor:
    """Dynamic NTK scaling: theta grows with the sequence length beyond `max_position`.

    Args:
        dim: R, number of rotated features per head.
        theta: base of the frequencies.
        factor: scaling factor.
        max_position: context length of the model.
        longest: 0-d, largest position plus 1.
    """
    used = longest.clamp(min=max_position)
    exponent = dim / max(dim - 2, 1)  # the only frequency of a single pair is 1 for every theta
    return default_frequencies(dim, theta * (factor * used / max_position - (factor - 1)) ** exponent)


def llama3_frequencies(
    frequencies: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_position: int
) -> Tensor:
    """Llama 3.1: divides low frequencies by `factor`, keeps high ones, and interpolates linearly between them.

    A frequency is low if it completes fewer than `low_freq_factor` rotations within the original context, and high if
    it completes more than `high_freq_factor`.
    """
    rotations = original_max_position * frequencies / (2 * math.pi)
    kept = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


def yarn_frequencies(
    frequencies: Tensor, theta: float, factor: float, original_max_position: int,
    beta_fast: float = 32.0, beta_slow: float = 1.0, truncate: bool = True,
) -> Tensor:  # fmt: skip
    """YaRN (Peng et al. 2023, section 3.2): keeps high frequencies and divides low ones by `factor`.

    Interpolates linearly in the pair index, between the pairs that complete `beta_fast` and `beta_slow` rotations
    within the original context. `truncate` rounds these two indices outwards to integers.
    """
    dim = 2 * frequencies.shape[0]

    def pair_index(rotations: float) -> float:
        return dim * math.log(original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_index(beta_fast), pair_index(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (last - first) or 0.001
    index = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    slowed = ((index - first) / width).clamp(0, 1)
    return slowed * frequencies / factor + (1 - slowed) * frequencies


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """YaRN's factor of cosines and sines, which keeps the entropy of attention in a longer context (eq. 22)."""
    if mscale and mscale_all_dim:
        return _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    return _magnitude(factor, 1.0)


def yarn_score_factor(scaling: Mapping[str, Any] | None) -> float:
    """Returns the factor of attention scores that `mscale_all_dim` asks for.

    DeepSeek's models multiply queries and keys, not only their rotated features, by YaRN's factor.

    Args:
        scaling: as for `RotaryEmbedding`.
    """
    if not scaling or scaling.get("rope_type", "default") == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    return _magnitude(scaling["factor"], scaling["mscale_all_dim"]) ** 2


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_frequencies(dim: int, theta: float, factors: Sequence[float]) -> Tensor:
    """LongRoPE (Ding et al. 2024): divides each frequency by its entry of `factors`."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * theta**exponents)


def longrope_attention_factor(factor: float, original_max_position: int) -> float:
    """LongRoPE's factor of cosines and sines, the same for short and long sequences."""
    extended = factor > 1 and original_max_position > 1
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position)) if extended else 1.0


def scaling_error(scaling: object, dim: int) -> str | None:
    """Returns what is wrong with a scaling of R = `dim` rotated features, or None if it is valid."""
    if not isinstance(scaling, Mapping):
        return f"not a mapping; got {_short(scaling)}; expected a mapping with rope_type and its parameters"
    rope_type = scaling.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in REQUIRED_PARAMETERS:
        return f"unknown rope type; got {_short(rope_type)}; expected one of {', '.join(REQUIRED_PARAMETERS)}"
    required = REQUIRED_PARAMETERS[rope_type]
    for name in (*required, *_OPTIONAL_PARAMETERS):
        value = scaling.get(name)
        if value is None and name not in required:
            continue
        if name in ("short_factor", "long_factor"):
            is_valid = isinstance(value, list | tuple) and len(value) == dim // 2 and all(map(is_positive, value))
            expected = f"a list of {dim // 2} positive numbers, one per pair of rotated features"
        else:
            is_valid, expected = is_positive(value), "a positive number"
        if not is_valid:
            return f"invalid {name} of rope type {rope_type}; got {_short(value)}; expected {expected}"
    if not isinstance(scaling.get("truncate"), bool | None):
        return f"invalid truncate of rope type {rope_type}; got {_short(scaling['truncate'])}; expected true or false"
    if scaling.get("mscale_all_dim") and rope_type != "default" and scaling.get("factor") is None:
        return f"mscale_all_dim of rope type {rope_type} without factor; expected both"
    if rope_type == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        return f"invalid low_freq_factor of rope type llama3; got {low}; expected less than high_freq_factor, {high}"
    return None


def is_rotary_dim(dim: int) -> bool:
    """Whether `dim` can be the number of rotated features per head: even, positive, at most `MAX_ROTARY_DIM`."""
    return dim % 2 == 0 and 0 < dim <= MAX_ROTARY_DIM


def is_theta(theta: object) -> bool:
    """Whether `theta` can be the base of a rotary embedding: a number above 1, up to 1e30."""
    return is_positive(theta) and theta > 1


def is_positive(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a positive number, within limits that keep the formulas above from overflowing."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-30 < value < 1e30


def _short(value: object) -> str:
    return repr(value)[:200]
