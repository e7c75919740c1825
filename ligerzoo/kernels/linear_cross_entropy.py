"""The loss head: cross entropy of `hidden @ weight.T` without ever holding all logits.

Forward:   loss_t = lse(z_t) - z_t[target_t],   z_t = weight @ hidden_t.
Backward:  with P_t = g_t * (softmax(z_t) - onehot(target_t)):   dhidden = P @ weight,   dweight = P.T @ hidden.

The rows are swept in chunks whose logits fit a budget: a matrix product makes a chunk's logits, one kernel turns them
in place into their own gradient, two matrix products turn that into the chunk's part of dhidden and dweight. dweight is
accumulated in fp32.

A loss that is a sum over tokens has the upstream gradient g in common, so its gradients can be made in the forward
sweep (6MHV operations in all) and are multiplied by g in backward, in fp32 and into fresh tensors. The losses of single
tokens (`reduction="none"`) have a g each, unknown until backward, which then sweeps again (8MHV).

Saved: the gradients with respect to hidden and weight that are needed, or hidden, weight and target for "none".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.cross_entropy import Reduction, check_targets, loss_then_gradient_, losses_of, reduce
from ligerzoo.kernels.cross_entropy import reference as cross_entropy_reference
from ligerzoo.kernels.dispatch import autocast, once_differentiable, register, wide

DEFAULT_LOGITS_BUDGET = 512
"""MiB of logits that exist at a time, unless a call says otherwise."""


def reference(hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """The loss of each row in plain torch, all logits at once: the specification and the tests' oracle."""
    return cross_entropy_reference(F.linear(hidden, weight), target, ignore_index)


def _rows_per_chunk(n_rows: int, n_classes: int, itemsize: int, budget: int) -> int:
    """Chunks of equal size within the budget, in multiples of 128 rows (a tile of the matrix product) where it
    allows."""
    most = max(1, budget * 2**20 // (n_classes * itemsize))
    chunks = -(-n_rows // most)
    rows = -(-n_rows // max(1, chunks))
    return max(1, min(most, -(-rows // 128) * 128))


def _accumulate_(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total (+)= a @ b, with the products summed in the dtype of `total`."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=0 if first else 1, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=0 if first else 1, out=total)


def _sweep_fake(
    hidden: Tensor, weight: Tensor, target: Tensor, upstream: Tensor, ignore_index: int, budget: int,
    needs_dhidden: bool, needs_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    losses = hidden.new_empty(target.shape, dtype=wide(hidden.dtype))
    dhidden = hidden.new_empty(hidden.shape if needs_dhidden else (0,))
    dweight = weight.new_empty(weight.shape if needs_dweight else (0,), dtype=wide(weight.dtype))
    return losses, dhidden, dweight


@register(
    "linear_cross_entropy_sweep(Tensor hidden, Tensor weight, Tensor target, Tensor upstream, int ignore_index, "
    "int budget, bool needs_dhidden, bool needs_dweight) -> (Tensor, Tensor, Tensor)",
    fake=_sweep_fake,
)
def _sweep(
    hidden: Tensor, weight: Tensor, target: Tensor, upstream: Tensor, ignore_index: int, budget: int,
    needs_dhidden: bool, needs_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The losses of all rows, and dhidden and dweight for the upstream gradient of each row (empty where not
    needed)."""
    check_targets(target, weight.shape[0], ignore_index)
    results = _sweep_fake(hidden, weight, target, upstream, ignore_index, budget, needs_dhidden, needs_dweight)
    losses, dhidden, dweight = results
    if hidden.shape[0] == 0:
        return losses, dhidden, dweight.zero_()
    rows = _rows_per_chunk(hidden.shape[0], weight.shape[0], hidden.element_size(), budget)
    buffer = hidden.new_empty((min(rows, hidden.shape[0]), weight.shape[0]))
    for start in range(0, hidden.shape[0], rows):
        chunk = slice(start, start + rows)
        x = hidden[chunk]
        logits = torch.mm(x, weight.T, out=buffer[: x.shape[0]])
        if not (needs_dhidden or needs_dweight):
            losses[chunk] = losses_of(logits, target[chunk], ignore_index)
            continue
        losses[chunk] = loss_then_gradient_(logits, target[chunk], upstream[chunk], ignore_index)
        if needs_dhidden:
            torch.mm(logits, weight, out=dhidden[chunk])
        if needs_dweight:
            _accumulate_(dweight, logits.T, x, first=start == 0)
    return losses, dhidden, dweight


def _scaled_fake(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(gradient.shape, dtype=dtype)


@register("scaled(Tensor gradient, Tensor factor, ScalarType dtype) -> Tensor", fake=_scaled_fake)
def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor, a 0-d tensor, multiplied in fp32 and rounded to `dtype` in one pass."""
    # As a 0-d tensor the factor would be rounded to the gradient's dtype first.
    return torch.mul(gradient, factor.reshape(1).to(wide(gradient.dtype)), out=_scaled_fake(gradient, factor, dtype))


class _SummedLoss(torch.autograd.Function):
    """The sum of the tokens' losses; gradients are made in the forward sweep."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int, budget: int) -> Tensor:
        ctx.needs = ctx.needs_input_grad[:2]
        ones = torch.ones((), device=hidden.device).expand(target.shape)
        losses, dhidden, dweight = _sweep(hidden, weight, target, ones, ignore_index, budget, *ctx.needs)
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = (
            _scaled(gradient, upstream, dtype) if needed else None
            for gradient, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs, strict=True)
        )
        return dhidden, dweight, None, None, None


class _TokenLosses(torch.autograd.Function):
    """The loss of each token; backward sweeps again, now with the upstream gradient of each."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int, budget: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, target)
        ctx.ignore_index, ctx.budget = ignore_index, budget
        ones = torch.ones((), device=hidden.device).expand(target.shape)
        losses, _, _ = _sweep(hidden, weight, target, ones, ignore_index, budget, False, False)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        needs_dhidden, needs_dweight = ctx.needs_input_grad[:2]
        hidden, weight, target = ctx.saved_tensors
        _, dhidden, dweight = _sweep(
            hidden, weight, target, upstream, ctx.ignore_index, ctx.budget, needs_dhidden, needs_dweight
        )
        return dhidden if needs_dhidden else None, dweight.to(weight.dtype) if needs_dweight else None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    logits_budget: int = DEFAULT_LOGITS_BUDGET,
) -> Tensor:
    """Cross entropy of `softmax(hidden @ weight.T)` against `target`; the logits are never held beyond `logits_budget`.

    Args:
        hidden: (..., H) hidden states.
        weight: (V, H), the head, in the dtype of `hidden`.
        target: (...) int64, each in [0, V) or `ignore_index`.
        ignore_index: the target of a token that does not count.
        reduction: "mean" over the tokens that count, "sum", or "none" for the loss of each token.
        num_items: divides the sum in place of the number of tokens that count (an int or a 0-d tensor): the same number
            for all micro-batches of a step makes gradient accumulation exact.
        logits_budget: MiB of logits that exist at a time (at least one row). On a CPU a few copies of these in fp32
            come on top.

    Returns:
        fp32 (fp64 for fp64 input): 0-d, or of the targets' shape for "none". Without a token that counts, "mean" is 0
        and all gradients are 0. A frozen `weight` or `hidden` costs neither the memory nor the time of its gradient.

    Raises:
        ValueError: the shapes or dtypes do not fit, the reduction is unknown, or (on a CPU, or when LIGERZOO_DEBUG=1) a
            target is no class. On a GPU without LIGERZOO_DEBUG such a token's loss is NaN.
    """
    hidden, weight = autocast(hidden, weight)
    if hidden.shape[:-1] != target.shape or hidden.shape[-1:] != weight.shape[1:] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"linear_cross_entropy: hidden {tuple(hidden.shape)} {hidden.dtype}, "
            f"weight {tuple(weight.shape)} {weight.dtype}, "
            f"target {tuple(target.shape)}; expected (..., H), (V, H) of one dtype, and (...)"
        )
    summed = reduction != "none" and torch.is_grad_enabled()  # without gradients there is nothing to make ahead
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    losses = (_SummedLoss if summed else _TokenLosses).apply(rows, weight, targets, ignore_index, logits_budget)
    if reduction == "none":
        losses = losses.view(target.shape)
    return reduce(losses, target, reduction, ignore_index, num_items)
