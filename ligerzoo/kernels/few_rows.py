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

MAX_ROWS = 64
_MAX_WEIGHTS = 3
FEW_ROWS_DTYPES = (torch.bfloat16, torch.float16)


class Tiling(NamedTuple):
    """How a kernel divides its work.

    Attributes:
        outputs: output features per program.
        features: input features that a program reads at a time.
        stages: number of such reads in flight.
        warps: warps per program.
    """

    outputs: int
    features: int
    stages: int
    warps: int


@jit
def _weight_of_program(program, tiles_0, tiles_1, size_0, size_1, size_2, distance_1, distance_2,
                       bias_distance_1, bias_distance_2, scale_distance_1, scale_distance_2):  # fmt: skip
    """Which of three weights a program computes: its first program, size, offset in the output, and distances.

    With an activation all programs compute the first, the gate, and the second, the up projection.
    """
    is_0, is_1 = program < tiles_0, program < tiles_0 + tiles_1
    first = tl.where(is_0, 0, tl.where(is_1, tiles_0, tiles_0 + tiles_1))
    size = tl.where(is_0, size_0, tl.where(is_1, size_1, size_2))
    offset = tl.where(is_0, 0, tl.where(is_1, size_0, size_0 + size_1))
    distance = tl.where(is_0, 0, tl.where(is_1, distance_1, distance_2))
    bias_distance = tl.where(is_0, 0, tl.where(is_1, bias_distance_1, bias_distance_2))
    scale_distance = tl.where(is_0, 0, tl.where(is_1, scale_distance_1, scale_distance_2))
    return first, size, offset, distance, bias_distance, scale_distance


@jit
def _scale_and_shift(sums, scale_ptr, bias_ptr, scale_distance, bias_distance, outputs, mask):
    """The sums of these outputs, times their scales, plus their biases."""
    if scale_ptr is not None:
        sums *= tl.load(scale_ptr + scale_distance + outputs, mask=mask, other=0.0)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + bias_distance + outputs, mask=mask, other=0.0).to(tl.float32)
    return sums


@jit
def _rounded(x, out_ptr):
    """fp32 values rounded to the dtype of the output, as separate products of the gate and the up projection are."""
    return x.to(out_ptr.dtype.element_ty).to(tl.float32)


@kernel
def _row_kernel(
    x_ptr, w_ptr, bias_ptr, scale_ptr, out_ptr, n_features, tiles_0, tiles_1, size_0, size_1, size_2,
    distance_1, distance_2, bias_distance_1, bias_distance_2, scale_distance_1, scale_distance_2,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first, size, offset, distance, bias_distance, scale_distance = _weight_of_program(
        program, tiles_0, tiles_1, size_0, size_1, size_2, distance_1, distance_2,
        bias_distance_1, bias_distance_2, scale_distance_1, scale_distance_2,
    )  # fmt: skip
    outputs = (program - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    features = tl.arange(0, BLOCK_K)
    in_size = outputs < size
    rows = w_ptr + distance + outputs[:, None].to(tl.int64) * n_features + features[None, :]
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
            up_sums += x[None, :] * tl.load(rows + start + distance_1, mask=mask, other=0.0).to(tl.float32)
    y = tl.sum(sums, axis=1)
    y = _scale_and_shift(y, scale_ptr, bias_ptr, scale_distance, bias_distance, outputs, in_size)
    if ACTIVATION is not None:
        up = tl.sum(up_sums, axis=1)
        up = _scale_and_shift(up, scale_ptr, bias_ptr, scale_distance_1, bias_distance_1, outputs, in_size)
        y, _ = activate(_rounded(y, out_ptr), ACTIVATION, False)
        y = y * _rounded(up, out_ptr)
    tl.store(out_ptr + offset + outputs, y.to(out_ptr.dtype.element_ty), mask=in_size)


@kernel
def _rows_kernel(
    x_ptr, w_ptr, bias_ptr, scale_ptr, out_ptr, n_rows, n_features, x_stride, n_out,
    tiles_0, tiles_1, size_0, size_1, size_2,
    distance_1, distance_2, bias_distance_1, bias_distance_2, scale_distance_1, scale_distance_2,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first, size, offset, distance, bias_distance, scale_distance = _weight_of_program(
        program, tiles_0, tiles_1, size_0, size_1, size_2, distance_1, distance_2,
        bias_distance_1, bias_distance_2, scale_distance_1, scale_distance_2,
    )  # fmt: skip
    outputs = (program - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    features = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, ROWS)
    in_size, in_rows = outputs < size, rows < n_rows
    weights = w_ptr + distance + outputs[:, None].to(tl.int64) * n_features + features[None, :]
    inputs = x_ptr + rows[None, :] * x_stride + features[:, None]
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    up_sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for start in range(0, n_features, BLOCK_K):
        x_mask, w_mask = in_rows[None, :], in_size[:, None]
        if not EVEN:
            in_row = start + features < n_features
            x_mask, w_mask = x_mask & in_row[:, None], w_mask & in_row[None, :]
        x = tl.load(inputs + start, mask=x_mask, other=0.0)
        sums = tl.dot(tl.load(weights + start, mask=w_mask, other=0.0).to(x.dtype), x, sums)
        if ACTIVATION is not None:
            up_sums = tl.dot(tl.load(weights + start + distance_1, mask=w_mask, other=0.0).to(x.dtype), x, up_sums)
    column, in_column = outputs[:, None], in_size[:, None]
    sums = _scale_and_shift(sums, scale_ptr, bias_ptr, scale_distance, bias_distance, column, in_column)
    if ACTIVATION is not None:
        up_sums = _scale_and_shift(up_sums, scale_ptr, bias_ptr, scale_distance_1, bias_distance_1, column, in_column)
        active, _ = activate(_rounded(sums, out_ptr), ACTIVATION, False)
        sums = active * _rounded(up_sums, out_ptr)
    out = out_ptr + rows[None, :] * n_out + offset + outputs[:, None]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=in_rows[None, :] & in_size[:, None])


def _tiling(is_row: bool, n_outputs: int, is_glu: bool) -> Tiling:
    """The fastest tiling measured on an H200. `is_row`: for a single row, whose sums may be split."""
    if is_row:
        return Tiling(16, 256, 3, 4) if n_outputs > 4096 or is_glu else Tiling(8, 512, 3, 4)
    if is_glu:
        return Tiling(64, 128, 4, 4)
    return Tiling(128, 128, 4, 8) if n_outputs > 32768 else Tiling(64, 128, 6, 4)


def _distance(first: Tensor | None, other: Tensor | None) -> int:
    """Elements from the start of one tensor to that of another, which a kernel adds to its pointer to the first."""
    return 0 if first is None or other is None else (other.data_ptr() - first.data_ptr()) // first.element_size()


@register(
    "few_rows",
    fake=lambda x, weight_0, weight_1, weight_2, activation: x.new_empty(
        x.shape[0], sum(_sizes([weight_0, weight_1, weight_2])[: 3 if activation is None else 1])
    ),
)
def _few_rows(
    x: Tensor, weight_0: Tensor, weight_1: Tensor | None, weight_2: Tensor | None,
    bias_0: Tensor | None, bias_1: Tensor | None, bias_2: Tensor | None,
    scale_0: Tensor | None, scale_1: Tensor | None, scale_2: Tensor | None, activation: Activation | None,
    splits: bool,
) -> Tensor:  # fmt: skip
    """(R, K) -> (R, N_0 + N_1 + N_2); with an activation, (R, I) from the weights of the gate and the up projection.

    Unless sums may be split (`splits`), a row of the result does not depend on R.
    """
    (n_rows, n_features), is_glu = x.shape, activation is not None
    is_row = splits and n_rows == 1
    sizes = _sizes([weight_0, weight_1, weight_2])
    out = x.new_empty(n_rows, sizes[0] if is_glu else sum(sizes))
    outputs, features, stages, warps = _tiling(is_row, out.shape[1], is_glu)
    tiles = [cdiv(size, outputs) for size in sizes]
    programs = tiles[0] if is_glu else sum(tiles)
    distances = [_distance(weight_0, weight) for weight in (weight_1, weight_2)]
    distances += [_distance(bias_0, bias) for bias in (bias_1, bias_2)]
    distances += [_distance(scale_0, scale) for scale in (scale_1, scale_2)]
    is_even = n_features % features == 0
    if is_row:
        _row_kernel[programs](
            x, weight_0, bias_0, scale_0, out, n_features, *tiles[:2], *sizes, *distances,
            activation, outputs, features, is_even, stages, num_warps=warps,
        )  # fmt: skip
    else:
        _rows_kernel[programs](
            x, weight_0, bias_0, scale_0, out, n_rows, n_features, x.stride(0), out.shape[1],
            *tiles[:2], *sizes, *distances,
            activation, padded_size(n_rows), outputs, features, is_even,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def _sizes(weights: Sequence[Tensor | None]) -> list[int]:
    return [0 if weight is None else weight.shape[0] for weight in weights]


def uses_few_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    backend: Backend,
    scales: Sequence[Tensor] | None = None,
) -> bool:
    """Whether the kernels of this file compute products of x with these weights, which are int8 if there are scales."""
    if (
        x.dtype not in FEW_ROWS_DTYPES or backend == "torch" or torch.is_grad_enabled()
    ):  # the kernels have no backward pass
        return False
    if not 0 < x.numel() <= MAX_ROWS * x.shape[-1] or under_transform():
        return False
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        return False
    floats = [x, *(bias for bias in biases if bias is not None)]
    if scales is None:
        floats += weights
    parameters = [*weights, *(scales or ()), *floats[1:]]
    return (
        len(weights) <= _MAX_WEIGHTS
        and all(weight.shape[1] == x.shape[-1] for weight in weights)
        and all(
            vector is None or vector.shape == weight.shape[:1]  # the kernel would read beyond a shorter one
            for vectors in (biases, scales or ())
            for weight, vector in zip(weights, vectors, strict=False)
        )
        and all(tensor.dtype == x.dtype for tensor in floats)
        and all(tensor.is_contiguous() and tensor.device == x.device for tensor in parameters)
        and len({bias is None for bias in biases}) == 1
        and uses_triton(*floats, backend=backend)
        and (
            backend == "triton"
            or scales is not None
            or would_split(x, weights[0])
            or _is_faster(x.numel() // x.shape[-1], list(map(len, weights)))
        )
    )


def _is_faster(n_rows: int, sizes: Sequence[int]) -> bool:
    """Whether the kernels are faster than cuBLAS on an H200. cuBLAS splits the sums of products with few outputs."""
    return n_rows == 1 or len(sizes) > 1 or sizes[0] >= (4096 if n_rows <= 32 else 32768)


def project_few_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """`linears` in one kernel, for inputs that `uses_few_rows` accepts. The results are views of one tensor."""
    missing = [None] * (_MAX_WEIGHTS - len(weights))
    factors = [None] * len(weights) if scales is None else scales
    parameters = *weights, *missing, *biases, *missing, *factors, *missing
    out = _few_rows(as_rows(x), *parameters, None, splits_row_sums())  # type: ignore[call-arg]
    return tuple(y.reshape(*x.shape[:-1], -1) for y in out.split([len(weight) for weight in weights], 1))


def gate_few_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor] | None,
    activation: Activation,
) -> Tensor:
    """`linear_glu` in one kernel, for inputs that `uses_few_rows` accepts."""
    factors = (None, None) if scales is None else scales
    parameters = *weights, None, *biases, None, *factors, None
    out = _few_rows(as_rows(x), *parameters, activation, splits_row_sums())  # type: ignore[call-arg]
    return out.view(*x.shape[:-1], -1)
