"""Several linear layers of one input, such as the projections to queries, keys and values.

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

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, autocast, uses_triton
from ligerzoo.kernels.few_rows import check_weight, product, project_few_rows, uses_few_rows
from ligerzoo.tensor_checks import check_floats


def reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """`linears` in plain torch: the specification, the CPU path and the test oracle."""
    factors = [None] * len(weights) if scales is None else scales
    return tuple(product(x, *parameters) for parameters in zip(weights, biases, factors, strict=True))


class _Linears(FusedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        needs_x, _, *needed = ctx.needs_input_grad
        weights: Any = parameters[:count]
        ctx.save_for_backward(x if any(needed[:count]) else None, *(weights if needs_x else ()))
        ctx.count, ctx.shape = count, x.shape
        biases = parameters[count:]
        if uses_few_rows(x, weights, biases, "auto"):  # in this mode, gradients are not recorded
            return project_few_rows(x, weights, biases)
        return reference(x, weights, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needed = ctx.needs_input_grad
        rows = [dy.reshape(-1, dy.shape[-1]) for dy in upstream]
        dx = None
        if needs_x:
            dx = rows[0] @ weights[0]
            for dy, weight in zip(rows[1:], weights[1:], strict=True):
                torch.addmm(dx, dy, weight, out=dx)
            dx = dx.view(ctx.shape)
        dweights = [
            dy.T @ x.reshape(-1, x.shape[-1]) if needs else None
            for dy, needs in zip(rows, needed[: ctx.count], strict=True)
        ]
        dbiases = [dy.sum(0) if needs else None for dy, needs in zip(rows, needed[ctx.count :], strict=True)]
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
    present = [bias for bias in biases if bias is not None]
    factors = [None] * len(weights) if scales is None else scales
    check_floats("linears", x=x)
    shapes_match = len(weights) == len(biases) == len(factors) > 0
    if shapes_match:
        for i, (weight, scale) in enumerate(zip(weights, factors, strict=True)):
            check_weight("linears", f"weights[{i}]", weight, scale)
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
    if uses_few_rows(x, weights, biases, backend, scales):
        return project_few_rows(x, weights, biases, scales)
    if scales is not None or not (torch.is_grad_enabled() and uses_triton(x, *weights, *present, backend=backend)):
        return reference(x, weights, biases, scales)
    x, *parameters = autocast(x, *weights, *biases)
    return _Linears.apply(x, len(weights), *parameters)


def _shapes(tensors: Sequence[Tensor | None]) -> list[tuple[int, ...] | None]:
    return [None if tensor is None else tuple(tensor.shape) for tensor in tensors]
