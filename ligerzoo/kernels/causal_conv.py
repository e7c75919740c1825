"""Causal depthwise convolution along the tokens, with an activation.

    y_t = act(bias + sum over j of weight[:, k - 1 - j] * x_(t-j)),   j = 0 to k - 1

Zeros, or the inputs of a given state, precede the first token. In packed rows, zeros precede each segment. Sums and
activation are in fp32; the result is rounded once.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.checks import check_floats, check_optional_floats, check_tensor
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, check_backend

ConvActivation = Literal["silu"]


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    segment_start: Tensor | None = None,
    activation: ConvActivation | None = None,
) -> tuple[Tensor, Tensor]:
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
        y = F.silu(y)
    final_state = padded[:, tokens:]
    if segment_start is not None and tokens > 0 and reach > 0:
        inputs = torch.arange(tokens - reach, tokens, device=x.device)
        final_state = final_state.masked_fill(_is_before_segment(inputs, segment_start[:, -1:])[..., None], 0.0)
    return y.to(x.dtype), final_state


def _is_before_segment(index: Tensor, segment_start: Tensor) -> Tensor:
    """Whether the inputs precede the segments. The first segment of a row includes the inputs of the initial state."""
    return (index < segment_start) & (segment_start > 0)


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
    _check("causal_conv1d", x, weight, bias, activation)
    if initial_state is not None:
        shape = len(x), weight.shape[1] - 1, x.shape[2]
        check_tensor("causal_conv1d", "initial_state", initial_state, shapes=[shape])
    if segment_start is not None:
        shapes = [x.shape[:2], (1, x.shape[1])]
        check_tensor("causal_conv1d", "segment_start", segment_start, "integer", shapes, x.device)
    check_backend(backend)
    y, state = reference(x, weight, bias, initial_state, segment_start, activation)
    return (y, state) if output_final_state else y


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
        state: (B, k - 1, C), the last inputs, in the dtype of `x`, any batch stride; overwritten.
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
    _check("causal_conv1d_step", x, weight, bias, activation)
    check_tensor("causal_conv1d_step", "state", state, shapes=[(len(x), weight.shape[1] - 1, x.shape[2])])
    check_backend(backend)
    with torch.no_grad():
        y, new_state = reference(x, weight, bias, state, None, activation)
        state.copy_(new_state)
        return y


def _check(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: object) -> None:
    """Raises unless the shapes match and the activation is known."""
    check_floats(name, x=x, weight=weight)
    check_optional_floats(name, bias=bias)
    if x.dim() != 3 or weight.dim() != 2 or len(weight) != x.shape[2] or weight.shape[1] == 0:
        raise ValueError(
            f"{name}: x is {tuple(x.shape)} and weight {tuple(weight.shape)}; expected (B, T, C) and (C, k)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")
    if activation not in ("silu", None):
        raise ValueError(f'{name}: activation={activation!r}; expected "silu" or None')
