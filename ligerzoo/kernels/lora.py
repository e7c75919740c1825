"""Linear layers of one input whose weights have low-rank updates (LoRA, Hu et al. 2021).

Forward:   h_i = x' @ A_i.T,   y_i = x @ W_i.T + b_i + s_i h_i @ B_i.T.
Backward:  dh_i = s_i dy_i @ B_i,   dx = sum over i of dy_i @ W_i,   dx' = sum over i of dh_i @ A_i,
           dA_i = dh_i.T @ x',   dB_i = s_i dy_i.T @ h_i,   dW_i = dy_i.T @ x,   db_i = sum over rows of dy_i.

x' is x, or x after dropout. If they are one tensor, all products of dx accumulate into it. One product computes h_i of
all layers, another dA_i of all layers. B_i is multiplied by s_i within the products. A and B may have another dtype
than x, such as fp32 for bf16: they are rounded to the dtype of x.

The product of a weight adds to that of its update, not the reverse: the small term is rounded first, and the large
matrices y_i and dx are written once by a product with few columns, which then need not read them.

In bf16 on a GPU, a row of y has the same bits in every call, with gradients and without (`row_sums`). So sampling with
an adapter that is not merged computes what training does. There a kernel adds the term to y_i in one more pass.

Saved: the h_i, which have few columns, and what the needed gradients read: x' for dA, x for dW, W and A for dx, B. A
checkpointed block saves no h_i, so that its recomputation ends before the layers; see `recompute`.

dh_i and dB_i are computed in one pass over dy_i, see `low_rank_gradients`. The updates of the gate and up projections
of a gated linear unit are added by its kernels instead, see `low_rank_glu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, autocast, uses_triton
from ligerzoo.kernels.low_rank import LowRank, low_rank_product
from ligerzoo.kernels.low_rank_gradients import low_rank_gradients, scaled_product
from ligerzoo.kernels.recompute import Recompute, recomputable
from ligerzoo.kernels.row_sums import unsplit_linear, unsplit_sum
from ligerzoo.tensor_checks import check_floats


def update_gradients(dy: Tensor, b: Tensor, h: Tensor, scale: float, needs_b: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of h, (T, r), and of b, or None if that is not needed. dy is (T, O)."""
    return low_rank_gradients(dy, b, h, scale) if needs_b else (scaled_product(dy, b.to(dy.dtype), scale), None)


def stacked_a(dtype: torch.dtype, *all_a: Tensor) -> Tensor:
    """Returns the rows of all A in this dtype, which a checkpointed block does not keep."""
    a = _stack(dtype, *all_a)
    recomputable((a,), _stack, dtype, *all_a, level=Recompute.BLOCK)
    return a


def reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    updates: Sequence[LowRank | None],
    dropped: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """`lora_linears` in plain torch: the specification, the CPU path and the test oracle."""
    outputs = []
    for weight, bias, update in zip(weights, biases, updates, strict=True):
        y = unsplit_linear(x, weight, bias)
        outputs.append(y if update is None else y + low_rank_product(x if dropped is None else dropped, update))
    return tuple(outputs)


class _LoRALinears(FusedFunction):
    """The arguments are x, x' or None, the scales of the updates (None for no update), then all W, b, A and B."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, scales: tuple[float | None, ...], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases, all_a, all_b = _quarters(parameters)
        needs_x, needs_dropped, _, *needed = ctx.needs_input_grad
        needs_weights, _, needs_a, _ = _quarters(needed)
        source = x if dropped is None else dropped
        present = [a for a in all_a if a is not None]
        a = stacked_a(x.dtype, *present)
        h = _inner(source, a)
        recomputable((h,), _inner, source, a, level=Recompute.BLOCK)
        parts, rows = iter(h.split([len(a) for a in present], 1)), x.reshape(-1, x.shape[-1])
        outputs = []
        for weight, bias, b, scale in zip(weights, biases, all_b, scales, strict=True):
            if scale is None:
                outputs.append(unsplit_linear(x, weight, bias))
            else:
                y = unsplit_sum(rows, weight, bias, next(parts), b, scale)
                outputs.append(y.view(*x.shape[:-1], len(weight)))
        ctx.save_for_backward(
            x if any(needs_weights) else None,
            source if any(needs_a) else None,
            h,
            a if needs_x or needs_dropped else None,
            *(weights if needs_x else [None] * len(weights)),
            *all_b,
        )
        ctx.scales, ctx.shape, ctx.is_dropped = scales, x.shape, dropped is not None
        ctx.dtypes_of_a = [None if a is None else a.dtype for a in all_a]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, source, h, a, *rest = ctx.saved_tensors
        weights, all_b = rest[: len(upstream)], rest[len(upstream) :]
        needs_x, needs_dropped, _, *needed = ctx.needs_input_grad
        needs_weights, needs_biases, needs_a, needs_b = _quarters(needed)
        rows = [dy.reshape(-1, dy.shape[-1]) for dy in upstream]

        ranks = [b.shape[1] for b in all_b if b is not None]
        parts = iter(h.split(ranks, 1))
        low: list[Tensor] = []
        db: list[Tensor | None] = [None] * len(rows)
        for i, (dy, b, scale) in enumerate(zip(rows, all_b, ctx.scales, strict=True)):
            if b is not None:
                low_dy, db[i] = update_gradients(dy, b, next(parts), scale, needs_b[i])
                low.append(low_dy)
        dh = low[0] if len(low) == 1 else torch.cat(low, 1)

        dx = dropped = None
        if needs_x:
            products = list(zip(rows, weights, strict=True))
            dx = torch.mm(*(products.pop(0) if ctx.is_dropped else (dh, a)))
            for dy, weight in products:
                torch.addmm(dx, dy, weight, out=dx)
            dx = dx.view(ctx.shape)
        if needs_dropped:
            dropped = (dh @ a).view(ctx.shape)

        da: Sequence[Tensor | None] = [None] * len(rows)
        if any(needs_a):
            parts = iter((dh.T @ source.reshape(-1, source.shape[-1])).split(ranks))
            da = [None if dtype is None else next(parts).to(dtype) for dtype in ctx.dtypes_of_a]
        dw = [
            dy.T @ x.reshape(-1, x.shape[-1]) if needs else None for dy, needs in zip(rows, needs_weights, strict=True)
        ]
        dbiases = [dy.sum(0) if needs else None for dy, needs in zip(rows, needs_biases, strict=True)]
        return dx, dropped, None, *dw, *dbiases, *da, *db


def _stack(dtype: torch.dtype, *all_a: Tensor) -> Tensor:
    """Returns the rows of all A in this dtype."""
    return (torch.cat(all_a) if len(all_a) > 1 else all_a[0]).to(dtype)


def _inner(x: Tensor, a: Tensor) -> Tensor:
    """(..., H), (r, H) -> (T, r)."""
    return unsplit_linear(x.reshape(-1, x.shape[-1]), a)


def _quarters(values: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    count = len(values) // 4
    return tuple(values[i * count : (i + 1) * count] for i in range(4))


def lora_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    updates: Sequence[LowRank | None],
    dropped: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, ...]:
    """Computes `x @ weight.T + bias + scale * (dropped @ a.T) @ b.T` for each weight.

    The gradient of a frozen weight costs neither time nor memory.

    Args:
        x: (..., H), any strides.
        weights: (O_i, H) each.
        biases: (O_i,) each, or None for no bias.
        updates: low-rank updates of the weights, with matrices of any floating-point dtype; None for no update.
        dropped: (..., H), input of the low-rank updates; None for x.
        backend: "auto" (the accumulating backward where Triton is supported), "triton" (always) or "torch" (the
            reference).

    Returns:
        (..., O_i) for each weight.

    Raises:
        ValueError: the shapes do not match.
    """
    check_floats("lora_linears", x=x)
    for i, (weight, bias, update) in enumerate(zip(weights, biases, updates, strict=True)):
        a, b, _ = (None, None, 1.0) if update is None else update
        shapes = [None if t is None else tuple(t.shape) for t in (weight, bias, a, b)]
        outputs, features, rank = len(weight), x.shape[-1], 0 if a is None else len(a)
        expected = (outputs, features), (outputs,), (rank, features), (outputs, rank)
        if any(shape not in (None, full) for shape, full in zip(shapes, expected, strict=True)):
            raise ValueError(
                f"lora_linears: x is {tuple(x.shape)}, weight {i} {shapes[0]}, its bias {shapes[1]}, its a {shapes[2]} "
                f"and b {shapes[3]}; expected shapes (..., H), (O, H), (O,) or None, (r, H) and (O, r)"
            )
    return compute_lora_linears(x, weights, biases, updates, dropped, backend)


def compute_lora_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    updates: Sequence[LowRank | None],
    dropped: Tensor | None,
    backend: Backend,
) -> tuple[Tensor, ...]:
    """`lora_linears` without checks, for layers."""
    x, *parameters = autocast(x, *weights, *biases)
    weights, biases = parameters[: len(weights)], parameters[len(weights) :]
    present = [bias for bias in biases if bias is not None]
    if not (any(updates) and uses_triton(x, *weights, *present, backend=backend)):
        return reference(x, weights, biases, updates, None if dropped is None else dropped.to(x.dtype))
    scales = tuple(None if update is None else update.scale for update in updates)
    matrices = zip(*((None, None) if update is None else update[:2] for update in updates), strict=True)
    flat = [matrix for group in matrices for matrix in group]
    dropped = None if dropped is None else dropped.to(x.dtype)
    return _LoRALinears.apply(x, dropped, scales, *weights, *biases, *flat)
