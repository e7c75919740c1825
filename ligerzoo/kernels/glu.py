"""Gated linear units (Shazeer 2020, eqs. 5 and 6): `a(gate) * up`, with or without the down projection.

Forward:   y = a(gate) * up,  in fp32, rounded once.
Backward:  dup = dy * a(gate),  dgate = dy * up * a'(gate).

`activation` lists the activations a.

`glu` saves gate and up. `glu_linear(gate, up, W)` computes `glu(gate, up) @ W.T` and saves gate, up and W. Its backward
kernel recomputes y at the cost of one more store. A linear layer after `glu` saves y too, which is a fifth of what a
Llama layer saves for backward. With a low-rank update of W it also saves the update's matrices and its product with y,
which has few columns; see `lora_linears`. Low-rank terms of gate and up are added in registers, see `low_rank_glu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import low_rank_glu
from ligerzoo.kernels.activation import ACTIVATIONS, Activation, activate, check_activation
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable
from ligerzoo.kernels.dispatch import Backend, autocast, dtype_of_products, empty_gradient, empty_result, uses_triton
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.lora import update_gradients
from ligerzoo.kernels.low_rank import LowRank, LowRankTerms, low_rank_product
from ligerzoo.kernels.low_rank_glu_gradients import low_rank_glu_gradients
from ligerzoo.kernels.recompute import Recompute, recomputable
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.row_sums import unsplit_linear, unsplit_sum
from ligerzoo.kernels.tiling import STRIP_WARPS, load_strip, row_and_columns, strips
from ligerzoo.tensor_checks import (
    check_floats,
    check_optional_floats,
    explains_options,
    shape_error,
    shape_or_dtype_error,
)


def reference(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """`glu` in plain torch: the specification, the CPU path and the test oracle."""
    return ACTIVATIONS[activation](gate) * up


def linear_reference(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "silu",
    update: LowRank | None = None,
    terms: LowRankTerms | None = None,
) -> Tensor:
    """`glu_linear` in plain torch."""
    if terms is not None:
        gate, up = terms.add(gate, up)
    y = reference(gate, up, activation).to(weight.dtype)
    z = F.linear(y, weight, bias)
    return z if update is None else z + low_rank_product(y, update)


@kernel
def _forward_kernel(gate, up, y_ptr, n_cols, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    activated, _ = activate(load_strip(gate, row, cols, mask), ACTIVATION, gate.ptr.dtype.element_ty == tl.float32)
    y = activated * load_strip(up, row, cols, mask)
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(dy, gate, up, dgate_ptr, dup_ptr, y_ptr, n_cols, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    target = row * n_cols + cols
    dy = load_strip(dy, row, cols, mask)
    activated, slope = activate(load_strip(gate, row, cols, mask), ACTIVATION, gate.ptr.dtype.element_ty == tl.float32)
    if dup_ptr is not None:
        tl.store(dup_ptr + target, (dy * activated).to(dup_ptr.dtype.element_ty), mask=mask)
    if (dgate_ptr is not None) or (y_ptr is not None):
        up = load_strip(up, row, cols, mask)
        if dgate_ptr is not None:
            tl.store(dgate_ptr + target, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
        if y_ptr is not None:
            tl.store(y_ptr + target, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


def _allocate_forward(gate: Tensor, dtype: torch.dtype) -> Tensor:
    return empty_result(gate, dtype)


@register("glu_forward", fake=_allocate_forward)
def _forward(gate: Tensor, up: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    y = _allocate_forward(gate, dtype)
    rows, n_cols, block, programs = strips(gate, up)
    _forward_kernel[programs](*rows, y, n_cols, block, activation, num_warps=STRIP_WARPS)
    return y


class _Needs(NamedTuple):
    """Which gradients to compute, and whether y."""

    gate: bool
    up: bool
    y: bool = False


def _allocate_backward(dy: Tensor, gate: Tensor, up: Tensor, needs: _Needs) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradient(gate, needs.gate), empty_gradient(up, needs.up), empty_gradient(dy, needs.y)


@register("glu_backward", fake=_allocate_backward)
def _backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: Activation, needs: _Needs
) -> tuple[Tensor, Tensor, Tensor]:
    dgate, dup, y = _allocate_backward(dy, gate, up, needs)
    rows, n_cols, block, programs = strips(dy, gate, up)
    results = if_needed((dgate, dup, y), needs)
    _backward_kernel[programs](*rows, *results, n_cols, block, activation, num_warps=STRIP_WARPS)
    return dgate, dup, y


class _GLU(FusedFunction):
    @staticmethod
    def forward(ctx: FusedContext, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation, gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        needs = _Needs(*ctx.needs_input_grad[:2])
        return if_needed(_backward(dy, gate, up, ctx.activation, needs), needs)


class _LinearOptions(NamedTuple):
    """The numbers of `glu_linear`: the activation, the scale of the update, and the scales of the terms, if any."""

    activation: Activation
    update_scale: float
    term_scales: tuple[float, ...]


class _GLULinear(FusedFunction):
    """a and b are the matrices of the update; the last arguments are the tensors of `LowRankTerms`, none without."""

    @staticmethod
    def forward(
        ctx: FusedContext,
        options: _LinearOptions,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        y, h = _activated(options, weight.dtype, gate, up, *factors), None
        if a is None or b is None:
            z = unsplit_linear(y, weight, bias)
        else:
            rows = y.view(-1, y.shape[-1])
            h = unsplit_linear(rows, a.to(y.dtype))
            recomputable((h,), _inner, options, weight.dtype, a, gate, up, *factors, level=Recompute.BLOCK)
            z = unsplit_sum(rows, weight, bias, h, b, options.update_scale).view(*y.shape[:-1], len(weight))
        ctx.save_for_backward(gate, up, weight, a, b, h, *factors)
        ctx.options = options
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dz: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight, a, b, h, *factors = ctx.saved_tensors
        _, needs_gate, needs_up, needs_weight, needs_bias, needs_a, needs_b, *needs_factors = ctx.needs_input_grad
        needs, dz_rows = _Needs(needs_gate, needs_up, needs_weight or needs_a), dz.reshape(-1, dz.shape[-1])
        dh, db = (None, None) if a is None else update_gradients(dz_rows, b, h, ctx.options.update_scale, needs_b)
        inputs = _LinearInputs(ctx.options, gate, up, weight, a, factors)
        if not (needs.gate or needs.up or any(needs_factors)):
            y = _activated(ctx.options, weight.dtype, gate, up, *factors) if needs.y else None
            found = _GLUGradients(y=y, factors=[None] * len(factors))
        elif factors:
            found = _gradients_with_terms(inputs, dz, dh, needs_weight)
        else:
            found = _gradients(inputs, dz, dh, needs)
        dweight, da = None, found.a
        if needs.y and found.y is not None:
            rows = found.y.view(-1, gate.shape[-1])
            dweight = dz_rows.T @ rows if needs_weight else None
            if dh is not None and needs_a and da is None:
                da = (dh.T @ rows).to(a.dtype)
        dgate, dup, da, *dfactors = if_needed(
            (found.gate, found.up, da, *found.factors), (needs_gate, needs_up, needs_a, *needs_factors)
        )
        return None, dgate, dup, dweight, dz_rows.sum(0) if needs_bias else None, da, db, *dfactors


class _LinearInputs(NamedTuple):
    """Inputs of the gradients other than dz; `factors` are the tensors of the terms, if any."""

    options: _LinearOptions
    gate: Tensor
    up: Tensor
    weight: Tensor
    a: Tensor | None
    factors: Sequence[Tensor]


class _GLUGradients(NamedTuple):
    """y and the gradients of what it depends on.

    Attributes:
        gate, up: the gradients.
        y: recomputed.
        factors: the gradients of the terms' tensors.
        a: that of the update's A, if it is computed together with these.
    """

    gate: Tensor | None = None
    up: Tensor | None = None
    y: Tensor | None = None
    factors: Sequence[Tensor | None] = ()
    a: Tensor | None = None


def _gradients(inputs: _LinearInputs, dz: Tensor, dh: Tensor | None, needs: _Needs) -> _GLUGradients:
    """Returns the gradients of a GLU without terms; `dh` is the gradient of h, None without an update."""
    options, gate, up, weight, a, _ = inputs
    if dh is None or a is None:
        dy = dz @ weight
    else:
        dy_rows = dh @ a.to(dz.dtype)
        dy = torch.addmm(dy_rows, dz.reshape(-1, dz.shape[-1]), weight, out=dy_rows).view(gate.shape)
    return _GLUGradients(*_backward(dy, gate, up, options.activation, needs))


def _gradients_with_terms(inputs: _LinearInputs, dz: Tensor, dh: Tensor | None, needs_weight: bool) -> _GLUGradients:
    options, gate, up, weight, a, factors = inputs
    h, gate_b, up_b = factors
    terms = LowRankTerms(h, gate_b, up_b, *options.term_scales)
    found = low_rank_glu_gradients(dz @ weight, gate, up, terms, dh, a, options.activation, needs_weight)
    (dgate, dup, dterm_h, _, y), (dgate_b, dup_b, da) = found, found.of_factors(terms, a)
    return _GLUGradients(dgate, dup, y, (dterm_h, dgate_b, dup_b), da)


def _activated(options: _LinearOptions, dtype: torch.dtype, gate: Tensor, up: Tensor, *factors: Tensor) -> Tensor:
    """Returns y, with the terms of these tensors."""
    if not factors:
        return _forward(gate, up, options.activation, dtype)
    terms = LowRankTerms(*factors, *options.term_scales)  # type: ignore[arg-type]
    return low_rank_glu.forward(gate, up, terms, options.activation, dtype)


def _inner(options: _LinearOptions, dtype: torch.dtype, a: Tensor, gate: Tensor, *others: Tensor) -> Tensor:
    """Returns the product of y and A, (T, r)."""
    y = _activated(options, dtype, gate, *others)
    return unsplit_linear(y.view(-1, gate.shape[-1]), a.to(dtype))


def _check_match(name: str, gate: Tensor, up: Tensor) -> None:
    """Raises unless the tensors are alike: the kernels would read beyond a smaller one."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise shape_or_dtype_error(name, "the same shape and dtype", gate=gate, up=up)


def _check_terms(gate: Tensor, terms: LowRankTerms, update: LowRank | None) -> None:
    h, gate_b, up_b = terms[:3]
    outputs, ranks = gate.shape[-1], [gate_b.shape[-1], up_b.shape[-1]]
    shapes = (*gate.shape[:-1], sum(ranks)), (outputs, ranks[0]), (outputs, ranks[1])
    if (h.shape, gate_b.shape, up_b.shape) != shapes or h.dtype != gate.dtype:
        expected = "shapes (..., I), (..., r + s), (I, r) and (I, s), and h in the dtype of gate"
        raise shape_or_dtype_error("glu_linear", expected, gate=gate, h=h, gate_b=gate_b, up_b=up_b)
    if (highest := max(*ranks, 0 if update is None else len(update.a))) > low_rank_glu.MAX_RANK:
        raise ValueError(
            f"glu_linear: terms and update have ranks up to {highest}; expected at most {low_rank_glu.MAX_RANK} with "
            "terms. For higher ranks, add the products to gate and up, as lora_linears does"
        )


@explains_options
def glu(gate: Tensor, up: Tensor, *, activation: Activation = "silu", backend: Backend = "auto") -> Tensor:
    """Computes `a(gate) * up`, elementwise.

    Args:
        gate: (..., I), any strides. Not copied if rows have unit stride, like the halves of a fused projection.
        up: (..., I), the same shape and dtype.
        activation: the activation a, see `activation_linear`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (..., I), contiguous.

    Raises:
        ValueError: the shapes or dtypes differ, or the activation is unknown.
    """
    check_activation(activation)
    check_floats("glu", gate=gate, up=up)
    return compute_glu(gate, up, activation, backend)


def compute_glu(gate: Tensor, up: Tensor, activation: Activation, backend: Backend) -> Tensor:
    """`glu` for layers, whose options were checked."""
    _check_match("glu", gate, up)
    if uses_triton(gate, up, backend=backend):
        return _GLU.apply(gate, up, activation)
    return reference(gate, up, activation)


@explains_options
def swiglu(gate: Tensor, up: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Computes `silu(gate) * up`, see `glu`."""
    return glu(gate, up, activation="silu", backend=backend)


@explains_options
def geglu(
    gate: Tensor, up: Tensor, *, approximate: Literal["tanh", "none"] = "tanh", backend: Backend = "auto"
) -> Tensor:
    """Computes `gelu(gate) * up`, see `glu`; `approximate` as in `torch.nn.functional.gelu`."""
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
    update: LowRank | None = None,
    terms: LowRankTerms | None = None,
    activation: Activation = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """Computes `glu(gate, up) @ weight.T + bias`. Saves `gate` and `up` for backward, but not their product.

    Args:
        gate: (..., I), any strides.
        up: (..., I), the same shape and dtype.
        weight: (H, I), like `torch.nn.Linear.weight`. The product of gate and up is rounded to its dtype, or to
            autocast's dtype under autocast.
        bias: (H,) or None.
        update: low-rank update of the weight, with matrices (r, I) and (H, r) of any floating-point dtype; or None.
        terms: low-rank terms that are added to `gate` and `up`, of ranks up to `low_rank_glu.MAX_RANK`, which is
            then the maximum for `update` too; or None. Added in registers if `gate` and `weight` have the same
            2-byte dtype, and by torch if not.
        activation: see `activation_linear`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (..., H).

    Raises:
        ValueError: the shapes or dtypes of `gate` and `up` differ, `weight`, `bias`, `update` or `terms` has the wrong
            shape, or the activation is unknown.
    """
    check_activation(activation)
    check_floats("glu_linear", gate=gate, up=up, weight=weight)
    check_optional_floats("glu_linear", bias=bias)
    if weight.shape[1:] != gate.shape[-1:] or (bias is not None and bias.shape != weight.shape[:1]):
        raise shape_error("glu_linear", "shapes (..., I), (H, I) and (H,)", gate=gate, weight=weight, bias=bias)
    if update is not None:
        a, b = update[:2]
        if a.shape[1:] != weight.shape[1:] or b.shape != (len(weight), len(a)):
            raise shape_error("glu_linear", "shapes (H, I), (r, I) and (H, r)", weight=weight, a=a, b=b)
    if terms is not None:
        _check_terms(gate, terms, update)
        if not (gate.dtype == dtype_of_products(weight) and gate.element_size() == 2):
            (gate, up), terms = terms.add(gate, up), None
    return compute_glu_linear(gate, up, weight, bias, update, terms, activation, backend)


def compute_glu_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    update: LowRank | None,
    terms: LowRankTerms | None,
    activation: Activation,
    backend: Backend,
) -> Tensor:
    """`glu_linear` for layers, whose options were checked: with terms only that the kernels add in registers."""
    _check_match("glu_linear", gate, up)
    weight, bias = autocast(weight, bias)
    if not uses_triton(gate, up, weight, backend=backend):
        return linear_reference(gate, up, weight, bias, activation, update, terms)
    a, b, scale = (None, None, 1.0) if update is None else update
    factors, scales = ((), ()) if terms is None else (terms[:3], terms[3:])
    return _GLULinear.apply(_LinearOptions(activation, scale, scales), gate, up, weight, bias, a, b, *factors)
