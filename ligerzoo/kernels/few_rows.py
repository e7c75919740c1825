"""Linear layers applied to few rows without gradients, as in each step of decoding.

    linears:      y_i = x W_i^T + b_i              several projections of the same rows, in one kernel
    linear_glu:   y = a(x G^T + g) * (x U^T + u)   the gate, the up projection and their product, in one kernel

`linears` has both functions.

With few rows the time is that of reading the weights. Up to 64 rows are the right operand of a matrix product,
transposed, whose left operand, the weight, streams through shared memory. Where sums may be split, see `row_sums`, a
single row is multiplied and summed without matrix units, and torch's own products compute several rows with so few
outputs that cuBLAS, which splits the sums among multiprocessors, is faster. They also compute everything else: more
rows, inputs that need gradients, and other dtypes than bf16 and fp16.

Weights may be int8 with a scale for each row, W = scale * integers. They are converted in registers, which is exact,
and the scale multiplies the sums: half the bytes are read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.activation import Activation, activate
from ligerzoo.kernels.autograd import under_transform
from ligerzoo.kernels.dispatch import Backend, as_rows, cdiv, padded_size, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.row_sums import splits_row_sums, would_split
from ligerzoo.kernels.tiling import StridedRows

MAX_ROWS = 64
_MAX_WEIGHTS = 3
FEW_ROWS_DTYPES = (torch.bfloat16, torch.float16)


class _Three(NamedTuple):
    """Tensors of up to three projections."""

    first: Tensor | None = None
    second: Tensor | None = None
    third: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple([0 if t is None else t.shape[0] for t in self])


class _Operands(NamedTuple):
    """Tensors of the same kind for up to three projections: the first, and the distances of the others from it."""

    ptr: Tensor | None
    distance_1: int
    distance_2: int


_NO_OPERANDS = _Operands(None, 0, 0)


class _Outputs(NamedTuple):
    """The result, the numbers of outputs of each weight, and of programs of the first two."""

    ptr: Tensor
    size_0: int
    size_1: int
    size_2: int
    tiles_0: int
    tiles_1: int


@jit
def _part(program, out, value_0, value_1, value_2):
    """The value of the weight that a program computes.

    With an activation all programs compute the first, the gate, and the second, the up projection.
    """
    tiles = out.tiles_0 + out.tiles_1
    return tl.where(program < out.tiles_0, value_0, tl.where(program < tiles, value_1, value_2))


@jit
def _distance(x, program, out):
    """Distance of a program's tensor from the first one."""
    return _part(program, out, 0, x.distance_1, x.distance_2)


@jit
def _scale_and_shift(sums, scale, bias, scale_distance, bias_distance, outputs, mask):
    """The sums of these outputs, times their scales, plus their biases."""
    if scale.ptr is not None:
        sums *= tl.load(scale.ptr + scale_distance + outputs, mask=mask, other=0.0)
    if bias.ptr is not None:
        sums += tl.load(bias.ptr + bias_distance + outputs, mask=mask, other=0.0).to(tl.float32)
    return sums


@jit
def _rounded(x, out):
    """fp32 values rounded to the dtype of the output, as separate products of the gate and the up projection are."""
    return x.to(out.ptr.dtype.element_ty).to(tl.float32)


@kernel
def _row_kernel(
    x_ptr, weight, bias, scale, out, n_features, ACTIVATION: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr
):
    BLOCK_N: tl.constexpr = TILE[0]
    BLOCK_K: tl.constexpr = TILE[1]
    STAGES: tl.constexpr = TILE[2]
    program = tl.program_id(0)
    first = _part(program, out, 0, out.tiles_0, out.tiles_0 + out.tiles_1)
    outputs = (program - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    features = tl.arange(0, BLOCK_K)
    in_size = outputs < _part(program, out, out.size_0, out.size_1, out.size_2)
    distance = _distance(weight, program, out)
    rows = weight.ptr + distance + outputs[:, None].to(tl.int64) * n_features + features[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, n_features, BLOCK_K, num_stages=STAGES):  # without a matrix product, not by default
        mask = in_size[:, None]
        if EVEN:
            x = tl.load(x_ptr + start + features).to(tl.float32)
        else:
            in_row = start + features < n_features
            x = tl.load(x_ptr + start + features, mask=in_row, other=0.0).to(tl.float32)
            mask = mask & in_row[None, :]
        sums += x[None, :] * tl.load(rows + start, mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION is not None:
            up = tl.load(rows + start + weight.distance_1, mask=mask, other=0.0)
            up_sums += x[None, :] * up.to(tl.float32)
    y = tl.sum(sums, axis=1)
    scale_distance, bias_distance = _distance(scale, program, out), _distance(bias, program, out)
    y = _scale_and_shift(y, scale, bias, scale_distance, bias_distance, outputs, in_size)
    if ACTIVATION is not None:
        up = tl.sum(up_sums, axis=1)
        up = _scale_and_shift(up, scale, bias, scale.distance_1, bias.distance_1, outputs, in_size)
        y, _ = activate(_rounded(y, out), ACTIVATION, False)
        y = y * _rounded(up, out)
    offset = _part(program, out, 0, out.size_0, out.size_0 + out.size_1)
    tl.store(out.ptr + offset + outputs, y.to(out.ptr.dtype.element_ty), mask=in_size)


@kernel
def _rows_kernel(
    x, weight, bias, scale, out, n_rows, n_features, n_out,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    BLOCK_N: tl.constexpr = TILE[0]
    BLOCK_K: tl.constexpr = TILE[1]
    program = tl.program_id(0)
    first = _part(program, out, 0, out.tiles_0, out.tiles_0 + out.tiles_1)
    outputs = (program - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    features = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, ROWS)
    in_size, in_rows = outputs < _part(program, out, out.size_0, out.size_1, out.size_2), rows < n_rows
    distance = _distance(weight, program, out)
    weights = weight.ptr + distance + outputs[:, None].to(tl.int64) * n_features + features[None, :]
    inputs = x.ptr + rows[None, :] * x.row_stride + features[:, None]
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    up_sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for start in range(0, n_features, BLOCK_K):
        x_mask, w_mask = in_rows[None, :], in_size[:, None]
        if not EVEN:
            in_row = start + features < n_features
            x_mask, w_mask = x_mask & in_row[:, None], w_mask & in_row[None, :]
        columns = tl.load(inputs + start, mask=x_mask, other=0.0)
        w = tl.load(weights + start, mask=w_mask, other=0.0).to(columns.dtype)
        sums = tl.dot(w, columns, sums)
        if ACTIVATION is not None:
            up = tl.load(weights + start + weight.distance_1, mask=w_mask, other=0.0).to(columns.dtype)
            up_sums = tl.dot(up, columns, up_sums)
    column, in_column = outputs[:, None], in_size[:, None]
    scale_distance, bias_distance = _distance(scale, program, out), _distance(bias, program, out)
    sums = _scale_and_shift(sums, scale, bias, scale_distance, bias_distance, column, in_column)
    if ACTIVATION is not None:
        up_sums = _scale_and_shift(up_sums, scale, bias, scale.distance_1, bias.distance_1, column, in_column)
        active, _ = activate(_rounded(sums, out), ACTIVATION, False)
        sums = active * _rounded(up_sums, out)
    offset = _part(program, out, 0, out.size_0, out.size_0 + out.size_1)
    pointers = out.ptr + rows[None, :] * n_out + offset + outputs[:, None]
    tl.store(pointers, sums.to(out.ptr.dtype.element_ty), mask=in_rows[None, :] & in_size[:, None])


class _Launch(NamedTuple):
    """How a kernel divides its work.

    Attributes:
        tile: output features of a program, input features that it reads at a time, and such reads in flight.
        warps: warps of a program.
        tiles: number of tiles of each weight.
        programs: number of programs.
    """

    tile: tuple[int, int, int]
    warps: int
    tiles: list[int]
    programs: int


@functools.lru_cache(1024)
def _launch(is_row: bool, sizes: tuple[int, ...], is_glu: bool) -> _Launch:
    """With the fastest tile measured on an H200. `is_row`: for a single row, whose sums may be split."""
    n_outputs = sizes[0] if is_glu else sum(sizes)
    if is_row:
        tile, warps = ((16, 256, 3) if n_outputs > 4096 or is_glu else (8, 512, 3)), 4
    elif is_glu:
        tile, warps = (64, 128, 4), 4
    else:
        tile, warps = ((128, 128, 4), 8) if n_outputs > 32768 else ((64, 128, 6), 4)
    tiles = [cdiv(size, tile[0]) for size in sizes]
    return _Launch(tile, warps, tiles, tiles[0] if is_glu else sum(tiles))


def _operands(tensors: _Three) -> _Operands:
    first, second, third = tensors
    return _NO_OPERANDS if first is None else _Operands(first, _elements(first, second), _elements(first, third))


def _elements(first: Tensor, other: Tensor | None) -> int:
    """The distance of a tensor from the first one in elements, which a kernel adds to its pointer to that."""
    return 0 if other is None else (other.data_ptr() - first.data_ptr()) // first.element_size()


@register(
    "few_rows",
    fake=lambda x, weights, activation: x.new_empty(
        *x.shape[:-1], sum(weights.sizes) if activation is None else weights.sizes[0]
    ),
)
def _few_rows(
    x: Tensor, weights: _Three, biases: _Three, scales: _Three, activation: Activation | None, splits: bool
) -> Tensor:
    """(..., K) -> (..., N_0 + N_1 + N_2); with an activation, (..., I) from the weights of gate and up projection.

    Unless sums may be split (`splits`), a row of the result does not depend on the number of rows.
    """
    sizes, n_features, is_glu = weights.sizes, x.shape[-1], activation is not None
    n_rows, n_outputs = x.numel() // n_features, sizes[0] if is_glu else sum(sizes)
    is_row, out = splits and n_rows == 1, x.new_empty(*x.shape[:-1], n_outputs)
    tile, warps, tiles, programs = _launch(is_row, sizes, is_glu)
    operands = _operands(weights), _operands(biases), _operands(scales)
    x, targets, is_even = as_rows(x), _Outputs(out, *sizes, *tiles[:2]), n_features % tile[1] == 0
    if is_row:
        _row_kernel[programs](x, *operands, targets, n_features, activation, tile, is_even, num_warps=warps)
    else:
        rows, numbers = StridedRows(x, x.stride(0)), (n_rows, n_features, n_outputs)
        tile_rows, stages = padded_size(n_rows), tile[2]
        _rows_kernel[programs](
            rows, *operands, targets, *numbers, activation, tile_rows, tile, is_even, num_warps=warps, num_stages=stages
        )
    return out


def uses_few_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    backend: Backend,
    scales: Sequence[Tensor] | None = None,
) -> bool:
    """Whether the kernels of this file compute products of x with these weights, which are int8 if there are scales."""
    return (
        backend != "torch"
        and _reads(x)
        and _match(x, weights, biases, scales)
        and (backend == "triton" or scales is not None or _is_better(x, weights))
        and uses_triton(x, backend=backend)
    )


def _reads(x: Tensor) -> bool:
    """Whether the kernels compute products of x. They have no backward pass."""
    return (
        x.dtype in FEW_ROWS_DTYPES
        and not torch.is_grad_enabled()
        and 0 < x.numel() <= MAX_ROWS * x.shape[-1]
        and not under_transform()
        and (x.is_meta or not torch.is_autocast_enabled(x.device.type))
    )


def _match(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], scales: Sequence[Tensor] | None
) -> bool:
    """Whether the kernels read parameters of these shapes, dtypes, devices and memory formats."""
    dtype, device, features, has_biases = x.dtype, x.device, x.shape[-1], biases[0] is not None
    weight_dtype, factors = (dtype, [None] * len(weights)) if scales is None else (torch.int8, scales)

    def reads(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous() and tensor.device == device

    for weight, bias, scale in zip(weights, biases, factors, strict=True):  # a loop takes a third of the time of `all`
        outputs = len(weight)
        if not reads(weight, (outputs, features), weight_dtype) or (bias is not None) != has_biases:
            return False
        if not (bias is None or reads(bias, (outputs,), dtype)):
            return False
        if not (scale is None or reads(scale, (outputs,), torch.float32)):
            return False
    return len(weights) <= _MAX_WEIGHTS


def _is_better(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether cuBLAS would split sums that may not be split, or is slower on an H200.

    It splits the sums of products with few outputs.
    """
    n_rows, n_outputs = x.numel() // x.shape[-1], len(weights[0])
    is_faster = n_rows == 1 or len(weights) > 1 or n_outputs >= (4096 if n_rows <= 32 else 32768)
    return is_faster or would_split(x, weights[0])


def project_few_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """`linears` in one kernel, for inputs that `uses_few_rows` accepts. The results are views of one tensor."""
    out = _few_rows(x, _Three(*weights), _Three(*biases), _Three(*scales or ()), None, splits_row_sums())
    return (out,) if len(weights) == 1 else out.split_with_sizes([len(weight) for weight in weights], -1)


def gate_few_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor] | None,
    activation: Activation,
) -> Tensor:
    """`linear_glu` in one kernel, for inputs that `uses_few_rows` accepts."""
    return _few_rows(x, _Three(*weights), _Three(*biases), _Three(*scales or ()), activation, splits_row_sums())
