"""Divergences of given logits of a student from those of a teacher: the losses of distillation.

`loss.token_divergence` has the formulas, forward and backward; `loss.divergence_kernels` has the kernels.

Saved: both logits (the caller's tensors, never written to), and five fp32 numbers a row: the two maxima, the logs of
the two sums of exponentials, and S. Recomputed in backward: p and q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.checks import FRACTION, POSITIVE, check
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable, requires_gradient
from ligerzoo.kernels.cosine import cosine_distances_
from ligerzoo.kernels.dispatch import Backend, uses_triton
from ligerzoo.kernels.loss.divergence_kernels import divergence_backward, divergence_forward, fused_divergences_
from ligerzoo.kernels.loss.reduction import Reduction, check_target, denominator, reduce_losses
from ligerzoo.kernels.loss.token_divergence import (
    Divergence,
    DivergenceOptions,
    reference,
    reference_divergences_,
)
from ligerzoo.tensor_checks import check_floats, explains_options


def row_divergences_(
    student: Tensor, teacher: Tensor, target: Tensor, upstream: Tensor | None, options: DivergenceOptions, triton: bool
) -> Tensor:
    """Returns each row's divergence, outside autograd. With upstream gradients, overwrites `student` by its gradient.

    Args:
        student: (M, V) logits, contiguous rows of a private buffer.
        teacher: (M, V) logits.
        target: (M,) integers.
        upstream: (M,) fp32 (fp64 for fp64 logits), the gradient of each row's divergence, which may be expanded; or
            None.
        options: the divergence.
        triton: whether to use Triton or plain torch.
    """
    if options.divergence == "cosine":
        return cosine_distances_(student, teacher, target, upstream, options)
    return (fused_divergences_ if triton else reference_divergences_)(student, teacher, target, upstream, options)


class _Losses(FusedFunction):
    @staticmethod
    def forward(
        ctx: FusedContext, student: Tensor, teacher: Tensor, target: Tensor, options: DivergenceOptions
    ) -> Tensor:
        loss, statistics = divergence_forward(student, teacher, target, options)
        ctx.save_for_backward(student, teacher, target, statistics)
        ctx.options = options
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, upstream: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, target, statistics = ctx.saved_tensors
        dstudent = divergence_backward(student, teacher, target, statistics, upstream.reshape(-1), ctx.options)
        return dstudent, None, None, None


def check_divergence(name: str, options: DivergenceOptions, **teacher_tensors: Tensor | None) -> None:
    """Raises for options out of range, and for a teacher's tensor that requires a gradient."""
    check(name, FRACTION, beta=options.beta)
    check(name, POSITIVE, temperature=options.temperature)
    for argument, tensor in teacher_tensors.items():
        if tensor is not None and requires_gradient(tensor) and torch.is_grad_enabled():
            what = f"{argument} requires a gradient, but no gradient is computed for the teacher"
            remedy = f"Run the teacher under torch.no_grad(), or pass {argument}.detach()"
            raise LigerzooError(what, where=name, remedy=remedy)


def jsd_divergence(beta: float) -> Divergence:
    """Returns the divergence that `jsd` computes with this beta."""
    if beta == 0:
        return "forward_kl"
    return "reverse_kl" if beta == 1 else "jsd"


def _divergence(
    name: str,
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    options: DivergenceOptions,
    reduction: Reduction,
    num_items: int | Tensor | None,
    backend: Backend,
) -> Tensor:
    check_floats(name, student=student, teacher=teacher)
    check_divergence(name, options, teacher=teacher)
    if student.shape != teacher.shape:
        what = f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)}"
        raise LigerzooError(what, where=name, expected="(..., V) for both")
    if target is None:
        target, options = target_without_ignored(student, options)
    check_target(name, target, student.shape[:-1])
    losses = (
        _Losses.apply(student, teacher, target, options)
        if uses_triton(student, teacher, backend=backend)
        else reference(student, teacher, target, options)
    )
    return reduce_losses(losses, denominator(name, losses.dtype, target, reduction, options.ignore_index, num_items))


def target_without_ignored(student: Tensor, options: DivergenceOptions) -> tuple[Tensor, DivergenceOptions]:
    """Returns targets without an ignored one, for (..., V) logits or (..., H) hidden states, and fitting options."""
    target = torch.zeros(student.shape[:-1], dtype=torch.int64, device=student.device)
    return target, options._replace(ignore_index=-100)


@explains_options
def kl_div(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Kullback-Leibler divergence KL(p || q) of `p = softmax(teacher / temperature)` and `q = softmax(student /
    temperature)`, or KL(q || p), computed in fp32 for logits of any dtype.

    Args:
        student: (..., V) logits, any strides. Never written to. Only these get a gradient.
        teacher: (..., V) logits, any strides and dtype.
        target: (...) integers, or None if all tokens are valid. Only compared with `ignore_index`.
        reverse: KL(q || p), which seeks the teacher's modes, instead of KL(p || q), which covers them.
        temperature: divides both logits. The loss is not multiplied by temperature^2, as Hinton et al. advise for a
            sum with a cross entropy: gradients shrink about as 1 / temperature^2.
        ignore_index: the target of ignored tokens.
        reduction: "mean" over the valid tokens, "sum", or "none" for one divergence per token.
        num_items: with "mean", divides the sum instead of the number of valid tokens (an int or a 0-d tensor). Pass the
            same number for all microbatches of a step to make gradient accumulation exact.
        backend: "auto" (Triton on a GPU), "triton" or "torch" (the reference).

    Returns:
        The loss in fp32 (fp64 for fp64 logits): 0-d, or of the tokens' shape for "none". "mean" is 0 without a valid
        token.

    Raises:
        ValueError: a shape or an option is invalid, or the teacher requires a gradient.
    """
    options = DivergenceOptions("reverse_kl" if reverse else "forward_kl", 0.0, temperature, ignore_index)
    return _divergence("kl_div", student, teacher, target, options, reduction, num_items, backend)


@explains_options
def jsd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Generalized Jensen-Shannon divergence `beta KL(p || m) + (1 - beta) KL(q || m)` of `p = softmax(teacher /
    temperature)` and `q = softmax(student / temperature)`, with `m = beta p + (1 - beta) q`.

    Args:
        beta: the teacher's weight, 0 to 1. At 0 and 1 the formula is 0, so 0 computes KL(p || q) and 1 computes
            KL(q || p): the limits of the divergence divided by beta and by 1 - beta. This is the convention of TRL's
            GKDTrainer and of Liger. Losses for beta near 0 or 1 are not close to those at 0 or 1.

    The other arguments, the result and the errors are those of `kl_div`.
    """
    options = DivergenceOptions(jsd_divergence(beta), beta, temperature, ignore_index)
    return _divergence("jsd", student, teacher, target, options, reduction, num_items, backend)


@explains_options
def tvd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Total variation distance `1/2 sum |p - q|` of `p = softmax(teacher / temperature)` and `q = softmax(student /
    temperature)`. Its gradient uses sign(0) = 0.

    The arguments, the result and the errors are those of `kl_div`.
    """
    options = DivergenceOptions("tvd", 0.0, temperature, ignore_index)
    return _divergence("tvd", student, teacher, target, options, reduction, num_items, backend)
