"""The expert MLPs of a few tokens, as in each step of decoding a mixture of experts (Shazeer et al. 2017).

    y_t = residual_t + sum_e w_te * (down[e] @ (act(gate) * up) + down_bias[e]),
    gate and up the halves of gate_up[e] @ x_t + gate_up_bias[e]

over the experts e of token t, as `experts_mlp`; experts without a gate compute act(gate_up[e] @ x_t + gate_up_bias[e]).
 A decode step reads the weights of the experts that its tokens need and
computes little, so the kernels are made to keep many reads in flight:

    gate_up    a program computes some features of one expert, for its rows, and applies the activation (see `gating`)
               and w
    down       likewise, from those features to outputs
    combine    sums the outputs of each token in fp32, the best expert's first, and adds biases and the residual

They round where `experts_mlp` rounds, and add in its order: a token has the same bits in both, on Hopper GPUs in bf16.

A program loads some rows of an expert's weights, in blocks through a pipeline in shared memory, and multiplies them by
the rows of tokens: 16 of them, or up to 64 if experts have many on average. More rows take a second pass over these
weights. For one token, a single kernel does the work of `down` and `combine`, in the same order: it continues with the
next expert where the last one ends, without emptying its pipeline.

Deterministic, without a host sync, and with shapes that depend on the shapes of the inputs only: a captured CUDA graph
serves all routes. Not differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.dispatch import (
    Backend,
    accumulation_dtype,
    as_rows,
    autocast,
    cdiv,
    empty_result,
    next_power_of_2,
    padded_size,
    uses_triton,
)
from ligerzoo.kernels.experts import check_biases, contiguous_biases
from ligerzoo.kernels.gating import ExpertActivation, Gating, combined, gate_and_up, gating
from ligerzoo.kernels.grouped_mm import add_product, input_precision
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.route import Routing
from ligerzoo.kernels.routing import add_bias
from ligerzoo.kernels.tiling import StridedRows, load_strip
from ligerzoo.kernels.weighted_glu import Biases
from ligerzoo.tensor_checks import check_floats, check_optional_floats, describe_value, shape_or_dtype_error

_MIN_ROWS, _MAX_ROWS = 16, 64  # of tokens in a matrix product


class _Tile(NamedTuple):
    """How a program multiplies by weights: rows of weights, elements of each row at a time, warps, pipeline stages."""

    cols: int
    inner: int
    warps: int
    stages: int

    def constants(self, rows: int, n_inner: int) -> tuple[int | str, ...]:
        """ROWS to PRECISION of a kernel."""
        return rows, self.cols, self.inner, n_inner % self.inner == 0, input_precision()

    @property
    def options(self) -> dict[str, int]:
        """The options of Triton's launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


_GATE_UP_TILE = _Tile(64, 128, 4, 3)
_DOWN_TILE = _Tile(64, 128, 4, 3)
_ONE_TOKEN_TILE = _Tile(16, 256, 4, 4)
_FP32_INNER = 32
_STAGE_BYTES = 98304  # of all stages of a pipeline; also fits the shared memory of smaller GPUs than Hopper's
_COMBINE_BLOCK = 512


def reference(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor | None = None,
    activation: ExpertActivation = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """`decode_experts` in plain torch, one expert after the other: the specification and the test oracle."""
    wide = accumulation_dtype(x.dtype)
    values = x.new_empty(len(routing.tokens), x.shape[1], dtype=wide)
    bounds = routing.bounds.tolist()
    for expert, start, end in zip(routing.experts.tolist(), bounds, bounds[1:], strict=False):
        hidden = F.linear(x[routing.tokens[start:end]], gate_up[expert]).to(wide)
        weights = routing.weights[start:end, None]
        if gate_up_bias is not None:
            hidden = hidden + gate_up_bias[expert]
        active = weights * combined(hidden, gating(activation))
        values[start:end] = F.linear(active.to(x.dtype), down[expert]).to(wide)
        if down_bias is not None:
            values[start:end] += weights * down_bias[expert]
    y = values[routing.rows].sum(1)
    return (y if residual is None else residual + y).to(x.dtype)


@jit
def _load_block(ptrs, mask, start, n_inner, INNER: tl.constexpr, IS_EVEN: tl.constexpr):
    """Elements `start` to `start + INNER` of these rows. IS_EVEN: all rows have them."""
    inner = start + tl.arange(0, INNER)
    if not IS_EVEN:
        mask = mask & (inner < n_inner)[None, :]
    return tl.load(ptrs[:, None] + inner[None, :], mask=mask, other=0.0)


@jit
def _product(
    x_ptrs, x_mask, w_ptrs, w_mask, n_inner,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, IS_EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of ROWS rows of x with COLS rows of weights, in fp32."""
    y = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, n_inner, INNER):
        x = _load_block(x_ptrs, x_mask[:, None], start, n_inner, INNER, IS_EVEN)
        w = _load_block(w_ptrs, w_mask[:, None], start, n_inner, INNER, IS_EVEN)
        y = add_product(y, x, w.T, PRECISION)
    return y


class _Weights(NamedTuple):
    """Weights of experts, (E, n_outputs, n_inner), and their biases, (E, n_outputs)."""

    ptr: Tensor
    bias: Tensor | None
    expert_stride: int
    row_stride: int
    n_outputs: int
    n_inner: int

    @staticmethod
    def of(weights: Tensor, bias: Tensor | None) -> _Weights:
        """Copies weights whose last stride is not 1."""
        weights = weights if weights.stride(-1) == 1 else weights.contiguous()
        return _Weights(weights, bias, *weights.stride()[:2], *weights.shape[1:])


@jit
def _rounded(x, ptr):
    """x, in fp32, rounded to the dtype of a pointer, as `experts_mlp` stores it."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


@jit
def _load_bias(w, expert, outputs, mask):
    return tl.load(w.bias + expert * w.n_outputs + outputs, mask=mask, other=0.0).to(tl.float32)


@jit
def _expert_tile(routing, tiles):
    """The expert of the program, its first row, the one after its last, and the index of a tile of outputs."""
    index, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start, end = tl.load(routing.bounds + index), tl.load(routing.bounds + index + 1)
    return tl.load(routing.experts + index).to(tl.int64), start, end, tile


@kernel
def _gate_up_kernel(
    x_ptr, x_stride, w, routing, active_ptr, ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    IS_EVEN: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    FEATURES: tl.constexpr = COLS // PARTS
    n_features = w.n_outputs // PARTS
    expert, start, end, tile = _expert_tile(routing, tl.cdiv(n_features, FEATURES))
    # Rows of the gate and of the up projection alternate, so that a thread holds both numbers of a feature.
    cols = tl.arange(0, COLS)
    feature = tile.to(tl.int64) * FEATURES + cols // PARTS
    output, w_mask = feature + cols % PARTS * n_features, feature < n_features
    w_ptrs = w.ptr + expert * w.expert_stride + output * w.row_stride
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        tokens = tl.load(routing.tokens + rows, mask=rows < end, other=0).to(tl.int64)
        x_ptrs = x_ptr + tokens * x_stride
        hidden = _product(x_ptrs, rows < end, w_ptrs, w_mask, w.n_inner, ROWS, COLS, INNER, IS_EVEN, PRECISION)
        hidden = _rounded(hidden, active_ptr)
        if w.bias is not None:
            hidden += _load_bias(w, expert, output, w_mask)[None, :]
        if PARTS == 2:
            gate, up = hidden.reshape(ROWS, FEATURES, 2).split()
        else:
            gate, up = hidden, hidden
        weights = tl.load(routing.weights + rows, mask=rows < end, other=0.0).to(tl.float32)
        active, _, _ = gate_and_up(gate, up, ACTIVATION, LIMIT, ALPHA, PARTS, x_ptr.dtype.element_ty == tl.float32)
        features = tile * FEATURES + tl.arange(0, FEATURES)
        tl.store(
            active_ptr + rows.to(tl.int64)[:, None] * n_features + features[None, :],
            (weights[:, None] * active).to(active_ptr.dtype.element_ty),
            mask=(rows < end)[:, None] & (features < n_features)[None, :],
        )


@kernel
def _down_kernel(
    active_ptr, w, routing, values_ptr, ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    IS_EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, start, end, tile = _expert_tile(routing, tl.cdiv(w.n_outputs, COLS))
    cols = tile.to(tl.int64) * COLS + tl.arange(0, COLS)
    in_cols = cols < w.n_outputs
    w_ptrs = w.ptr + expert * w.expert_stride + cols * w.row_stride
    for first in range(start, end, ROWS):
        rows = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        x_ptrs = active_ptr + rows * w.n_inner
        values = _product(x_ptrs, rows < end, w_ptrs, in_cols, w.n_inner, ROWS, COLS, INNER, IS_EVEN, PRECISION)
        mask = (rows < end)[:, None] & in_cols[None, :]
        targets = values_ptr + rows[:, None] * w.n_outputs + cols[None, :]
        tl.store(targets, values.to(values_ptr.dtype.element_ty), mask=mask)


@kernel
def _combine_kernel(values_ptr, routing, bias_ptr, residual, y_ptr, n_cols, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(n_cols, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(routing.rows + token * SLOTS + slot).to(tl.int64)
        y += tl.load(values_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            expert = tl.load(routing.expert_ids + token * SLOTS + slot)
            y = add_bias(y, bias_ptr, expert, tl.load(routing.weights + row), n_cols, cols, cols < n_cols)
    if residual.ptr is not None:
        y += load_strip(residual, token, cols, cols < n_cols)
    tl.store(y_ptr + token * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)


@kernel
def _one_token_kernel(
    active_ptr, w, routing, residual_ptr, y_ptr, n_rows, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, IS_EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    in_cols = cols < w.n_outputs
    is_first = tl.arange(0, ROWS) == 0  # the only row of the products that is used
    blocks = tl.cdiv(w.n_inner, INNER)
    value = tl.zeros((ROWS, COLS), dtype=tl.float32)
    y = tl.zeros((ROWS, COLS), dtype=tl.float32)
    row_index = tl.arange(0, EXPERTS)
    experts = tl.load(routing.experts + row_index, mask=row_index < n_rows, other=0)
    for step in range(n_rows * blocks):
        row, block = step // blocks, step % blocks  # each expert has one row, the best the first
        expert = tl.sum(tl.where(row_index == row, experts, 0), axis=0).to(tl.int64)
        x_ptrs = active_ptr + row * w.n_inner + tl.zeros((ROWS,), dtype=tl.int32)
        w_ptrs = w.ptr + expert * w.expert_stride + cols * w.row_stride
        x = _load_block(x_ptrs, is_first[:, None], block * INNER, w.n_inner, INNER, IS_EVEN)
        weights = _load_block(w_ptrs, in_cols[:, None], block * INNER, w.n_inner, INNER, IS_EVEN)
        value = add_product(value, x, weights.T, PRECISION)
        total = y + _rounded(value, y_ptr)
        if w.bias is not None:
            weight = tl.load(routing.weights + row)
            total = add_bias(total, w.bias, expert, weight, w.n_outputs, cols[None, :], in_cols[None, :])
        is_last = block == blocks - 1
        y = tl.where(is_last, total, y)
        value = tl.where(is_last, 0.0, value)
    y = tl.sum(tl.where(is_first[:, None], y, 0.0), axis=0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + cols, mask=in_cols, other=0.0).to(tl.float32)
    tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=in_cols)


def _allocate(x: Tensor) -> Tensor:
    return empty_result(x)


def _flops(routing: Routing, gate_up: Tensor, down: Tensor) -> int:
    return 2 * len(routing.tokens) * (gate_up[0].numel() + down[0].numel())


@register("decode_experts", fake=_allocate, flops=_flops)
def _forward(
    x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, residual: Tensor | None, biases: Biases, gating: Gating
) -> Tensor:
    y, x = _allocate(x), as_rows(x)
    (n_tokens, n_cols), (n_experts, _, n_features) = x.shape, down.shape
    n_rows, n_active = len(routing.tokens), len(routing.experts)
    if n_rows == 0:
        return y
    gate_up_weights, down_weights = _Weights.of(gate_up, biases.gate_up), _Weights.of(down, biases.down)
    residual = None if residual is None else as_rows(residual)
    rows = _row_tile(n_tokens, n_rows, n_experts)
    active = x.new_empty(n_rows, n_features)

    tile = _fitted(_GATE_UP_TILE, rows, n_cols, x.dtype)
    _gate_up_kernel[n_active * cdiv(n_features, tile.cols // gating.parts)](
        x, x.stride(0), gate_up_weights, routing, active, *tile.constants(rows, n_cols), *gating, **tile.options
    )
    if n_tokens == 1:
        tile = _fitted(_ONE_TOKEN_TILE, _MIN_ROWS, n_features, x.dtype)
        constants = next_power_of_2(n_rows), *tile.constants(_MIN_ROWS, n_features)
        _one_token_kernel[cdiv(n_cols, tile.cols)](
            active, down_weights, routing, residual, y, n_rows, *constants, **tile.options
        )
        return y
    values = x.new_empty(n_rows, n_cols)
    tile = _fitted(_DOWN_TILE, rows, n_features, x.dtype)
    _down_kernel[n_active * cdiv(n_cols, tile.cols)](
        active, down_weights, routing, values, *tile.constants(rows, n_features), **tile.options
    )
    block, slots = min(_COMBINE_BLOCK, next_power_of_2(n_cols)), routing.rows.shape[1]
    rows_to_add = StridedRows(residual, 0 if residual is None else residual.stride(0))
    _combine_kernel[n_tokens * cdiv(n_cols, block)](
        values, routing, biases.down, rows_to_add, y, n_cols, slots, block, num_warps=4
    )
    return y


def _row_tile(n_tokens: int, n_rows: int, n_experts: int) -> int:
    """Rows of a matrix product: all rows of an expert, or twice the average if that is less."""
    return max(_MIN_ROWS, min(_MAX_ROWS, next_power_of_2(min(n_tokens, 2 * cdiv(n_rows, n_experts)))))


def _fitted(tile: _Tile, rows: int, n_inner: int, dtype: torch.dtype) -> _Tile:
    """The tile for products of `rows` rows with weights of this dtype, whose rows have `n_inner` elements."""
    inner = min(_FP32_INNER if dtype == torch.float32 else tile.inner, padded_size(n_inner))
    bytes_per_stage = (rows + tile.cols) * inner * dtype.itemsize
    return tile._replace(inner=inner, stages=min(tile.stages, _STAGE_BYTES // bytes_per_stage))


def decode_experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: ExpertActivation = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """Computes the weighted sum of each token's expert MLPs, for few tokens. Not differentiable.

    `y_t = residual_t + sum_e w_te * (down[e] @ (act(gate) * up) + down_bias[e])` over the experts e of token t, where
    `gate` and `up` are the halves of `gate_up[e] @ x_t + gate_up_bias[e]`. Deterministic. Without a host sync, except
    in fp64 and for backend="torch". For many
    tokens, and for training, use `experts_mlp`.

    Args:
        x: (T, H) hidden states of the tokens, any strides.
        routing: of these tokens, from `route`.
        gate_up: (E, 2I, H), the gate's rows first, or (E, I, H) without a gate, in the dtype of `x`. Copied if its last
            stride is not 1.
        down: (E, H, I), in the dtype of `x`. Copied if its last stride is not 1.
        gate_up_bias: (E, 2I) or (E, I), of any floating-point dtype; None for 0.
        down_bias: (E, H), of any floating-point dtype; None for 0.
        residual: (T, H), added in fp32 before the result is rounded; None for 0.
        activation: see `experts_mlp`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (T, H), contiguous, in the dtype of `x`.

    Raises:
        TypeError: an argument has another type.
        ValueError: shapes or dtypes do not match, or the activation or `backend` is unknown, or `backend` does not
            support the tensors.
    """
    check_floats("decode_experts", x=x, gate_up=gate_up, down=down)
    check_optional_floats("decode_experts", residual=residual, gate_up_bias=gate_up_bias, down_bias=down_bias)
    if not isinstance(routing, Routing):
        raise TypeError(f"decode_experts: routing is {describe_value(routing)}; expected the result of `route`")
    x, gate_up, down, gate_up_bias, down_bias = autocast(x, gate_up, down, gate_up_bias, down_bias)
    n_experts, n_features, options = gate_up.shape[0], x.shape[-1], gating(activation)
    if (
        x.dim() != 2
        or gate_up.shape != (n_experts, options.parts * down.shape[-1], n_features)
        or down.shape[:-1] != (n_experts, n_features)
        or not x.dtype == gate_up.dtype == down.dtype
        or (residual is not None and residual.shape != x.shape)
    ):
        first = "(E, 2I, H)" if options.parts == 2 else "(E, I, H)"
        expected = f"(T, H), {first}, (E, H, I) and (T, H), with the same dtype for x, gate_up and down"
        tensors = {"x": x, "gate_up": gate_up, "down": down, "residual": residual}
        raise shape_or_dtype_error("decode_experts", expected, **tensors)
    if len(routing.rows) != len(x) or len(routing.experts) != min(n_experts, len(routing.tokens)):
        raise ValueError(
            f"decode_experts: routing is of {len(routing.rows)} tokens with {len(routing.experts)} experts listed for "
            f"{len(routing.tokens)} rows, but x has {len(x)} tokens and gate_up {n_experts} experts; expected the "
            "result of `route` for the router logits of x"
        )
    check_biases("decode_experts", gate_up, down, gate_up_bias, down_bias)
    biases = Biases(*contiguous_biases(gate_up_bias, down_bias))
    with torch.no_grad():
        if uses_triton(x, gate_up, down, *(t for t in biases if t is not None), backend=backend):
            return _forward(x, routing, gate_up, down, residual, biases, options)
        return reference(x, routing, gate_up, down, residual, activation, *biases)
