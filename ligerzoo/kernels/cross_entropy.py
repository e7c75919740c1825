"""Cross entropy of given logits, in one pass over them and without a copy in fp32.

With m_t = max_v logits[t, v] and s_t = log sum_v exp(logits[t, v] - m_t) (never added: a large m would swallow s):

Forward:   loss_t = m_t - logits[t, target_t] + s_t;   0 where the target is ignored.
Backward:  dlogits[t, v] = g_t * (exp(logits[t, v] - m_t - s_t) - [v = target_t]);   0 where the target is ignored.

Saved: the logits (the caller's own tensor, never written to), m and s (two fp32 numbers a row) and the targets.
A target outside [0, V) that is not the ignored one gives NaN on a GPU, and an error on a CPU or when LIGERZOO_DEBUG=1.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.dispatch import DEBUG, as_rows, next_power_of_2, once_differentiable, register, uses_triton, wide
from ligerzoo.kernels.jit import jit, kernel, tl

Reduction = Literal["mean", "sum", "none"]


def reference(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """The loss of each row in plain torch: the specification, the CPU path and the tests' oracle."""
    return F.cross_entropy(logits.to(wide(logits.dtype)), target, ignore_index=ignore_index, reduction="none")


@jit
def _log_sum_exp(row_ptr, n_cols, BLOCK: tl.constexpr):
    """(m, s) of a row, with each lane keeping a running maximum and sum of its own: one reduction a row."""
    lanes = tl.arange(0, BLOCK)
    maximum = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + lanes
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, x)
        # A lane that has seen nothing but -inf would subtract inf from inf.
        pivot = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - pivot) + tl.exp(x - pivot)
        maximum = tl.where(x != x, x, new_maximum)  # NaN stays NaN
    row_maximum = tl.max(maximum, axis=0)
    return row_maximum, tl.log(tl.sum(total * tl.exp(maximum - row_maximum), axis=0))


@jit
def _loss_of(row_ptr, maximum, log_sum, target, n_cols):
    """maximum - row[target] + log_sum; NaN for a target that is no column."""
    inside = (target >= 0) & (target < n_cols)
    picked = tl.load(row_ptr + target, mask=inside, other=float("nan")).to(tl.float32)
    return (maximum - picked) + log_sum


@jit
def _store_gradient(row_ptr, out_ptr, maximum, log_sum, target, upstream, n_cols, BLOCK: tl.constexpr):
    inside = (target >= 0) & (target < n_cols)
    scale = tl.where(inside, upstream, float("nan"))
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        gradient = scale * (tl.exp((x - maximum) - log_sum) - tl.where(cols == target, 1.0, 0.0))
        tl.store(out_ptr + cols, gradient.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@jit
def _store_zeros(out_ptr, n_cols, BLOCK: tl.constexpr):
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + cols, tl.zeros((BLOCK,), dtype=out_ptr.dtype.element_ty), mask=cols < n_cols)


@kernel
def _forward_kernel(
    logits_ptr, target_ptr, loss_ptr, maximum_ptr, log_sum_ptr, logits_stride, n_cols, ignore_index, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(maximum_ptr + row, 0.0)
        tl.store(log_sum_ptr + row, 0.0)
    else:
        maximum, log_sum = _log_sum_exp(row_ptr, n_cols, BLOCK)
        tl.store(loss_ptr + row, _loss_of(row_ptr, maximum, log_sum, target, n_cols))
        tl.store(maximum_ptr + row, maximum)
        tl.store(log_sum_ptr + row, log_sum)


@kernel
def _backward_kernel(
    logits_ptr, target_ptr, maximum_ptr, log_sum_ptr, upstream_ptr, dlogits_ptr, logits_stride, upstream_stride, n_cols,
    ignore_index, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        _store_zeros(dlogits_ptr + row * n_cols, n_cols, BLOCK)
    else:
        _store_gradient(
            logits_ptr + row * logits_stride, dlogits_ptr + row * n_cols,
            tl.load(maximum_ptr + row), tl.load(log_sum_ptr + row), target,
            tl.load(upstream_ptr + row * upstream_stride).to(tl.float32), n_cols, BLOCK,
        )  # fmt: skip


@kernel
def _loss_then_gradient_kernel(
    logits_ptr, target_ptr, upstream_ptr, loss_ptr, logits_stride, upstream_stride, n_cols, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Both directions on a private buffer of logits, which the gradient replaces: the second read of a row meets the
    cache."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        _store_zeros(row_ptr, n_cols, BLOCK)
    else:
        maximum, log_sum = _log_sum_exp(row_ptr, n_cols, BLOCK)
        tl.store(loss_ptr + row, _loss_of(row_ptr, maximum, log_sum, target, n_cols))
        tl.debug_barrier()  # the target's logit must be read before another warp overwrites it
        upstream = tl.load(upstream_ptr + row * upstream_stride).to(tl.float32)
        _store_gradient(row_ptr, row_ptr, maximum, log_sum, target, upstream, n_cols, BLOCK)


def _block(n_cols: int) -> tuple[int, int]:
    """(columns a step, warps) of the program that walks one row."""
    block = min(8192, next_power_of_2(n_cols))
    return block, min(16, max(4, block // 512))


def _forward_fake(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    loss, maximum, log_sum = (logits.new_empty(target.shape, dtype=torch.float32) for _ in range(3))
    return loss, maximum, log_sum


@register(
    "cross_entropy_forward(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor, Tensor)",
    fake=_forward_fake,
)
def _forward(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    check_targets(target, logits.shape[-1], ignore_index)
    loss, maximum, log_sum = _forward_fake(logits, target, ignore_index)
    rows = as_rows(logits)
    block, warps = _block(rows.shape[1])
    _forward_kernel[rows.shape[0]](
        rows, target.contiguous(), loss, maximum, log_sum, rows.stride(0), rows.shape[1], ignore_index, block,
        num_warps=warps,
    )  # fmt: skip
    return loss, maximum, log_sum


def _backward_fake(
    logits: Tensor, target: Tensor, maximum: Tensor, log_sum: Tensor, upstream: Tensor, ignore_index: int
) -> Tensor:
    return logits.new_empty(logits.shape)


@register(
    "cross_entropy_backward(Tensor logits, Tensor target, Tensor maximum, Tensor log_sum, Tensor upstream, "
    "int ignore_index) -> Tensor",
    fake=_backward_fake,
)
def _backward(
    logits: Tensor, target: Tensor, maximum: Tensor, log_sum: Tensor, upstream: Tensor, ignore_index: int
) -> Tensor:
    dlogits = _backward_fake(logits, target, maximum, log_sum, upstream, ignore_index)
    rows = as_rows(logits)
    block, warps = _block(rows.shape[1])
    _backward_kernel[rows.shape[0]](
        rows, target.contiguous(), maximum, log_sum, upstream, dlogits, rows.stride(0), upstream.stride(0),
        rows.shape[1], ignore_index, block, num_warps=warps,
    )  # fmt: skip
    return dlogits


def losses_of(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The loss of each row of (M, V) logits, outside autograd."""
    if uses_triton(logits):
        return _forward(logits, target, ignore_index)[0]
    return reference(logits, target, ignore_index)


def loss_then_gradient_(logits: Tensor, target: Tensor, upstream: Tensor, ignore_index: int) -> Tensor:
    """Returns each row's loss and overwrites `logits`, a private contiguous (M, V) buffer, with `upstream_t *
    dloss_t/dlogits`.

    For `linear_cross_entropy`, which makes logits only to differentiate them at once.
    """
    if uses_triton(logits):
        loss, target = logits.new_empty(target.shape, dtype=torch.float32), target.contiguous()
        block, warps = _block(logits.shape[1])
        _loss_then_gradient_kernel[logits.shape[0]](
            logits, target, upstream, loss, logits.stride(0), upstream.stride(0), logits.shape[1], ignore_index, block,
            num_warps=warps,
        )  # fmt: skip
        return loss
    loss = reference(logits, target, ignore_index)
    valid = (target != ignore_index)[:, None]
    one_hot = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    probabilities = logits.to(wide(logits.dtype)).softmax(-1)
    logits.copy_(torch.where(valid, upstream[:, None] * (probabilities - one_hot.to(probabilities.dtype)), 0.0))
    return loss


def check_targets(target: Tensor, n_classes: int, ignore_index: int) -> None:
    """Raises ValueError for a target that is neither a class nor the ignored one, where looking costs no wait for a
    GPU.

    On a GPU the check runs only when LIGERZOO_DEBUG=1; without it such a row's loss and gradient are NaN.
    """
    if DEBUG or target.device.type == "cpu":
        wrong = (target != ignore_index) & ((target < 0) | (target >= n_classes))
        if bool(wrong.any()):
            position = tuple(int(i) for i in wrong.nonzero()[0])
            raise ValueError(
                f"cross entropy: the target at {position} is {int(target[position])}; "
                f"expected 0 to {n_classes - 1}, or {ignore_index} for a token that does not count"
            )


def reduce(
    losses: Tensor, target: Tensor, reduction: Reduction, ignore_index: int, num_items: int | Tensor | None
) -> Tensor:
    """Reduces the losses of the tokens as `cross_entropy` says; no valid token gives 0."""
    match reduction:
        case "none" if num_items is None:
            return losses
        case "mean" if num_items is None:
            return losses.sum() / (target != ignore_index).sum().clamp(min=1)
        case "mean" if num_items is not None:
            return losses.sum() / num_items
        case "sum" if num_items is None:
            return losses.sum()
    raise ValueError(
        f"cross entropy: reduction={reduction!r} with num_items={num_items!r}; "
        f'expected "mean", "sum" or "none", and num_items only with "mean"'
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        loss, maximum, log_sum = _forward(logits, target, ignore_index)
        ctx.save_for_backward(logits, target, maximum, log_sum)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(*ctx.saved_tensors, upstream.reshape(-1), ctx.ignore_index), None, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Cross entropy of `softmax(logits)` against `target`, computed in fp32 whatever the dtype of the logits.

    Args:
        logits: (..., V), any strides. Never written to.
        target: (...) int64, each in [0, V) or `ignore_index`.
        ignore_index: the target of a token that does not count.
        reduction: "mean" over the tokens that count, "sum", or "none" for the loss of each token.
        num_items: divides the sum in place of the number of tokens that count (an int or a 0-d tensor): the same number
            for all micro-batches of a step makes gradient accumulation exact.

    Returns:
        fp32 (fp64 for fp64 logits): 0-d, or of the targets' shape for "none". Without a token that counts, "mean" is 0.

    Raises:
        ValueError: the shapes do not fit, the reduction is unknown, or (on a CPU, or when LIGERZOO_DEBUG=1) a target is
            no class.
    """
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"cross_entropy: logits {tuple(logits.shape)} and target {tuple(target.shape)}; expected (..., V) and (...)"
        )
    if uses_triton(logits):
        losses = _CrossEntropy.apply(logits, target, ignore_index)
    else:
        if not torch.compiler.is_compiling():
            check_targets(target, logits.shape[-1], ignore_index)
        losses = reference(logits.reshape(-1, logits.shape[-1]), target.flatten(), ignore_index).view(target.shape)
    return reduce(losses, target, reduction, ignore_index, num_items)
