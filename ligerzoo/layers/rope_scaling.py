"""Context extension ("rope scaling"): changes the frequencies of a rotary embedding for longer sequences.

`ROPE_TYPES` lists the methods; types and parameters have Hugging Face's names. A new one is a row and its formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ligerzoo.checks import is_list, is_number, is_text

Scaling = Mapping[str, Any]
"""A rope type and its parameters, `{"rope_type": ..., its parameters}`."""

_OPTIONAL_PARAMETERS = (
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "partial_rotary_factor",
)  # fmt: skip
MAX_ROTARY_DIM = 2**16
"""Largest number of rotated features per head."""


class Rope(NamedTuple):
    """What the frequencies follow from.

    Attributes:
        dim: R, number of rotated features per head.
        theta: base of the frequencies.
        max_position: context length of the model.
        scaling: the parameters of the rope type.
    """

    dim: int
    theta: float
    max_position: int
    scaling: Scaling

    @property
    def original_max_position(self) -> int:
        """Context length before the extension."""
        return self.scaling.get("original_max_position_embeddings") or self.max_position

    @property
    def factor(self) -> float:
        """By how much the context is extended."""
        return self.scaling.get("factor") or self.max_position / self.original_max_position

    def frequencies(self) -> Tensor:
        """Returns those without scaling, (R/2,) fp32."""
        return default_frequencies(self.dim, self.theta)


class RopeType(NamedTuple):
    """A method of context extension.

    Attributes:
        required: its required parameters.
        frequencies: (R/2,) fp32, or those from which `choose` chooses.
        attention_factor: factor of cosines and sines.
        choose: the frequencies for a sequence, from these and the largest position plus 1, 0-d; None if they do not
            depend on it.
        max_independent_length: length up to which `choose` ignores the length.
    """

    required: tuple[str, ...] = ()
    frequencies: Callable[[Rope], Tensor] = Rope.frequencies
    attention_factor: Callable[[Rope], float] = lambda rope: 1.0
    choose: Callable[[Rope, Tensor, Tensor], Tensor] | None = None
    max_independent_length: Callable[[Rope], int] | None = None


def default_frequencies(dim: int, theta: float | Tensor) -> Tensor:
    """(R/2,) fp32: theta^(-2i/R) (Su et al. 2021, section 3.2.2)."""
    device = theta.device if isinstance(theta, Tensor) else "cpu"
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def _linear(rope: Rope) -> Tensor:
    """Position interpolation (Chen et al. 2023): divides all positions by the factor."""
    return rope.frequencies() / rope.factor


def _dynamic(rope: Rope, frequencies: Tensor, longest: Tensor) -> Tensor:
    """Dynamic NTK scaling: theta grows with the sequence length beyond `max_position`."""
    dim, theta, max_position, _ = rope
    used = longest.clamp(min=max_position)
    exponent = dim / max(dim - 2, 1)  # the only frequency of a single pair is 1 for every theta
    stretched = default_frequencies(dim, theta * (rope.factor * used / max_position - (rope.factor - 1)) ** exponent)
    return torch.where(longest > max_position, stretched, frequencies)


def _proportional(rope: Rope) -> Tensor:
    """Gemma 4: rotates the pairs of high frequency, a fraction `partial_rotary_factor` of all, and not the others."""
    frequencies = rope.frequencies() / (rope.scaling.get("factor") or 1.0)
    frequencies[int((rope.scaling.get("partial_rotary_factor") or 1.0) * rope.dim // 2) :] = 0
    return frequencies


def _llama3(rope: Rope) -> Tensor:
    """Llama 3.1: divides low frequencies by the factor, keeps high ones, and interpolates linearly between them.

    A frequency is low if it completes fewer than `low_freq_factor` rotations within the original context, and high if
    it completes more than `high_freq_factor`.
    """
    frequencies, low, high = rope.frequencies(), rope.scaling["low_freq_factor"], rope.scaling["high_freq_factor"]
    rotations = rope.original_max_position * frequencies / (2 * math.pi)
    kept: Tensor = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: Rope) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): keeps high frequencies and divides low ones by the factor.

    Interpolates linearly in the pair index, between the pairs that complete `beta_fast` and `beta_slow` rotations
    within the original context. `truncate` rounds these two indices outwards to integers.
    """
    dim, frequencies = rope.dim, rope.frequencies()

    def pair_index(rotations: float) -> float:
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = pair_index(rope.scaling.get("beta_fast") or 32.0)
    last = pair_index(rope.scaling.get("beta_slow") or 1.0)
    if rope.scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (last - first) or 0.001
    index = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    slowed = ((index - first) / width).clamp(0, 1)
    return slowed * frequencies / rope.factor + (1 - slowed) * frequencies


def _yarn_attention_factor(rope: Rope) -> float:
    """YaRN's factor of cosines and sines, which keeps the entropy of attention in a longer context (eq. 22)."""
    names = "attention_factor", "mscale", "mscale_all_dim"
    given, mscale, all_dim = (rope.scaling.get(name) for name in names)
    if mscale and all_dim:
        return given or _magnitude(rope.factor, mscale) / _magnitude(rope.factor, all_dim)
    return given or _magnitude(rope.factor, 1.0)


def yarn_score_factor(scaling: Scaling | None) -> float:
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


def _longrope(rope: Rope) -> Tensor:
    """LongRoPE (Ding et al. 2024): divides each frequency by its factor; (2, R/2), for short and long sequences."""
    factors = [rope.scaling[name] for name in ("short_factor", "long_factor")]
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device="cpu") / rope.dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * rope.theta**exponents)


def _short_or_long(rope: Rope, frequencies: Tensor, longest: Tensor) -> Tensor:
    short, long = frequencies.unbind()
    return torch.where(longest > rope.original_max_position, long, short)


def _longrope_attention_factor(rope: Rope) -> float:
    """LongRoPE's factor of cosines and sines, the same for short and long sequences."""
    factor, original = rope.factor, rope.original_max_position
    extended = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return rope.scaling.get("attention_factor") or extended


ROPE_TYPES: Mapping[str, RopeType] = {
    "default": RopeType(),
    "linear": RopeType(("factor",), _linear),
    "dynamic": RopeType(("factor",), choose=_dynamic, max_independent_length=lambda rope: rope.max_position),
    "proportional": RopeType((), _proportional),
    "llama3": RopeType(("factor", "low_freq_factor", "high_freq_factor"), _llama3),
    "yarn": RopeType(("factor",), _yarn, _yarn_attention_factor),
    "longrope": RopeType(
        ("short_factor", "long_factor"),
        _longrope,
        _longrope_attention_factor,
        choose=_short_or_long,
        max_independent_length=lambda rope: rope.original_max_position,
    ),
}
"""The rope types by name."""


def scaling_error(scaling: object, dim: int) -> str | None:
    """Returns what is wrong with a scaling of R = `dim` rotated features, or None if it is valid."""
    if not isinstance(scaling, Mapping):
        return f"not a mapping; got {_short(scaling)}; expected a mapping with rope_type and its parameters"
    rope_type = scaling.get("rope_type", "default")
    if not is_text(rope_type) or rope_type not in ROPE_TYPES:
        return f"unknown rope type; got {_short(rope_type)}; expected one of {', '.join(ROPE_TYPES)}"
    required = ROPE_TYPES[rope_type].required
    for name in (*required, *_OPTIONAL_PARAMETERS):
        value = scaling.get(name)
        if value is None and name not in required:
            continue
        if name in ("short_factor", "long_factor"):
            is_valid = is_list(value) and len(value) == dim // 2 and all(map(is_positive, value))
            expected = f"a list of {dim // 2} positive numbers, one per pair of rotated features"
        else:
            is_valid, expected = is_positive(value), "a positive number"
        if not is_valid:
            return f"invalid {name} of rope type {rope_type}; got {_short(value)}; expected {expected}"
    if (scaling.get("partial_rotary_factor") or 0) > 1:
        got = _short(scaling["partial_rotary_factor"])
        return f"invalid partial_rotary_factor of rope type {rope_type}; got {got}; expected at most 1"
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
    return is_number(value) and 1e-30 < value < 1e30


def _short(value: object) -> str:
    return repr(value)[:200]
