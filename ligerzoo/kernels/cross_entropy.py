"""Cross entropy of given logits, in one pass over them and without an fp32 copy.

`loss.token_loss` has the formulas, forward and backward; `loss.row_kernel` has the kernel.

Saved: the logits (the caller's tensor, never written to), the targets, and the normalizer of each row (two fp32
numbers). A target outside [0, V) other than `ignore_index` gives NaN on a GPU, and an error on a CPU or if
LIGERZOO_DEBUG=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, as_rows, empty_result, uses_triton
from ligerzoo.kernels.loss.reduction import (
    Reduction,
    as_targets,
    check_target_dtype,
    check_terms,
    token_reduction,
)
from ligerzoo.kernels.loss.row_kernel import compute_rows_, zero_results
from ligerzoo.kernels.loss.token_loss import NO_UPSTREAM, Terms, TokenStatistics, Upstream, reference
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats, explains_options


class _ForwardResults(NamedTuple):
    """`RowResults` of the flattened targets, and the rows' m and s for backward, (2, T) fp32."""

    loss: Tensor
    logp: Tensor
    entropy: Tensor
    logsumexp: Tensor
    argmax: Tensor
    normalizer: Tensor


def _forward_fake(logits: Tensor, target: Tensor, statistics: bool) -> _ForwardResults:
    results = zero_results(target.reshape(-1), accumulation_dtype(logits.dtype), statistics=statistics)
    return _ForwardResults(*results, results.loss.new_empty((2, target.numel())))


@register("cross_entropy_forward", fake=_forward_fake)
def _forward(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, terms: Terms, statistics: bool
) -> _ForwardResults:
    rows, targets = as_rows(logits), target.reshape(-1)
    results = zero_results(targets, accumulation_dtype(logits.dtype), statistics=statistics)
    normalizer = results.loss.new_zeros((2, target.numel()))
    compute_rows_(rows, targets, results, NO_UPSTREAM, terms, class_weight, normalizer=normalizer, triton=True)
    return _ForwardResults(*results, normalizer)


@register("cross_entropy_backward", fake=lambda logits: empty_result(logits))
def _backward(
    logits: Tensor, target: Tensor, normalizer: Tensor, upstream: Tensor, class_weight: Tensor | None, terms: Terms
) -> Tensor:
    dlogits = empty_result(logits)
    rows, targets, out = as_rows(logits), target.reshape(-1), dlogits.view(-1, logits.shape[-1])
    gradients = Upstream(upstream.reshape(-1))
    compute_rows_(rows, targets, None, gradients, terms, class_weight, out=out, normalizer=normalizer, triton=True)
    return dlogits


class _CrossEntropy(FusedFunction):
    """`RowResults` of the flattened targets. Only the losses are differentiable."""

    @staticmethod
    def forward(
        ctx: FusedContext, logits: Tensor, target: Tensor, class_weight: Tensor | None, terms: Terms, statistics: bool
    ) -> tuple[Tensor, ...]:
        *results, normalizer = _forward(logits, target, class_weight, terms, statistics)
        ctx.save_for_backward(logits, target, normalizer, class_weight)
        ctx.terms = terms
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, upstream: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        logits, target, normalizer, class_weight = ctx.saved_tensors
        return _backward(logits, target, normalizer, upstream, class_weight, ctx.terms), None, None, None, None


@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, return_statistics: Literal[False] = False, **options: object
) -> Tensor: ...


@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, return_statistics: Literal[True], **options: object
) -> tuple[Tensor, TokenStatistics]: ...


@explains_options  # type: ignore[misc]
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    backend: Backend = "auto",
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, TokenStatistics]:
    """Cross entropy of `softmax(logits)` against `target`, computed in fp32 for logits of any dtype.

    Args:
        logits: (..., V), any strides. Never written to.
        target: (...) int64, each in [0, V) or `ignore_index`.

    The other arguments, the result and the errors are those of `linear_cross_entropy`, for given logits.
    """
    name = "cross_entropy"
    check_floats(name, logits=logits)
    check_target_dtype(name, target)
    if logits.shape[:-1] != target.shape:
        what = f"logits {tuple(logits.shape)} and target {tuple(target.shape)}"
        raise LigerzooError(what, where=name, expected="(..., V) and (...)")
    n_classes, dtype = logits.shape[-1], accumulation_dtype(logits.dtype)
    terms = Terms(logit_scale, softcap, temperature, label_smoothing, z_loss, ignore_index)
    check_terms(name, terms)
    target = as_targets(name, target, n_classes, ignore_index)
    mean = token_reduction(name, target, n_classes, dtype, terms, reduction, num_items, class_weight, token_weight)
    results: Sequence[Tensor]
    if uses_triton(logits, backend=backend):
        results = _CrossEntropy.apply(logits, target, class_weight, terms, return_statistics)
    else:
        rows, targets = logits.reshape(-1, n_classes), target.flatten()
        results = reference(rows, targets, terms, class_weight, statistics=return_statistics)
    loss = mean.loss(results[0])
    return (loss, mean.statistics(results)) if return_statistics else loss
