"""Causal depthwise convolution along the tokens, with an activation.

    y_t = act(bias + sum over j of weight[:, k - 1 - j] * x_(t-j)),   j = 0 to k - 1

Zeros, or the inputs of a given state, precede the first token. In packed rows, zeros precede each segment. Sums and
activation are in fp32; the result is rounded once.

Backward, with dz_t = dy_t * act'(z_t), z the sum above, over the tokens t + j of the same segment:

    dx_t = sum over j of weight[:, k - 1 - j] * dz_(t+j);   dweight[:, k - 1 - j] = sum over t of dz_t * x_(t-j)

Saved: the inputs. z is recomputed in backward, and the result too where a block recomputes elementwise operations, see
`recompute`. A program holds some tokens of some channels, and reads the k - 1 tokens around them again, from the cache.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import (
    Backend,
    accumulation_dtype,
    cdiv,
    empty_gradient,
    empty_result,
    multiprocessors,
    uses_triton,
)
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import sigmoids
from ligerzoo.kernels.recompute import recomputable
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.tiling import column_sums_
from ligerzoo.kernels.torch_math import silu
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor, shape_error

ConvActivation = Literal["silu"]

MAX_TAPS = 8
"""Wider kernels run in plain torch."""

TOKENS, CHANNELS, WARPS = 16, 128, 2
"""Tokens and channels per program, and warps."""

BACKWARD_CHANNELS, BACKWARD_WARPS, BACKWARD_PROGRAMS_PER_MULTIPROCESSOR = 256, 4, 8
FEWEST_TOKENS = 32
"""A backward program goes through this many tokens or more, and sums its part of the weight gradient."""


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    segment_start: Tensor | None = None,
    activation: ConvActivation | None = None,
) -> Tensor:
    """`causal_conv1d` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(x.dtype)
    tokens, reach = x.shape[1], weight.shape[1] - 1
    before = x.new_zeros(len(x), reach, x.shape[2]) if initial_state is None else initial_state.to(x.dtype)
    padded = torch.cat([before, x], 1)
    index = torch.arange(tokens, device=x.device)
    wide, wide_weight = padded.to(dtype), weight.to(dtype)
    y = wide.new_zeros(x.shape)
    for j in range(reach, -1, -1):
        shifted = wide[:, reach - j : reach - j + tokens]
        if segment_start is not None and j > 0:
            shifted = shifted.masked_fill(_is_before_segment(index - j, segment_start)[..., None], 0.0)
        y = y + shifted * wide_weight[:, reach - j]
    if bias is not None:
        y = y + bias.to(dtype)
    if activation == "silu":
        y = silu(y)
    return y.to(x.dtype)


def final_state(x: Tensor, reach: int, initial_state: Tensor | None, segment_start: Tensor | None) -> Tensor:
    """The last `reach` inputs of the last segment of each row, (B, reach, C)."""
    tokens = x.shape[1]
    if tokens < reach:
        before = x.new_zeros(len(x), reach, x.shape[2]) if initial_state is None else initial_state.to(x.dtype)
        state = torch.cat([before[:, tokens:], x], 1)
    else:
        state = x[:, tokens - reach :].clone()  # a view would keep all inputs
    if segment_start is not None and tokens > 0:
        index = torch.arange(tokens - reach, tokens, device=x.device)
        state = state.masked_fill(_is_before_segment(index, segment_start[:, -1:])[..., None], 0.0)
    return state


def _is_before_segment(index: Tensor, segment_start: Tensor) -> Tensor:
    """Whether the inputs precede the segments. The first segment of a row includes the inputs of the initial state."""
    return (index < segment_start) & (segment_start > 0)


class ConvInputs(NamedTuple):
    """The inputs of the convolution, with adjacent channels.

    Attributes:
        x: (B, T, C).
        weight: (C, k).
        bias: (C,), or None.
        initial_state: (B, k - 1, C) in the dtype of x, or None.
        segment_start: (B or 1, T) int64, or None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    segment_start: Tensor | None


class ConvRows(NamedTuple):
    """(B, T, C), as kernels read it."""

    ptr: Tensor
    batch_stride: int
    token_stride: int
    channel_stride: int


class _Convolution(NamedTuple):
    """What the kernels of both passes read: see `ConvInputs`. A `segment_stride` of 0: one row describes all."""

    x: ConvRows
    weight: Tensor
    bias: Tensor | None
    state: Tensor | None
    segment_start: Tensor | None
    segment_stride: int
    n_tokens: int
    n_channels: int

    @staticmethod
    def of(inputs: ConvInputs) -> _Convolution:
        x, weight, bias, state, segment_start = inputs
        segment_stride = 0 if segment_start is None or len(segment_start) == 1 else segment_start.stride(0)
        return _Convolution(conv_rows(x), weight, bias, state, segment_start, segment_stride, *x.shape[1:])


def conv_rows(x: Tensor) -> ConvRows:
    """Returns (B, T, C) as kernels read it."""
    return ConvRows(x, *x.stride())


@jit
def _load_inputs(conv, batch, tokens, channels, mask, TAPS):
    """The inputs at these tokens, in fp32: those of the state, or zeros, before the row."""
    in_row = (tokens >= 0) & (tokens < conv.n_tokens)
    offsets = batch * conv.x.batch_stride + tokens * conv.x.token_stride + channels
    x = tl.load(conv.x.ptr + offsets, mask=mask & in_row, other=0.0).to(tl.float32)
    if conv.state is not None:
        in_state = (tokens < 0) & (tokens > -TAPS)
        offsets = (batch * (TAPS - 1) + TAPS - 1 + tokens) * conv.n_channels + channels
        x += tl.load(conv.state + offsets, mask=mask & in_state, other=0.0).to(tl.float32)
    return x


@jit
def _first_of_segment(conv, batch, tokens):
    if conv.segment_start is not None:
        in_row = (tokens >= 0) & (tokens < conv.n_tokens)
        first_ptr = conv.segment_start + batch * conv.segment_stride
        first = tl.load(first_ptr + tokens, mask=in_row, other=0).to(tl.int64)
    else:
        first = tokens * 0
    return first


@jit
def _reads(token, first_of_segment):
    """Whether a segment's outputs read the input at a token. Those of the first one read the tokens before the row."""
    return (token >= first_of_segment) | (first_of_segment == 0)


@jit
def _pushed(values, value, TAPS):
    """The values with a new one in front, without the last one."""
    return (value,) + values[: TAPS - 1]  # noqa: RUF005 (Triton compiles no starred expressions)


@jit
def _load_weights(conv, channels, TAPS):
    """The weights of x_t, x_(t-1), ..., in fp32."""
    weights = (0.0,) * TAPS
    for tap in tl.static_range(TAPS):
        weight = tl.load(conv.weight + channels * TAPS + tap, mask=channels < conv.n_channels, other=0.0)
        weights = _pushed(weights, weight.to(tl.float32), TAPS)
    return weights


@jit
def load_bias(bias_ptr, channels, n_channels):
    """The bias of these channels, in fp32."""
    return tl.load(bias_ptr + channels, mask=channels < n_channels, other=0.0).to(tl.float32)


@kernel
def _forward_kernel(
    conv, y_ptr, n_token_blocks, n_channel_blocks,
    TAPS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    channels = program % n_channel_blocks * CHANNELS + tl.arange(0, CHANNELS)
    tokens = program // n_channel_blocks % n_token_blocks * TOKENS + tl.arange(0, TOKENS)
    batch = program // n_channel_blocks // n_token_blocks
    mask = (tokens < conv.n_tokens)[:, None] & (channels < conv.n_channels)[None, :]
    first = _first_of_segment(conv, batch, tokens)
    weights = _load_weights(conv, channels, TAPS)
    y = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    for j in tl.static_range(TAPS - 1, -1, -1):
        is_read = mask & _reads(tokens - j, first)[:, None]
        x = _load_inputs(conv, batch, (tokens - j)[:, None], channels[None, :], is_read, TAPS)
        y = tl.fma(x, weights[j][None, :], y)
    if conv.bias is not None:
        y += load_bias(conv.bias, channels, conv.n_channels)[None, :]
    if SILU:
        sigmoid, _ = sigmoids(y, conv.x.ptr.dtype.element_ty == tl.float32)
        y *= sigmoid
    offsets = (batch * conv.n_tokens + tokens[:, None]) * conv.n_channels + channels[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _output(xs, weights, bias, token, first_of_segment, TAPS):
    """z at the token, from x_t, x_(t-1), ..., in the order of the forward pass."""
    z = tl.zeros(bias.shape, dtype=tl.float32)
    for j in tl.static_range(TAPS - 1, -1, -1):
        z = tl.fma(tl.where(_reads(token - j, first_of_segment), xs[j], 0.0), weights[j], z)
    return z + bias


@jit
def _weight_gradients(dweights, dz, xs, token, first_of_segment, TAPS):
    """The gradients of the weights of x_t, x_(t-1), ..., with the part of the output at the token."""
    sums = dweights
    for j in tl.static_range(TAPS - 1, -1, -1):
        x = tl.where(_reads(token - j, first_of_segment), xs[j], 0.0)
        sums = _pushed(sums, tl.fma(dz, x, dweights[j]), TAPS)
    return sums


@jit
def _input_gradient(dzs, weights, token, firsts_of_segments, TAPS):
    """dx at the token, from dz of the outputs t + TAPS - 1, ..., t, and the first tokens of their segments."""
    dx = tl.zeros(weights[0].shape, dtype=tl.float32)
    for j in tl.static_range(TAPS):
        reads = _reads(token, firsts_of_segments[TAPS - 1 - j])
        # An explicit `fma`: a product in the `where` is rounded, but not where the compiler drops the `where`.
        dx = tl.fma(tl.where(reads, dzs[TAPS - 1 - j], 0.0), weights[j], dx)
    return dx


class _Runs(NamedTuple):
    """How programs of the backward kernel share the tokens.

    Attributes:
        first_token: 0, or that of the state.
        length: tokens of a program.
        n_runs: programs for each row and block of channels.
        channel_blocks: number of blocks of channels.
    """

    first_token: int
    length: int
    n_runs: int
    channel_blocks: int


@kernel
def _backward_kernel(
    conv, dy, dx_ptr, dstate_ptr, dweight_ptr, runs, TAPS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    part = program // runs.channel_blocks
    channels = program % runs.channel_blocks * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < conv.n_channels
    batch, begin = part // runs.n_runs, runs.first_token + part % runs.n_runs * runs.length
    end = tl.minimum(begin + runs.length, conv.n_tokens)
    weights = _load_weights(conv, channels, TAPS)
    bias = tl.zeros((CHANNELS,), dtype=tl.float32)
    if conv.bias is not None:
        bias = load_bias(conv.bias, channels, conv.n_channels)
    dbias = tl.zeros((CHANNELS,), dtype=tl.float32)
    xs, dzs, dweights, firsts = (dbias,) * TAPS, (dbias,) * TAPS, (dbias,) * TAPS, (begin,) * TAPS
    for before in tl.static_range(TAPS - 1, 0, -1):
        xs = _pushed(xs, _load_inputs(conv, batch, begin - before, channels, mask, TAPS), TAPS)
    for token in range(begin, end + TAPS - 1):
        first = _first_of_segment(conv, batch, token)
        xs = _pushed(xs, _load_inputs(conv, batch, token, channels, mask, TAPS), TAPS)
        firsts = _pushed(firsts, first, TAPS)
        is_output = (token >= 0) & (token < conv.n_tokens)
        offset = batch * dy.batch_stride + token * dy.token_stride
        dz = tl.load(dy.ptr + offset + channels, mask=mask & is_output, other=0.0).to(tl.float32)
        if SILU:
            z = _output(xs, weights, bias, token, first, TAPS)
            sigmoid, complement = sigmoids(z, conv.x.ptr.dtype.element_ty == tl.float32)
            dz = tl.where(is_output, dz * (sigmoid * (1.0 + z * complement)), 0.0)
        dzs = _pushed(dzs, dz, TAPS)
        if dweight_ptr is not None:
            own_dz = tl.where(token < end, dz, 0.0)
            dweights = _weight_gradients(dweights, own_dz, xs, token, first, TAPS)
            dbias += own_dz

        source = token - (TAPS - 1)  # the input whose last output is that of the token
        dx = _input_gradient(dzs, weights, source, firsts, TAPS)
        is_own = mask & (source >= begin)
        if dx_ptr is not None:
            ptrs = dx_ptr + (batch * conv.n_tokens + source) * conv.n_channels + channels
            tl.store(ptrs, dx.to(dx_ptr.dtype.element_ty), mask=is_own & (source >= 0))
        if dstate_ptr is not None:
            ptrs = dstate_ptr + (batch * (TAPS - 1) + TAPS - 1 + source) * conv.n_channels + channels
            tl.store(ptrs, dx.to(dstate_ptr.dtype.element_ty), mask=is_own & (source < 0))
    if dweight_ptr is not None:
        ptrs = dweight_ptr + part * (TAPS + 1) * conv.n_channels + channels
        for j in tl.static_range(TAPS):
            tl.store(ptrs + (TAPS - 1 - j) * conv.n_channels, dweights[j], mask=mask)
        tl.store(ptrs + TAPS * conv.n_channels, dbias, mask=mask)


def _allocate_forward(inputs: ConvInputs) -> Tensor:
    return empty_result(inputs.x)


@register("causal_conv_forward", fake=_allocate_forward)
def _forward(inputs: ConvInputs, silu: bool) -> Tensor:
    y = _allocate_forward(inputs)
    batch, tokens, channels = y.shape
    token_blocks, channel_blocks = cdiv(tokens, TOKENS), cdiv(channels, CHANNELS)
    sizes = inputs.weight.shape[1], silu, TOKENS, CHANNELS
    _forward_kernel[batch * token_blocks * channel_blocks](
        _Convolution.of(inputs), y, token_blocks, channel_blocks, *sizes, num_warps=WARPS
    )
    return y


def _convolved(silu: bool, *fields: Tensor | None) -> Tensor:
    return _forward(ConvInputs._make(fields), silu)


class _Gradients(NamedTuple):
    """The gradients of x, weight, bias and initial state, in fp32 for weight and bias; without elements if not needed.

    Attributes:
        dx: (B, T, C).
        dweight: (k + 1, C): the columns of the weight, then the bias.
        dstate: (B, k - 1, C).
    """

    dx: Tensor
    dweight: Tensor
    dstate: Tensor


def _allocate_backward(inputs: ConvInputs, needs_x: bool, needs_weight: bool, needs_state: bool) -> _Gradients:
    x, weight = inputs.x, inputs.weight
    return _Gradients(
        empty_gradient(x, needs_x),
        x.new_empty((weight.shape[1] + 1, weight.shape[0]) if needs_weight else (0,), dtype=torch.float32),
        x.new_empty((x.shape[0], weight.shape[1] - 1, x.shape[2]) if needs_state else (0,)),
    )


@register("causal_conv_backward", fake=_allocate_backward)
def _backward(
    dy: Tensor, inputs: ConvInputs, silu: bool, needs_x: bool, needs_weight: bool, needs_state: bool
) -> _Gradients:
    gradients = _allocate_backward(inputs, needs_x, needs_weight, needs_state)
    (batch, tokens, channels), taps = inputs.x.shape, inputs.weight.shape[1]
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    first_token = 1 - taps if needs_state else 0
    channel_blocks = cdiv(channels, BACKWARD_CHANNELS)
    most = cdiv(BACKWARD_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(dy), max(1, batch * channel_blocks))
    length = max(FEWEST_TOKENS, cdiv(tokens - first_token, most))
    runs = _Runs(first_token, length, cdiv(tokens - first_token, length), channel_blocks)
    partial = dy.new_empty((batch * runs.n_runs, taps + 1, channels), dtype=torch.float32) if needs_weight else None
    dx, dstate = gradients.dx if needs_x else None, gradients.dstate if needs_state else None
    sizes = taps, silu, BACKWARD_CHANNELS
    _backward_kernel[channel_blocks * batch * runs.n_runs](
        _Convolution.of(inputs), conv_rows(dy), dx, dstate, partial, runs, *sizes, num_warps=BACKWARD_WARPS
    )
    if partial is not None:
        column_sums_(gradients.dweight.view(-1), partial.flatten(1))
    return gradients


class _CausalConv(FusedFunction):
    """The arguments are those of `_convolved`."""

    @staticmethod
    def forward(ctx: Any, silu: bool, *fields: Tensor | None) -> Tensor:
        ctx.save_for_backward(*fields)
        ctx.silu = silu
        return _convolved(silu, *fields)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ConvInputs(*ctx.saved_tensors)
        _, needs_x, needs_weight, needs_bias, needs_state, _ = ctx.needs_input_grad
        dx, dweight, dstate = _backward(dy, inputs, ctx.silu, needs_x, needs_weight or needs_bias, needs_state)
        taps = inputs.weight.shape[1]
        dw = dweight[:taps].T.to(inputs.weight.dtype) if needs_weight else None
        db = dweight[taps].to(inputs.bias.dtype) if inputs.bias is not None and needs_bias else None
        return None, dx if needs_x else None, dw, db, dstate if needs_state else None, None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    segment_start: Tensor | None = None,
    activation: ConvActivation | None = None,
    output_final_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal depthwise convolution along the tokens.

    Args:
        x: (B, T, C), adjacent channels, any other strides.
        weight: (C, k); the last column is the factor of the token itself. For a `Conv1d`, `weight.squeeze(1)`.
        bias: (C,), or None.
        initial_state: (B, k - 1, C), the inputs before the first token, in order; None for zeros.
        segment_start: (B or 1, T) integers, the index of the first token of each token's segment in packed rows, as
            `Context.segment_start`. Zeros precede each segment but the row's first one, which continues
            `initial_state`. None for one segment.
        activation: "silu", or None.
        output_final_state: also returns the last k - 1 inputs, the `initial_state` of the tokens that follow.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, T, C) in the dtype of `x`. With `output_final_state`, also a (B, k - 1, C) state in the same dtype; inputs
        before the last segment are zeros in it.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes or dtypes do not match, `activation` is unknown, or `backend` does not support the
            tensors.
    """
    check_convolution("causal_conv1d", x, weight, bias, activation)
    if initial_state is not None:
        shape = len(x), weight.shape[1] - 1, x.shape[2]
        check_tensor("causal_conv1d", "initial_state", initial_state, shapes=[shape])
    if segment_start is not None:
        shapes = [tuple(x.shape[:2]), (1, x.shape[1])]
        check_tensor("causal_conv1d", "segment_start", segment_start, "integer", shapes, x.device)
    floats = [t for t in (x, weight, bias, initial_state) if t is not None]
    if uses_triton(*floats, backend=backend) and fits(weight, backend):
        state = None if initial_state is None else initial_state.to(x.dtype)
        whole = (None if t is None else t.contiguous() for t in (weight, bias, state, segment_start))
        inputs = activation == "silu", x if x.stride(-1) == 1 else x.contiguous(), *whole
        y = _CausalConv.apply(*inputs)
        # A checkpointed block computes the result again anyway, as an input of the layer that follows.
        recomputable((y,), _convolved, *inputs, in_checkpoints=False)
    else:
        y = reference(x, weight, bias, initial_state, segment_start, activation)
    return (y, final_state(x, weight.shape[1] - 1, initial_state, segment_start)) if output_final_state else y


def fits(weight: Tensor, backend: Backend) -> bool:
    """Whether the kernels support this width.

    Raises:
        ValueError: they do not, and `backend` is "triton".
    """
    if weight.shape[1] <= MAX_TAPS:
        return True
    if backend == "triton":
        raise ValueError(
            f'backend="triton" with a weight of shape {tuple(weight.shape)}; expected at most {MAX_TAPS} columns, or '
            'backend="auto"'
        )
    return False


def check_convolution(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: object) -> None:
    """Raises unless the shapes match and the activation is known."""
    check_floats(name, x=x, weight=weight)
    check_optional_floats(name, bias=bias)
    if x.dim() != 3 or weight.dim() != 2 or len(weight) != x.shape[2] or weight.shape[1] == 0:
        raise shape_error(name, "(B, T, C) and (C, k)", x=x, weight=weight)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")
    if activation not in ("silu", None):
        raise ValueError(f'{name}: activation={activation!r}; expected "silu" or None')
