"""`Strided`: a tensor of heads with its strides, which kernels and their device functions take as one argument."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Strided(NamedTuple):
    """A tensor of (batch, token, head, feature) with adjacent features.

    Attributes:
        ptr: the tensor, in a kernel the pointer.
        batch_stride: distance of batch elements.
        token_stride: distance of tokens.
        head_stride: distance of heads.
    """

    ptr: Tensor
    batch_stride: int
    token_stride: int
    head_stride: int


class StridedFeatures(NamedTuple):
    """A tensor of (batch, token, head, feature) with any strides, see `Strided`."""

    ptr: Tensor
    batch_stride: int
    token_stride: int
    head_stride: int
    feature_stride: int


def strided(x: Tensor) -> Strided:
    """(B, T, heads, D), or (B, T, heads)."""
    return Strided(x, *x.stride()[:3])


def strided_cache(x: Tensor) -> Strided:
    """(B, heads, T, D)."""
    batch_stride, head_stride, token_stride, _ = x.stride()
    return Strided(x, batch_stride, token_stride, head_stride)


def with_adjacent_features(x: Tensor) -> Tensor:
    """A copy if neighbours in the last dimension are not adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()
