"""Weights that torchao has quantized, without their activations: tensor subclasses that compute their own products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.fp8 import FP8

# Their products launch kernels with constant shapes, without host syncs.
_CLASSES = frozenset({"Int8Tensor", "Float8Tensor", "Int4Tensor", "Int4TilePackedTo4dTensor"})


class Int8Weight(NamedTuple):
    """A weight scale * data, with one scale for each row.

    Attributes:
        data: (N, K) int8.
        scale: (N,) fp32.
    """

    data: Tensor
    scale: Tensor


def is_quantized(weight: Tensor | None) -> bool:
    """Whether a weight is of one of torchao's classes, and its activations are not quantized.

    A captured CUDA graph may contain its products.
    """
    kind = type(weight)
    is_known = kind.__module__.startswith("torchao.quantization") and kind.__name__ in _CLASSES
    activation_dtype = getattr(weight, "activation_dtype", None)
    return is_known and getattr(weight, "act_quant_kwargs", None) is None and activation_dtype != FP8


def stored_tensors(weight: Tensor) -> list[Tensor]:
    """Returns the plain tensors that a weight consists of: of a quantized one, integers and scales."""
    if not is_quantized(weight):
        return [weight]
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    return [tensor for name in names for tensor in stored_tensors(getattr(weight, name))]


def as_int8(weight: Tensor) -> Int8Weight | None:
    """Returns what torchao stores of a weight in symmetric int8 with one scale for each row; None for other weights."""
    if not (is_quantized(weight) and type(weight).__name__ == "Int8Tensor"):
        return None
    data, scale = (getattr(weight, name) for name in ("qdata", "scale"))
    has_rows = data.ndim == 2 and scale.numel() == len(data) and scale.dtype == torch.float32
    has_factors = getattr(weight, "act_pre_scale", None) is not None
    return Int8Weight(data, scale.reshape(-1)) if has_rows and not has_factors else None
