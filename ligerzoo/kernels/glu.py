"""The gate of a gated feed-forward (Shazeer 2020, eqs. 5 and 6): `a(gate) * up`, alone or with the down projection.

Forward:   y = a(gate) * up,   in fp32, rounded once.
Backward:  dup = dy * a(gate),   dgate = dy * up * a'(gate).

The activations a are those of `activation`.

`glu` saves gate and up. `glu_linear(gate, up, W)` computes `glu(gate, up) @ W.T` and saves the same two and W: a linear
layer after `glu` would keep the product as well, a fifth of all that a Llama layer keeps for its backward, though the
backward kernel can write the product again for the price of one more store.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.activation import ACTIVATIONS, Activation, activate, check_activation
from ligerzoo.kernels.dispatch import Backend, autocast, once_differentiable, register, uses_triton
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.tiling import STRIP_WARPS, row_and_columns, strips


def reference(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """`glu` in plain torch: the specification, the CPU path and the tests' oracle."""
    return ACTIVATIONS[activation](gate) * up


def linear_reference(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "silu"
) -> Tensor:
    """`glu_linear` in plain torch."""
    return F.linear(reference(gate, up, activation).to(weight.dtype), weight, bias)


@kernel
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, n_cols, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    row, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    activated, _ = activate(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
    tl.store(y_ptr + row * n_cols + cols, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, dy_stride, gate_stride, up_stride, n_cols,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    NEEDS_DGATE: tl.constexpr, NEEDS_DUP: tl.constexpr, NEEDS_Y: tl.constexpr,
):  # fmt: skip
    row, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    target = row * n_cols + cols
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    activated, slope = activate(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
    if NEEDS_DUP:
        tl.store(dup_ptr + target, (dy * activated).to(dup_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DGATE or NEEDS_Y:
        up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
        if NEEDS_DGATE:
            tl.store(dgate_ptr + target, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
        if NEEDS_Y:
            tl.store(y_ptr + target, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


def _forward_fake(gate: Tensor, up: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    return gate.new_empty(gate.shape, dtype=dtype)


@register("glu_forward(Tensor gate, Tensor up, str activation, ScalarType dtype) -> Tensor", fake=_forward_fake)
def _forward(gate: Tensor, up: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    y = _forward_fake(gate, up, activation, dtype)
    (gate, up), n_cols, block, programs = strips(gate, up)
    _forward_kernel[programs](
        gate, up, y, gate.stride(0), up.stride(0), n_cols, block, activation, num_warps=STRIP_WARPS
    )  # fmt: skip
    return y


def _backward_fake(
    dy: Tensor, gate: Tensor, up: Tensor, activation: Activation, needs_gate: bool, needs_up: bool, needs_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dgate = gate.new_empty(gate.shape if needs_gate else (0,))
    dup = up.new_empty(up.shape if needs_up else (0,))
    return dgate, dup, dy.new_empty(dy.shape if needs_y else (0,))


@register(
    "glu_backward(Tensor dy, Tensor gate, Tensor up, str activation, bool needs_gate, bool needs_up, bool needs_y)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_backward_fake,
)
def _backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: Activation, needs_gate: bool, needs_up: bool, needs_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dgate, dup, y = _backward_fake(dy, gate, up, activation, needs_gate, needs_up, needs_y)
    (dy, gate, up), n_cols, block, programs = strips(dy, gate, up)
    _backward_kernel[programs](
        dy, gate, up, dgate, dup, y, dy.stride(0), gate.stride(0), up.stride(0), n_cols, block, activation,
        needs_gate, needs_up, needs_y, num_warps=STRIP_WARPS,
    )  # fmt: skip
    return dgate, dup, y


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation, gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_gate, needs_up, _ = ctx.needs_input_grad
        dgate, dup, _ = _backward(dy, *ctx.saved_tensors, ctx.activation, needs_gate, needs_up, False)
        return dgate if needs_gate else None, dup if needs_up else None, None


class _GLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation = activation
        return F.linear(_forward(gate, up, activation, weight.dtype), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        needs_gate, needs_up, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dgate, dup, dweight, dz_rows = None, None, None, dz.reshape(-1, dz.shape[-1])
        if needs_gate or needs_up:
            dgate, dup, y = _backward(dz @ weight, gate, up, ctx.activation, needs_gate, needs_up, needs_weight)
        elif needs_weight:
            y = _forward(gate, up, ctx.activation, weight.dtype)
        if needs_weight:
            dweight = dz_rows.T @ y.view(-1, y.shape[-1])
        dbias = dz_rows.sum(0) if needs_bias else None
        return dgate if needs_gate else None, dup if needs_up else None, dweight, dbias, None


def _check(name: str, gate: Tensor, up: Tensor, activation: Activation) -> None:
    check_activation(activation)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"{name}: gate is {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype}; "
            "expected the same of both"
        )


def glu(gate: Tensor, up: Tensor, *, activation: Activation = "silu", backend: Backend = "auto") -> Tensor:
    """`a(gate) * up`, elementwise.

    Args:
        gate: (..., I), any strides; rows of unit stride, as the halves of a fused projection are, are not copied.
        up: (..., I), the same shape and dtype.
        activation: a, see `activation_linear`.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference).

    Returns:
        (..., I), contiguous.

    Raises:
        ValueError: shapes or dtypes differ, or the activation is unknown.
    """
    _check("glu", gate, up, activation)
    if uses_triton(gate, up, backend=backend):
        return _GLU.apply(gate, up, activation)
    return reference(gate, up, activation)


def swiglu(gate: Tensor, up: Tensor, *, backend: Backend = "auto") -> Tensor:
    """`silu(gate) * up`, see `glu`."""
    return glu(gate, up, activation="silu", backend=backend)


def geglu(
    gate: Tensor, up: Tensor, *, approximate: Literal["tanh", "none"] = "tanh", backend: Backend = "auto"
) -> Tensor:
    """`gelu(gate) * up`, see `glu`; `approximate` is that of `torch.nn.functional.gelu`."""
    activations: dict[str, Activation] = {"tanh": "gelu_tanh", "none": "gelu"}
    if approximate not in activations:
        raise ValueError(f'geglu: approximate={approximate!r}; expected "tanh" or "none"')
    return glu(gate, up, activation=activations[approximate], backend=backend)


def glu_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """`glu(gate, up) @ weight.T + bias`, keeping only `gate` and `up` for the backward pass, not their product.

    Args:
        gate: (..., I), any strides.
        up: (..., I), the same shape and dtype.
        weight: (H, I), as `torch.nn.Linear` has it. The product of gate and up is rounded to its dtype, which under
            autocast is autocast's.
        bias: (H,) or None.
        activation: see `activation_linear`.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference).

    Returns:
        (..., H).

    Raises:
        ValueError: the shapes or dtypes of `gate` and `up` differ, or the activation is unknown.
    """
    _check("glu_linear", gate, up, activation)
    if weight.shape[1:] != gate.shape[-1:] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"glu_linear: gate {tuple(gate.shape)}, weight {tuple(weight.shape)} and bias "
            f"{None if bias is None else tuple(bias.shape)}; expected (..., I), (H, I) and (H,)"
        )
    weight, bias = autocast(weight, bias)
    if uses_triton(gate, up, weight, backend=backend):
        return _GLULinear.apply(gate, up, weight, bias, activation)
    return linear_reference(gate, up, weight, bias, activation)
