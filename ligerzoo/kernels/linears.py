"""Several linear layers of one input, such as the projections to queries, keys and values, and `linear_glu`.

Forward:   y_i = x @ W_i.T + b_i.
Backward:  dx = sum over i of dy_i @ W_i,   dW_i = dy_i.T @ x,   db_i = sum over rows of dy_i.

The products of dx accumulate into one tensor, where autograd would add up separate ones: two more reads and writes of
dx for each layer after the first.

Saved: x, and the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels.activation import Activation, check_activation
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, uses_triton
from ligerzoo.kernels.few_rows import gate_few_rows, project_few_rows, uses_few_rows
from ligerzoo.kernels.glu import glu
from ligerzoo.kernels.row_sums import unsplit_linears
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor, shape_error


def reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """`linears` in plain torch: the specification, the CPU path and the test oracle. Dequantizes weights in fp32."""
    if scales is None:
        return unsplit_linears(x, weights, biases)
    wide = accumulation_dtype(x.dtype)
    weights = [weight.to(wide) * scale[:, None] for weight, scale in zip(weights, scales, strict=True)]
    biases = [None if bias is None else bias.to(wide) for bias in biases]
    return tuple(y.to(x.dtype) for y in unsplit_linears(x.to(wide), weights, biases))


class _Linears(FusedFunction):
    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        needs_x, _, *needed = ctx.needs_input_grad
        weights: Any = parameters[:count]
        ctx.save_for_backward(x if any(needed[:count]) else None, *(weights if needs_x else ()))
        ctx.count, ctx.shape = count, x.shape
        biases = parameters[count:]
        if uses_few_rows(x, weights, biases, "auto"):  # in this mode, gradients are not recorded
            return project_few_rows(x, weights, biases)
        return unsplit_linears(x, weights, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needed = ctx.needs_input_grad
        rows, dx = [dy.reshape(-1, dy.shape[-1]) for dy in upstream], None
        if needs_x:
            dx = torch.mm(rows[0], weights[0])
            for dy, weight in zip(rows[1:], weights[1:], strict=True):
                torch.addmm(dx, dy, weight, out=dx)
            dx = dx.view(ctx.shape)
        needs_weights, needs_biases = needed[: ctx.count], needed[ctx.count :]
        if any(needs_weights):
            x = x.reshape(-1, x.shape[-1])
        dweights = [torch.mm(dy.t(), x) if needs else None for dy, needs in zip(rows, needs_weights, strict=True)]
        dbiases = [dy.sum(0) if needs else None for dy, needs in zip(rows, needs_biases, strict=True)]
        return dx, None, *dweights, *dbiases


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    scales: Sequence[Tensor] | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, ...]:
    """Computes `x @ weight.T + bias` for each weight. Their gradients accumulate into one gradient of `x`.

    Without gradients, one kernel computes up to three products of up to 64 rows in bf16 or fp16, where it is faster.

    Args:
        x: (..., H), any strides.
        weights: (O_i, H) each, like `torch.nn.Linear.weight`; int8 with `scales`.
        biases: (O_i,) each, or None for no bias. Default: no biases.
        scales: (O_i,) fp32 each, factors of the rows of the weights; None for weights in floating point.
        backend: "auto" (the accumulating backward where Triton is supported, the kernel where it is faster), "triton"
            (always) or "torch" (the reference).

    Returns:
        (..., O_i) for each weight.

    Raises:
        ValueError: the shapes do not match.
    """
    biases = [None] * len(weights) if biases is None else biases
    factors = [None] * len(weights) if scales is None else scales
    check_floats("linears", x=x)
    shapes_match = len(weights) == len(biases) == len(factors) > 0
    if shapes_match:
        for i, (weight, scale) in enumerate(zip(weights, factors, strict=True)):
            _check_weight("linears", f"weights[{i}]", weight, scale)
        shapes_match = all(
            weight.ndim == 2
            and weight.shape[1:] == x.shape[-1:]
            and all(vector is None or vector.shape == weight.shape[:1] for vector in vectors)
            for weight, *vectors in zip(weights, biases, factors, strict=True)
        )
    if not shapes_match:
        raise ValueError(
            f"linears: x is {tuple(x.shape)}, weights {_shapes(weights)}, biases {_shapes(biases)} and scales "
            f"{_shapes(factors)}; expected shapes (..., H), (O_i, H) and (O_i,) or None, as many biases and scales as "
            "weights"
        )
    if scales is None:
        return compute_linears(x, weights, biases, backend)
    if uses_few_rows(x, weights, biases, backend, scales):
        return project_few_rows(x, weights, biases, scales)
    return reference(x, weights, biases, scales)


def compute_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], backend: Backend
) -> tuple[Tensor, ...]:
    """`linears` of weights in floating point without checks, for layers."""
    if uses_few_rows(x, weights, biases, backend):
        return project_few_rows(x, weights, biases)
    present = [bias for bias in biases if bias is not None]
    if torch.is_grad_enabled() and uses_triton(x, *weights, *present, backend=backend):
        x, *parameters = autocast(x, *weights, *biases)
        return _Linears.apply(x, len(weights), *parameters)
    return unsplit_linears(x, weights, biases)


def _shapes(tensors: Sequence[Tensor | None]) -> list[tuple[int, ...] | None]:
    return [None if tensor is None else tuple(tensor.shape) for tensor in tensors]


def _check_weight(name: str, argument: str, weight: object, scale: object) -> None:
    """Raises unless a weight is a floating-point tensor, or an int8 one with a scale."""
    if scale is None:
        check_floats(name, **{argument: weight})
        return
    check_tensor(name, argument, weight, "integer")
    check_floats(name, **{f"scale of {argument}": scale})
    assert isinstance(weight, Tensor)
    assert isinstance(scale, Tensor)
    if (weight.dtype, scale.dtype) != (torch.int8, torch.float32):
        raise ValueError(
            f"{name}: {argument} has dtype {weight.dtype} and a scale of {scale.dtype}; expected torch.int8 with a "
            "scale of torch.float32"
        )


def glu_reference(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None,
    gate_scale: Tensor | None = None, up_scale: Tensor | None = None, activation: Activation = "silu",
) -> Tensor:  # fmt: skip
    """`linear_glu` in plain torch."""
    scales = None if gate_scale is None or up_scale is None else (gate_scale, up_scale)
    return glu(*reference(x, (gate, up), (gate_bias, up_bias), scales), activation=activation, backend="torch")


def linear_glu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    gate_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    *,
    activation: Activation = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """Computes `a(x @ gate.T + gate_bias) * (x @ up.T + up_bias)`: in one kernel for few rows without gradients.

    Args:
        x: (..., K), up to 64 rows for the kernel.
        gate: (I, K), like `torch.nn.Linear.weight`; int8 with `gate_scale`.
        up: (I, K); int8 with `up_scale`.
        gate_bias: (I,) or None.
        up_bias: (I,) or None, like `gate_bias`.
        gate_scale: (I,) fp32, factors of the rows of `gate`; None for weights in floating point.
        up_scale: (I,) fp32 or None, like `gate_scale`.
        activation: the activation a, see `activation_linear`.
        backend: "auto" (Triton where supported), "triton" (where supported) or "torch" (the reference).

    Returns:
        (..., I).

    Raises:
        ValueError: the shapes do not match, or the activation is unknown.
    """
    check_activation(activation)
    check_floats("linear_glu", x=x)
    check_optional_floats("linear_glu", gate_bias=gate_bias, up_bias=up_bias)
    _check_weight("linear_glu", "gate", gate, gate_scale)
    _check_weight("linear_glu", "up", up, up_scale)
    weights, biases = (gate, up), (gate_bias, up_bias)
    scales = None if gate_scale is None or up_scale is None else (gate_scale, up_scale)
    fits = gate.shape == up.shape == (len(gate), x.shape[-1]) and (gate_scale is None) == (up_scale is None)
    vectors = {"gate_bias": gate_bias, "up_bias": up_bias, "gate_scale": gate_scale, "up_scale": up_scale}
    if not fits or any(vector is not None and vector.shape != gate.shape[:1] for vector in vectors.values()):
        expected = "(..., K), (I, K) twice, and (I,) or None, two scales or none"
        raise shape_error("linear_glu", expected, x=x, gate=gate, up=up, **vectors)
    if uses_few_rows(x, weights, biases, backend, scales):
        return gate_few_rows(x, weights, biases, scales, activation)
    return glu(*reference(x, weights, biases, scales), activation=activation, backend=backend)
