"""One step of the causal convolution, see `causal_conv`: a few tokens, with the state updated in place.

A program computes all tokens of a step for some channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.causal_conv import (
    ConvActivation,
    check_convolution,
    conv_rows,
    final_state,
    fits,
    load_bias,
    reference,
)
from ligerzoo.kernels.dispatch import Backend, cdiv, empty_result, next_power_of_2, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import sigmoids
from ligerzoo.kernels.registration import needs_dispatch
from ligerzoo.tensor_checks import check_tensor

CHANNELS, WARPS = 256, 4
"""Channels per program, and warps. To be tuned on a GPU."""


@jit
def _load_recent(x, state, batch, source, channels, mask, TAPS: tl.constexpr):
    """The inputs at these tokens; negative ones are in the state."""
    x_ptr = x.ptr + batch * x.batch_stride + channels[None, :] * x.channel_stride
    state_ptr = state.ptr + batch * state.batch_stride + channels[None, :] * state.channel_stride
    source, is_new = source[:, None], (source >= 0)[:, None]
    new = tl.load(x_ptr + source * x.token_stride, mask=mask & is_new, other=0.0)
    old = tl.load(state_ptr + (source + TAPS - 1) * state.token_stride, mask=mask & (source < 0), other=0.0)
    return tl.where(is_new, new, old)


@kernel
def _step_kernel(
    x, state, weight_ptr, bias_ptr, y_ptr, n_tokens, n_channels, n_blocks,
    TAPS: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, channels = program // n_blocks, program % n_blocks * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < n_channels
    rows = tl.arange(0, ROWS)
    in_kernel, in_state = (rows < TAPS)[:, None] & mask[None, :], (rows < TAPS - 1)[:, None] & mask[None, :]
    weight = tl.load(weight_ptr + channels[None, :] * TAPS + rows[:, None], mask=in_kernel, other=0.0).to(tl.float32)
    for token in range(n_tokens):
        recent = _load_recent(x, state, batch, token - (TAPS - 1) + rows, channels, in_kernel, TAPS)
        y = tl.sum(weight * recent.to(tl.float32), 0)
        if bias_ptr is not None:
            y += load_bias(bias_ptr, channels, n_channels)
        if SILU:
            sigmoid, _ = sigmoids(y, x.ptr.dtype.element_ty == tl.float32)
            y *= sigmoid
        tl.store(y_ptr + (batch * n_tokens + token) * n_channels + channels, y.to(y_ptr.dtype.element_ty), mask=mask)
    recent = _load_recent(x, state, batch, n_tokens - (TAPS - 1) + rows, channels, in_state, TAPS)
    tl.debug_barrier()  # other threads have read the state
    state_ptr = state.ptr + batch * state.batch_stride + channels[None, :] * state.channel_stride
    tl.store(state_ptr + rows[:, None] * state.token_stride, recent, mask=in_state)


def _step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    y, (batch, tokens, channels), taps = empty_result(x), x.shape, weight.shape[1]
    vectors, blocks = (weight.contiguous(), None if bias is None else bias.contiguous()), cdiv(channels, CHANNELS)
    sizes = taps, next_power_of_2(taps), silu, CHANNELS
    _step_kernel[batch * blocks](
        conv_rows(x), conv_rows(state), *vectors, y, tokens, channels, blocks, *sizes, num_warps=WARPS
    )
    return y


def causal_conv1d_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ConvActivation | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Continues `causal_conv1d` by one token or a few, and updates the state in place. Not differentiable.

    It allocates only its result and does not synchronize with the host, so a CUDA graph can capture it.

    Args:
        x: (B, T, C), T small.
        state: (B, k - 1, C), the last inputs, any strides, in the dtype of `x`; overwritten.
        weight: (C, k), see `causal_conv1d`.
        bias: (C,), or None.
        activation: "silu", or None.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, T, C) in the dtype of `x`.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes or dtypes do not match, `activation` is unknown, or `backend` does not support the
            tensors.
    """
    check_convolution("causal_conv1d_step", x, weight, bias, activation)
    check_tensor("causal_conv1d_step", "state", state, shapes=[(len(x), weight.shape[1] - 1, x.shape[2])])
    with torch.no_grad():
        floats = [t for t in (x, state, weight, bias) if t is not None]
        if not (uses_triton(*floats, backend=backend) and fits(weight, backend)) or needs_dispatch(*floats):
            y = reference(x, weight, bias, state, None, activation)
            state.copy_(final_state(x, weight.shape[1] - 1, state, None))
            return y
        with torch.cuda.device(x.device if x.is_cuda else -1):
            return _step(x, state, weight, bias, activation == "silu")
