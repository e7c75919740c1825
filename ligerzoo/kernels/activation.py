"""Activations, and the one of a feed-forward without a gate with its second projection: `a(x) @ W.T + b`.

Forward:   y = a(x),   in fp32, rounded once;   z = y W^T + b.
Backward:  dx = (dz W) * a'(x),   dW = dz^T y,   db = sum of dz.

The activations a, with s(u) = 1 / (1 + exp(-u)) and c = sqrt(8 / pi):
    silu        x s(x)
    gelu_tanh   x s(c (x + 0.044715 x^3)),   which is x/2 (1 + tanh(...)) without a tanh
    gelu        x P(x),   P the normal distribution
    quick_gelu  x s(1.702 x),   close to it (Hendrycks & Gimpel 2016, section 2; CLIP)

Saved are x and W: y, as large as x, is written again by the backward kernel, for the price of one more store.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, autocast, once_differentiable, register, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp, sigmoids
from ligerzoo.kernels.tiling import STRIP_WARPS, row_and_columns, strips

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu"]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": _quick_gelu,
}


def check_activation(activation: Activation) -> Activation:
    """The activation; a ValueError if there is none of that name."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}; expected one of {', '.join(map(repr, ACTIVATIONS))}")
    return activation


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "gelu") -> Tensor:
    """`activation_linear` in plain torch: the specification, the CPU path and the tests' oracle."""
    return F.linear(ACTIVATIONS[activation](x).to(weight.dtype), weight, bias)


@jit
def _scaled_silu(x, scale: tl.constexpr, EXACT: tl.constexpr):
    share, rest = sigmoids(scale * x, EXACT)
    return x * share, share * (1.0 + scale * x * rest)


@jit
def _gelu_tanh(x, EXACT: tl.constexpr):
    c = 1.5957691216057308  # sqrt(8 / pi)
    share, rest = sigmoids(c * (x + 0.044715 * x * x * x), EXACT)
    slope = c * (1.0 + 3.0 * 0.044715 * x * x)
    return x * share, share + x * (share * rest) * slope


@jit
def _gelu(x, EXACT: tl.constexpr):
    distribution = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    density = 0.3989422804014327 * exp(-0.5 * x * x, EXACT)  # 1 / sqrt(2 pi)
    return x * distribution, distribution + x * density


@jit
def activate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """a(x) and a'(x), see `elementwise` for EXACT."""
    if ACTIVATION == "silu":
        return _scaled_silu(x, 1.0, EXACT)
    elif ACTIVATION == "quick_gelu":
        return _scaled_silu(x, 1.702, EXACT)
    elif ACTIVATION == "gelu_tanh":
        return _gelu_tanh(x, EXACT)
    else:
        return _gelu(x, EXACT)


@kernel
def _forward_kernel(x_ptr, y_ptr, x_stride, n_cols, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    y, _ = activate(x, ACTIVATION, x_ptr.dtype.element_ty == tl.float32)
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dy_ptr, x_ptr, dx_ptr, y_ptr, dy_stride, x_stride, n_cols,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, NEEDS_Y: tl.constexpr,
):  # fmt: skip
    row, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    target = row * n_cols + cols
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    y, slope = activate(x, ACTIVATION, x_ptr.dtype.element_ty == tl.float32)
    tl.store(dx_ptr + target, (dy * slope).to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_Y:
        tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty), mask=mask)


def _forward_fake(x: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@register("activation_forward(Tensor x, str activation, ScalarType dtype) -> Tensor", fake=_forward_fake)
def _forward(x: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    y = _forward_fake(x, activation, dtype)
    (x,), n_cols, block, programs = strips(x)
    _forward_kernel[programs](x, y, x.stride(0), n_cols, block, activation, num_warps=STRIP_WARPS)
    return y


def _backward_fake(dy: Tensor, x: Tensor, activation: Activation, needs_y: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), dy.new_empty(dy.shape if needs_y else (0,))


@register(
    "activation_backward(Tensor dy, Tensor x, str activation, bool needs_y) -> (Tensor, Tensor)", fake=_backward_fake
)
def _backward(dy: Tensor, x: Tensor, activation: Activation, needs_y: bool) -> tuple[Tensor, Tensor]:
    dx, y = _backward_fake(dy, x, activation, needs_y)
    (dy, x), n_cols, block, programs = strips(dy, x)
    _backward_kernel[programs](
        dy, x, dx, y, dy.stride(0), x.stride(0), n_cols, block, activation, needs_y, num_warps=STRIP_WARPS
    )
    return dx, y


class _ActivationLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.activation = activation
        return F.linear(_forward(x, activation, weight.dtype), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx, dweight, dz_rows = None, None, dz.reshape(-1, dz.shape[-1])
        if needs_x:
            dx, y = _backward(dz @ weight, x, ctx.activation, needs_weight)
        elif needs_weight:
            y = _forward(x, ctx.activation, weight.dtype)
        if needs_weight:
            dweight = dz_rows.T @ y.view(-1, y.shape[-1])
        return dx, dweight, dz_rows.sum(0) if needs_bias else None, None


def activation_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "gelu",
    backend: Backend = "auto",
) -> Tensor:
    """`a(x) @ weight.T + bias`, keeping only `x` for the backward pass, not `a(x)`.

    Args:
        x: (..., I), any strides.
        weight: (H, I), as `torch.nn.Linear` has it. The activated x is rounded to its dtype, which under autocast is
            autocast's.
        bias: (H,) or None.
        activation: a: "silu", "gelu_tanh", "gelu" (with the error function) or "quick_gelu".
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference).

    Returns:
        (..., H).

    Raises:
        ValueError: the shapes do not fit, or the activation is unknown.
    """
    check_activation(activation)
    if weight.shape[1:] != x.shape[-1:] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"activation_linear: x {tuple(x.shape)}, weight {tuple(weight.shape)} and bias "
            f"{None if bias is None else tuple(bias.shape)}; expected (..., I), (H, I) and (H,)"
        )
    weight, bias = autocast(weight, bias)
    if uses_triton(x, weight, backend=backend):
        return _ActivationLinear.apply(x, weight, bias, activation)
    return reference(x, weight, bias, activation)
