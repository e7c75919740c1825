"""One step of the causal convolution, see `causal_conv`: a few tokens, with the last inputs updated in place.

A program computes all tokens of some channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.causal_conv import ConvActivation, check_convolution, final_state, fits, reference
from ligerzoo.kernels.dispatch import Backend, cdiv, next_power_of_2, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import sigmoids
from ligerzoo.kernels.registration import needs_dispatch
from ligerzoo.tensor_checks import check_tensor

CHANNELS, WARPS = 256, 4
"""Channels per program, and warps. To be tuned on a GPU."""


@kernel
def _step_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, y_ptr, x_batch_stride, x_token_stride, x_channel_stride,
    state_batch_stride, state_token_stride, state_channel_stride, n_tokens, n_channels, n_blocks,
    TAPS: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, channels = program // n_blocks, program % n_blocks * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < n_channels
    rows = tl.arange(0, ROWS)
    in_kernel = (rows < TAPS)[:, None] & mask[None, :]
    x_ptr += batch * x_batch_stride + channels[None, :] * x_channel_stride
    state_ptr += batch * state_batch_stride + channels[None, :] * state_channel_stride
    weight = tl.load(weight_ptr + channels[None, :] * TAPS + rows[:, None], mask=in_kernel, other=0.0).to(tl.float32)
    for token in range(n_tokens):
        source = token - (TAPS - 1) + rows
        y = tl.sum(weight * _load_recent(x_ptr, state_ptr, source, x_token_stride, state_token_stride, in_kernel,
                                         TAPS).to(tl.float32), 0)  # fmt: skip
        if bias_ptr is not None:
            y += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            sigmoid, _ = sigmoids(y, EXACT)
            y *= sigmoid
        tl.store(y_ptr + (batch * n_tokens + token) * n_channels + channels, y.to(y_ptr.dtype.element_ty), mask=mask)
    recent = _load_recent(x_ptr, state_ptr, n_tokens - (TAPS - 1) + rows, x_token_stride, state_token_stride,
                          in_kernel & (rows < TAPS - 1)[:, None], TAPS)  # fmt: skip
    tl.debug_barrier()  # other threads have read the state
    tl.store(state_ptr + rows[:, None] * state_token_stride, recent, mask=in_kernel & (rows < TAPS - 1)[:, None])


@jit
def _load_recent(x_ptr, state_ptr, source, x_token_stride, state_token_stride, mask, TAPS: tl.constexpr):
    """The inputs at these tokens; negative ones are in the state."""
    x = tl.load(x_ptr + source[:, None] * x_token_stride, mask=mask & (source >= 0)[:, None], other=0.0)
    state = tl.load(state_ptr + (source + TAPS - 1)[:, None] * state_token_stride, mask=mask & (source < 0)[:, None],
                    other=0.0)  # fmt: skip
    return tl.where((source >= 0)[:, None], x, state)


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


def _step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    batch, tokens, channels = x.shape
    taps = weight.shape[1]
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty(x.shape)
    blocks = cdiv(channels, CHANNELS)
    _step_kernel[batch * blocks](
        x, state, weight.contiguous(), bias, y, *x.stride(), *state.stride(), tokens, channels, blocks, taps,
        next_power_of_2(taps), silu, CHANNELS, x.dtype == torch.float32, num_warps=WARPS,
    )  # fmt: skip
    return y
