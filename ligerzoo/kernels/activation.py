"""Activations, and an activation fused with the projection after it in an MLP without a gate: `a(x) @ W.T + b`.

Forward:   y = a(x),   in fp32, rounded once;   z = y W^T + b.
Backward:  dx = (dz W) * a'(x),   dW = dz^T y,   db = sum of dz.

The activations a, with s(u) = 1 / (1 + exp(-u)) and c = sqrt(8 / pi):
    silu        x s(x)
    gelu_tanh   x s(c (x + 0.044715 x^3)),   equal to x/2 (1 + tanh(c/2 (...)))
    gelu        x P(x),   P the standard normal distribution function
    quick_gelu  x s(1.702 x),   an approximation of gelu (Hendrycks & Gimpel 2016, section 2; CLIP)
    relu2       max(x, 0)^2   (So et al. 2021, section 4.2)

Saved: x and W. Recomputed in backward: y, by the kernel that writes dx, at the cost of one more store.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import check, one_of
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, autocast, empty_gradient, empty_result, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp, sigmoids
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.row_sums import unsplit_linear
from ligerzoo.kernels.tiling import STRIP_WARPS, load_strip, row_and_columns, strips
from ligerzoo.tensor_checks import check_floats, check_optional_floats, shape_error

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu2"]


class ActivationFunction(NamedTuple):
    """An activation in plain torch; its Triton code is a branch of `activate`.

    Attributes:
        function: a(x).
        backward: the gradient dy a'(x) of x, from dy and x.
    """

    function: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns a(x)."""
        return self.function(x)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    positive = torch.relu(x)
    return positive * positive  # `square` would compute in fp32 under autocast


_silu_backward = torch.ops.aten.silu_backward
_gelu_backward = torch.ops.aten.gelu_backward

ACTIVATIONS: dict[Activation, ActivationFunction] = {
    "silu": ActivationFunction(F.silu, lambda dy, x: _silu_backward(dy, x)),
    "gelu_tanh": ActivationFunction(
        partial(F.gelu, approximate="tanh"), lambda dy, x: _gelu_backward(dy, x, approximate="tanh")
    ),
    "gelu": ActivationFunction(F.gelu, lambda dy, x: _gelu_backward(dy, x, approximate="none")),
    "quick_gelu": ActivationFunction(_quick_gelu, lambda dy, x: _silu_backward(dy, 1.702 * x)),
    "relu2": ActivationFunction(_relu2, lambda dy, x: dy * 2.0 * torch.relu(x)),
}


def check_activation(activation: Activation) -> Activation:
    """Returns the activation.

    Raises:
        ValueError: the activation is unknown.
    """
    if activation not in ACTIVATIONS:
        check(None, one_of(ACTIVATIONS), activation=activation)
    return activation


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "gelu") -> Tensor:
    """`activation_linear` in plain torch: the specification, the CPU path and the test oracle."""
    return F.linear(ACTIVATIONS[activation](x).to(weight.dtype), weight, bias)


@jit
def scaled_silu(x, scale: tl.constexpr, EXACT: tl.constexpr):
    s, complement = sigmoids(scale * x, EXACT)
    return x * s, s * (1.0 + scale * x * complement)


@jit
def _gelu_tanh(x, EXACT: tl.constexpr):
    c = 1.5957691216057308  # sqrt(8 / pi)
    s, complement = sigmoids(c * (x + 0.044715 * x * x * x), EXACT)
    slope = c * (1.0 + 3.0 * 0.044715 * x * x)
    return x * s, s + x * (s * complement) * slope


@jit
def _gelu(x, EXACT: tl.constexpr):
    distribution = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    density = 0.3989422804014327 * exp(-0.5 * x * x, EXACT)  # 1 / sqrt(2 pi)
    return x * distribution, distribution + x * density


@jit
def _relu2_with_slope(x):
    rectified = tl.where(x <= 0.0, 0.0, x)  # keeps NaN
    return rectified * rectified, 2.0 * rectified


@jit
def activate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """a(x) and a'(x). EXACT selects the functions of `math` that are exact in fp32."""
    if ACTIVATION == "silu":
        return scaled_silu(x, 1.0, EXACT)
    elif ACTIVATION == "quick_gelu":
        return scaled_silu(x, 1.702, EXACT)
    elif ACTIVATION == "gelu_tanh":
        return _gelu_tanh(x, EXACT)
    elif ACTIVATION == "relu2":
        return _relu2_with_slope(x)
    else:
        tl.static_assert(ACTIVATION == "gelu", "activate: this activation has no branch")
        return _gelu(x, EXACT)


@kernel
def _forward_kernel(x, y_ptr, n_cols, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    y, _ = activate(load_strip(x, row, cols, mask), ACTIVATION, x.ptr.dtype.element_ty == tl.float32)
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(dy, x, dx_ptr, y_ptr, n_cols, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    target = row * n_cols + cols
    y, slope = activate(load_strip(x, row, cols, mask), ACTIVATION, x.ptr.dtype.element_ty == tl.float32)
    dx = load_strip(dy, row, cols, mask) * slope
    tl.store(dx_ptr + target, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if y_ptr is not None:
        tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty), mask=mask)


def _allocate_forward(x: Tensor, dtype: torch.dtype) -> Tensor:
    return empty_result(x, dtype)


@register("activation_forward", fake=_allocate_forward)
def _forward(x: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    y = _allocate_forward(x, dtype)
    (rows,), n_cols, block, programs = strips(x)
    _forward_kernel[programs](rows, y, n_cols, block, activation, num_warps=STRIP_WARPS)
    return y


def _allocate_backward(dy: Tensor, x: Tensor, needs_y: bool) -> tuple[Tensor, Tensor]:
    return empty_result(x), empty_gradient(dy, needs_y)


@register("activation_backward", fake=_allocate_backward)
def _backward(dy: Tensor, x: Tensor, activation: Activation, needs_y: bool) -> tuple[Tensor, Tensor]:
    dx, y = _allocate_backward(dy, x, needs_y)
    rows, n_cols, block, programs = strips(dy, x)
    _backward_kernel[programs](*rows, dx, y if needs_y else None, n_cols, block, activation, num_warps=STRIP_WARPS)
    return dx, y


class _ActivationLinear(FusedFunction):
    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.activation = activation
        return unsplit_linear(_forward(x, activation, weight.dtype), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dz: Tensor) -> tuple[Tensor | None, ...]:
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
    """Computes `a(x) @ weight.T + bias`. Saves `x` for backward, but not `a(x)`.

    Args:
        x: (..., I), any strides.
        weight: (H, I), like `torch.nn.Linear.weight`. `a(x)` is rounded to its dtype, or to autocast's dtype under
            autocast.
        bias: (H,) or None.
        activation: the activation a, a name of `ACTIVATIONS`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (..., H).

    Raises:
        ValueError: the shapes do not match, or the activation is unknown.
    """
    check_activation(activation)
    check_floats("activation_linear", x=x, weight=weight)
    check_optional_floats("activation_linear", bias=bias)
    if weight.shape[1:] != x.shape[-1:] or (bias is not None and bias.shape != weight.shape[:1]):
        raise shape_error("activation_linear", "shapes (..., I), (H, I) and (H,)", x=x, weight=weight, bias=bias)
    weight, bias = autocast(weight, bias)
    if uses_triton(x, weight, backend=backend):
        return _ActivationLinear.apply(x, weight, bias, activation)
    return reference(x, weight, bias, activation)
