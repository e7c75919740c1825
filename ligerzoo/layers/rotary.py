"""Rotary position embedding: cosines and sines of positions, with which `ligerzoo.kernels.rope` rotates q and k.

A rotary embedding is defined by its frequencies: pair i of the R rotated features is rotated by
`position * frequency[i]` radians. `rope_scaling` computes the frequencies. Frequencies and angles are always fp32. They
are not buffers, so that meta initialization cannot lose them and `model.to(dtype)` cannot cast them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.layers.rope_scaling import (
    MAX_ROTARY_DIM,
    ROPE_TYPES,
    Rope,
    Scaling,
    is_rotary_dim,
    is_theta,
    scaling_error,
)
from ligerzoo.tensor_checks import explains_options


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions.

    Args:
        dim: R, number of rotated features per head; even.
        theta: base of the frequencies; above 1.
        scaling: context extension ("rope scaling"), `{"rope_type": ..., its parameters}`; see
            `ligerzoo.layers.rope_scaling.ROPE_TYPES`. None for no scaling.
        max_position_embeddings: context length of the model, in tokens; some methods only change longer sequences.
        interleaved: rotate features 2i and 2i + 1 as a pair, instead of i and i + R/2.
        in_fp32: rotate queries and keys in fp32 for every dtype.

    Raises:
        ValueError: `dim` is odd or out of range, `theta` is not above 1, or `scaling` has an unknown type or an invalid
            parameter.
    """

    @explains_options
    def __init__(
        self,
        dim: int,
        theta: float = 10000.0,
        scaling: Scaling | None = None,
        max_position_embeddings: int = 2048,
        *,
        interleaved: bool = False,
        in_fp32: bool = False,
    ) -> None:
        super().__init__()
        scaling = {} if scaling is None else scaling
        if not is_rotary_dim(dim):
            raise ValueError(f"RotaryEmbedding: dim={dim}; expected an even number, 2 to {MAX_ROTARY_DIM}")
        if not is_theta(theta):
            raise ValueError(f"RotaryEmbedding: theta={theta!r}; expected a number above 1, up to 1e30")
        if error := scaling_error(scaling, dim):
            raise ValueError(f"RotaryEmbedding: scaling: {error}")
        self.interleaved, self.in_fp32 = interleaved, in_fp32
        theta = float(theta)  # torch accepts integers of at most 64 bits
        self.rope = Rope(dim, theta, max_position_embeddings, dict(scaling))
        self.dim, self.theta, self.rope_type = dim, theta, scaling.get("rope_type", "default")
        self.original_max_position = self.rope.original_max_position
        kind = ROPE_TYPES[self.rope_type]
        self.attention_factor = kind.attention_factor(self.rope)
        self._frequencies_on = {torch.device("cpu"): kind.frequencies(self.rope)}

    def frequencies(self, position_ids: Tensor) -> Tensor:
        """Returns (R/2,) fp32 on the device of `position_ids`. Some types depend on the largest position."""
        device, choose = position_ids.device, ROPE_TYPES[self.rope_type].choose
        if device not in self._frequencies_on:
            self._frequencies_on[device] = self._frequencies_on[torch.device("cpu")].to(device)
        frequencies = self._frequencies_on[device]
        return frequencies if choose is None else choose(self.rope, frequencies, position_ids.max() + 1)

    @property
    def max_independent_length(self) -> int | None:
        """Length up to which the frequencies do not depend on the longest sequence of the batch; None for no limit."""
        length = ROPE_TYPES[self.rope_type].max_independent_length
        return None if length is None else length(self.rope)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, each (..., T, R/2), computed in fp32.

        Args:
            position_ids: (..., T), integers.
            dtype: dtype of the result, unless `in_fp32` is set.
        """
        angles = position_ids[..., None].float() * self.frequencies(position_ids)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return (cos, sin) if self.in_fp32 else (cos.to(dtype), sin.to(dtype))

    def extra_repr(self) -> str:
        return f"{self.dim}, theta={self.theta}, rope_type={self.rope_type!r}"


class ReversedRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding by the negative angles (nanochat)."""

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, each (..., T, R/2); see `RotaryEmbedding`."""
        cos, sin = super().forward(position_ids, dtype)
        return cos, -sin


class SectionedRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of positions on several axes: M-RoPE (Qwen2-VL, Wang et al. 2024, section 2.1).

    Each axis rotates some of the feature pairs. Equals `RotaryEmbedding` if the positions on all axes are the same.

    Args:
        sections: number of feature pairs that each axis rotates (time, height, width).
        arguments: positional arguments of `RotaryEmbedding`.
        options: keyword arguments of `RotaryEmbedding`.
    """

    def __init__(self, sections: Sequence[int], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sections = tuple(sections)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, each (B, T, R/2).

        Args:
            position_ids: (A, B, T), integers on each of A axes, or (B, T) for the same positions on all axes.
            dtype: dtype of the result, unless `in_fp32` is set.

        Raises:
            ValueError: the number of axes is not the number of sections.
        """
        cos, sin = super().forward(position_ids, dtype)
        if position_ids.ndim == 2:
            return cos, sin
        if len(position_ids) != len(self.sections):
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)}; expected (B, T) or ({len(self.sections)}, B, T)"
            )
        return self.select(cos), self.select(sin)

    def select(self, angles: Tensor) -> Tensor:
        """Selects the axis of each feature pair: (A, B, T, R/2) -> (B, T, R/2)."""
        return sectioned(angles, self.sections)


class InterleavedSectionedRotaryEmbedding(SectionedRotaryEmbedding):
    """`SectionedRotaryEmbedding` whose axes alternate: interleaved M-RoPE (Qwen3-VL, Bai et al. 2025, section 2).

    Each axis then rotates pairs of low and of high frequency. The arguments are those of `SectionedRotaryEmbedding`.
    """

    def select(self, angles: Tensor) -> Tensor:
        return interleaved(angles, self.sections)


class AxialRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of positions on several axes, each rotating R / A features by the same frequencies.

    Args:
        axes: A, number of axes.
        dim: R, number of rotated features of all axes together.
        arguments: the other positional arguments of `RotaryEmbedding`.
        options: keyword arguments of `RotaryEmbedding`.
    """

    def __init__(self, axes: int, dim: int, *arguments: Any, **options: Any) -> None:
        super().__init__(dim // axes, *arguments, **options)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids: (A, B, T), integers -> cosines and sines, each (B, T, R/2)."""
        cos, sin = super().forward(position_ids, dtype)
        return torch.cat(cos.unbind(), -1), torch.cat(sin.unbind(), -1)


class AlternatingRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of positions on several axes, which alternate from frequency to frequency (Pixtral).

    The pairs of the first axis come first, then those of the second.

    Args:
        axes: A, number of axes.
        dim: R, number of rotated features of all axes together.
        theta: base of the frequencies.
    """

    def __init__(self, axes: int, dim: int, theta: float = 10000.0) -> None:
        super().__init__(dim, theta)
        self.axes = axes

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids: (A, B, T), integers -> cosines and sines, each (B, T, R/2)."""
        cos, sin = (
            torch.cat([one[axis, ..., axis :: self.axes] for axis in range(self.axes)], -1)
            for one in super().forward(position_ids, dtype)
        )
        return cos, sin


def sectioned(angles: Tensor, sections: Sequence[int]) -> Tensor:
    """Selects the axis of each feature pair, as in multimodal rotary embedding (Qwen2-VL, Wang et al. 2024).

    Args:
        angles: (A, B, T, R/2), angles on each of A axes (time, height, width), or their cosines or sines.
        sections: number of consecutive feature pairs that take the first axis, the second, and so on. After the last
            axis the sections start again with the first.

    Returns:
        (B, T, R/2).

    Raises:
        ValueError: the sections do not add up to R/2.
    """
    if sum(sections) != angles.shape[-1]:
        raise ValueError(f"sectioned: got sections {tuple(sections)}; expected a sum of R/2 = {angles.shape[-1]}")
    pieces = angles.split_with_sizes(list(sections), dim=-1)
    return torch.cat([piece[i % len(piece)] for i, piece in enumerate(pieces)], dim=-1)


def interleaved(angles: Tensor, sections: Sequence[int]) -> Tensor:
    """Selects the axis of each feature pair in alternation, as in interleaved M-RoPE (Qwen3-VL, Bai et al. 2025).

    Pair i takes axis i % A, while that axis has pairs left. The other pairs take the first axis.

    Args:
        angles: see `sectioned`.
        sections: number of feature pairs of each axis.

    Returns:
        (B, T, R/2).

    Raises:
        ValueError: the sections do not add up to R/2, or alternating pairs do not reach the number of an axis.
    """
    axes, pairs = len(sections), angles.shape[-1]
    if not are_interleaved_sections(sections, pairs):
        raise ValueError(f"interleaved: got sections {tuple(sections)}; expected alternating axes of {pairs} pairs")
    selected = angles[0].clone()
    for axis in range(1, axes):
        chosen = slice(axis, axes * sections[axis], axes)
        selected[..., chosen] = angles[axis, ..., chosen]
    return selected


def are_interleaved_sections(sections: Sequence[int], pairs: int) -> bool:
    """Returns whether `interleaved` gives each axis its number of feature pairs, of `pairs` in all."""
    axes = len(sections)
    last = [axis + axes * (size - 1) for axis, size in enumerate(sections) if axis and size]
    return sum(sections) == pairs and max(last, default=0) < pairs
