"""Formats of quantized tensors in checkpoints, and how they are dequantized to bfloat16.

A quantized tensor is stored as two: values of 4 or 8 bits, and a scale for each block of values. Values and scales are
matrices, or stacks of them with leading dimensions.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

Shape = tuple[int, ...]
Index = tuple[slice, ...]
"""One slice per dimension, with start and stop, and a step of 1 or more."""


class QuantizedFormat(ABC):
    """How quantized tensors are stored.

    Attributes:
        values_suffix: suffix of the name of the values.
        scales_suffix: suffix of the name of the scales.
        values_dtype: dtype of the values, in safetensors.
        scales_dtypes: possible dtypes of the scales, in safetensors.
        values_per_element: values in an element of the stored tensor.
        block_rows: rows of values that share a row of scales.
        valid_scales: what `is_valid` accepts, for error messages.
        entries: accepted values of the entries of `quantization_config`, without `quant_method` and lists of modules.
        required: entries that must be present.
    """

    values_suffix: ClassVar[str]
    scales_suffix: ClassVar[str]
    values_dtype: ClassVar[str]
    scales_dtypes: ClassVar[tuple[str, ...]]
    values_per_element: ClassVar[int]
    block_rows: ClassVar[int]
    valid_scales: ClassVar[str]
    entries: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    required: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def shapes(self, values: Shape) -> tuple[Shape, Shape] | None:
        """Returns the shapes of the scales and of the tensor; None if values cannot have this shape."""

    @abstractmethod
    def cover(self, index: Index) -> tuple[Index, Index, Index]:
        """Returns the whole blocks that contain a slice of the tensor.

        Returns:
            An index into the values, one into the scales, and one into the dequantized matrices that selects the slice.
        """

    @abstractmethod
    def dequantize(self, values: Tensor, scales: Tensor, out: Tensor) -> None:
        """Writes a dequantized matrix to `out`, a contiguous bfloat16 tensor. The blocks begin at its first element."""

    def arrange(self, matrices: Tensor) -> Tensor:
        """Returns dequantized matrices with the dimensions of the tensor."""
        return matrices

    @abstractmethod
    def is_valid(self, scales: Tensor) -> bool:
        """Returns whether no value of the format times one of these scales exceeds the range of bfloat16."""


class Mxfp4(QuantizedFormat):
    """MXFP4: blocks of 32 values of 4 bits (E2M1) in a row, with a power of 2 as scale (E8M0).

    `X_blocks` is (..., R, C/32, 16), with two values per byte, the low four bits first. `X_scales` is (..., R, C/32),
    with exponents plus 127. The tensor X is (..., C, R): transposed, as the same model's files in bfloat16 have it.
    All products are exact in bfloat16, subnormal ones too. Scales of 253 and more are invalid: 6 * 2**126 exceeds the
    range of bfloat16, and 255 means NaN.

    Source: Open Compute Project, Microscaling Formats (MX) 1.0.
    """

    values_suffix, scales_suffix = "_blocks", "_scales"
    values_dtype, scales_dtypes = "U8", ("U8",)
    values_per_element, block_rows = 2, 1
    valid_scales = "at most 252, with which 6 * 2**(scale - 127) is finite in bfloat16"

    def shapes(self, values: Shape) -> tuple[Shape, Shape] | None:
        if len(values) < 3 or values[-1] != 16:
            return None
        *stack, rows, groups, _ = values
        return values[:-1], (*stack, groups * 32, rows)

    def cover(self, index: Index) -> tuple[Index, Index, Index]:
        *stack, columns, rows = index
        groups, chosen = _cover(columns, 32)
        blocks = (*stack, rows, groups)
        return blocks, blocks, (slice(None), chosen)

    def dequantize(self, values: Tensor, scales: Tensor, out: Tensor) -> None:
        index = values.to(torch.int32)
        index += scales.to(torch.int32).mul_(256)[..., None]
        pairs = out.view(torch.int32).view(-1)
        torch.index_select(_mxfp4_pairs(out.device), 0, index.view(-1), out=pairs)

    def arrange(self, matrices: Tensor) -> Tensor:
        return matrices.mT

    def is_valid(self, scales: Tensor) -> bool:
        return int(scales.max()) <= 252


@cache
def _mxfp4_pairs(device: torch.device) -> Tensor:
    """Returns the two bfloat16 values, as one int32, of each scale and byte: entry `256 * scale + byte`."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device="cpu")
    values = torch.cat([magnitudes, -magnitudes])
    scales = 2.0 ** (torch.arange(256, dtype=torch.float64, device="cpu") - 127)
    products = (scales[:, None] * values).bfloat16()
    byte = torch.arange(256, device="cpu")
    pairs = torch.stack([products[:, byte % 16], products[:, byte // 16]], dim=-1)
    return pairs.view(torch.int32).flatten().to(device)


class Fp8Blocks(QuantizedFormat):
    """FP8 (E4M3) matrices with a scale per block of 128 x 128, as of DeepSeek-V3.

    `W` is (..., R, C), and `W_scale_inv` is (..., ceil(R/128), ceil(C/128)): the last blocks of rows and columns are
    smaller. The tensor is `W * scale` in fp32, rounded to bfloat16.
    """

    values_suffix, scales_suffix = "", "_scale_inv"
    values_dtype, scales_dtypes = "F8_E4M3", ("F32", "BF16")
    values_per_element, block_rows = 1, 128
    entries: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "weight_block_size": ([128, 128],),
        "fmt": ("e4m3", "float8_e4m3fn"),
        "activation_scheme": ("dynamic",),
        "scale_fmt": ("float", "ue8m0"),  # DeepSeek-V3.1's scales are powers of 2, stored in fp32
        "expert_dtype": ("fp8",),
        "modules_to_convert": ([],),
        "dequantize": (False, True),  # what transformers loads
    }
    required = frozenset({"weight_block_size"})
    valid_scales = "finite, 0 or more, and 448 * scale finite in bfloat16"

    def shapes(self, values: Shape) -> tuple[Shape, Shape] | None:
        if len(values) < 2:
            return None
        *stack, rows, columns = values
        return (*stack, -(-rows // 128), -(-columns // 128)), values

    def cover(self, index: Index) -> tuple[Index, Index, Index]:
        *stack, rows, columns = index
        (row_blocks, chosen_rows), (column_blocks, chosen_columns) = _cover(rows, 128), _cover(columns, 128)
        values = (slice(128 * blocks.start, 128 * blocks.stop) for blocks in (row_blocks, column_blocks))
        return (*stack, *values), (*stack, row_blocks, column_blocks), (chosen_rows, chosen_columns)

    def dequantize(self, values: Tensor, scales: Tensor, out: Tensor) -> None:
        rows, columns = values.shape
        by_column = scales.float().repeat_interleave(128, dim=1)[:, :columns]
        torch.mul(values.float(), by_column.repeat_interleave(128, dim=0)[:rows], out=out)

    def is_valid(self, scales: Tensor) -> bool:
        largest = scales.float() * 448
        return bool(((largest >= 0) & largest.bfloat16().isfinite()).all())


FORMATS: Mapping[str, QuantizedFormat] = {"mxfp4": Mxfp4(), "fp8": Fp8Blocks()}
"""The formats by `quant_method` in config.json."""


def _cover(chosen: slice, block: int) -> tuple[slice, slice]:
    """Returns the blocks that contain a slice, and the slice relative to the first of them."""
    first = chosen.start // block
    offset = first * block
    return slice(first, -(-chosen.stop // block)), slice(chosen.start - offset, chosen.stop - offset, chosen.step)
