"""The gate of a SwiGLU feed-forward (Shazeer 2020, eq. 6): `silu(gate) * up`, alone or with the down projection.

Forward:   y = s * gate * up,   s = sigmoid(gate), all in fp32, rounded once.
Backward:  dup = dy * s * gate,   dgate = dy * up * s * (1 + gate * (1 - s)).

`swiglu` saves gate and up. `swiglu_linear(gate, up, W)` computes `swiglu(gate, up) @ W.T` and saves the same two and W:
a linear layer after `swiglu` would keep the product as well, a fifth of all that a Llama layer keeps for its backward,
though the backward kernel can write the product again for the price of one more store.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.dispatch import autocast, once_differentiable, register, uses_triton
from ligerzoo.kernels.jit import kernel, tl

_BLOCK = 2048


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """The same in plain torch: the specification, the CPU path and the tests' oracle."""
    return F.silu(gate) * up


def linear_reference(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`swiglu_linear` in plain torch."""
    return F.linear(reference(gate, up), weight, bias)


@kernel
def _forward_kernel(gate_ptr, up_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n_elements
    gate = tl.load(gate_ptr + index, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + index, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, n_elements, BLOCK: tl.constexpr, NEEDS_Y: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n_elements
    dy = tl.load(dy_ptr + index, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + index, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dgate_ptr + index, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + index, (dy * silu).to(dup_ptr.dtype.element_ty), mask=mask)
    if NEEDS_Y:
        tl.store(y_ptr + index, (silu * up).to(y_ptr.dtype.element_ty), mask=mask)


def _forward_fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@register("swiglu_forward(Tensor gate, Tensor up) -> Tensor", fake=_forward_fake)
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    y = _forward_fake(gate, up)
    _forward_kernel[-(-y.numel() // _BLOCK)](gate.contiguous(), up.contiguous(), y, y.numel(), _BLOCK, num_warps=4)
    return y


def _backward_fake(dy: Tensor, gate: Tensor, up: Tensor, needs_y: bool) -> tuple[Tensor, Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape), gate.new_empty(gate.shape if needs_y else (0,))


@register(
    "swiglu_backward(Tensor dy, Tensor gate, Tensor up, bool needs_y) -> (Tensor, Tensor, Tensor)", fake=_backward_fake
)
def _backward(dy: Tensor, gate: Tensor, up: Tensor, needs_y: bool) -> tuple[Tensor, Tensor, Tensor]:
    dgate, dup, y = _backward_fake(dy, gate, up, needs_y)
    _backward_kernel[-(-gate.numel() // _BLOCK)](
        dy.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup, y, gate.numel(), _BLOCK, needs_y, num_warps=4
    )
    return dgate, dup, y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        dgate, dup, _ = _backward(dy, *ctx.saved_tensors, False)
        return dgate, dup


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(_forward(gate, up), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[2:]
        dgate, dup, y = _backward(dz @ weight, gate, up, needs_weight)
        dz_rows = dz.reshape(-1, dz.shape[-1])
        dweight = dz_rows.T @ y.view(-1, y.shape[-1]) if needs_weight else None
        return dgate, dup, dweight, dz_rows.sum(0) if needs_bias else None


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu: gate is {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype}; "
            "expected the same of both"
        )


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, elementwise.

    Args:
        gate: (..., I), any strides.
        up: (..., I), the same shape and dtype.

    Returns:
        (..., I), contiguous.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    _check(gate, up)
    if uses_triton(gate, up):
        return _SwiGLU.apply(gate, up)
    return reference(gate, up)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`swiglu(gate, up) @ weight.T + bias`, keeping only `gate` and `up` for the backward pass, not their product.

    Args:
        gate: (..., I), any strides.
        up: (..., I), the same shape and dtype.
        weight: (H, I), as `torch.nn.Linear` has it.
        bias: (H,) or None.

    Returns:
        (..., H).

    Raises:
        ValueError: the shapes or dtypes of `gate` and `up` differ.
    """
    gate, up, weight, bias = autocast(gate, up, weight, bias)
    _check(gate, up)
    if uses_triton(gate, up, weight):
        return _SwiGLULinear.apply(gate, up, weight, bias)
    return linear_reference(gate, up, weight, bias)
