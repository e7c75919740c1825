"""Cross entropy of given logits, in one pass over them and without an fp32 copy.

`loss.token_loss` has the formulas, forward and backward; `loss.row_kernel` has the kernel.

Saved: the logits (the caller's tensor, never written to), the targets, and the normalizer of each row (two fp32
numbers). A target outside [0, V) other than `ignore_index` gives NaN on a GPU, and an error on a CPU or if
LIGERZOO_DEBUG=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

from torch import Tensor

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, as_rows, uses_triton
from ligerzoo.kernels.loss.reduction import (
    Reduction,
    as_targets,
    as_token_weight,
    check_class_weight,
    check_target_dtype,
    check_terms,
    denominator,
    reduce_losses,
)
from ligerzoo.kernels.loss.row_kernel import compute_rows_, zero_results
from ligerzoo.kernels.loss.token_loss import (
    NO_UPSTREAM,
    Terms,
    TokenStatistics,
    Upstream,
    reference,
    token_statistics_from,
)
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats


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
    logits: Tensor, target: Tensor, class_weight: Tensor | None, terms: Terms, ignore_index: int, statistics: bool
) -> _ForwardResults:  # fmt: skip
    targets = target.reshape(-1)
    results = zero_results(targets, accumulation_dtype(logits.dtype), statistics=statistics)
    normalizer = results.loss.new_zeros((2, target.numel()))
    compute_rows_(
        as_rows(logits), targets, results, NO_UPSTREAM, terms, ignore_index, class_weight, normalizer=normalizer,
        triton=True,
    )  # fmt: skip
    return _ForwardResults(*results, normalizer)


@register("cross_entropy_backward", fake=lambda logits: logits.new_empty(logits.shape))
def _backward(
    logits: Tensor, target: Tensor, normalizer: Tensor, upstream: Tensor, class_weight: Tensor | None, terms: Terms,
    ignore_index: int,
) -> Tensor:  # fmt: skip
    dlogits = logits.new_empty(logits.shape)
    compute_rows_(
        as_rows(logits), target.reshape(-1), None, Upstream(upstream.reshape(-1)), terms, ignore_index, class_weight,
        out=dlogits.view(-1, logits.shape[-1]), normalizer=normalizer, triton=True,
    )  # fmt: skip
    return dlogits


class _CrossEntropy(FusedFunction):
    """`RowResults` of the flattened targets. Only the losses are differentiable."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, class_weight: Tensor | None, terms: Terms, ignore_index: int,
        statistics: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        *results, normalizer = _forward(logits, target, class_weight, terms, ignore_index, statistics)
        ctx.save_for_backward(logits, target, normalizer, class_weight)
        ctx.terms, ctx.ignore_index = terms, ignore_index
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        logits, target, normalizer, class_weight = ctx.saved_tensors
        dlogits = _backward(logits, target, normalizer, upstream, class_weight, ctx.terms, ctx.ignore_index)
        return dlogits, None, None, None, None, None


@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, return_statistics: Literal[False] = False, **options: Any
) -> Tensor: ...


@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, return_statistics: Literal[True], **options: Any
) -> tuple[Tensor, TokenStatistics]: ...


def cross_entropy(  # type: ignore[misc]
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
        ignore_index: the target of ignored tokens.
        label_smoothing: the share of a target distributed evenly over all classes, 0 to 1.
        class_weight: (V,), a factor for the loss of each class, as in `torch.nn.functional.cross_entropy`. Not
            differentiable.
        token_weight: (...), a factor for the loss of each token; differentiable.
        z_loss: adds `z_loss * logsumexp(logits)^2` to each token's loss. Class weights do not apply to it.
        softcap: c, for logits `c tanh(logits / c)`.
        logit_scale: multiplies the logits, before the softcap.
        temperature: divides the logits, after the softcap.
        reduction: "mean" over the valid tokens (weighted by given weights), "sum", or "none" for one loss per token.
        num_items: with "mean", divides the sum instead of the number of valid tokens (an int or a 0-d tensor). Pass the
            same number for all microbatches of a step to make gradient accumulation exact.
        backend: "auto" (Triton on a GPU), "triton" or "torch" (the reference).
        return_statistics: also return the tokens' statistics, detached, from the same pass.

    Returns:
        The loss in fp32 (fp64 for fp64 logits): 0-d, or of the targets' shape for "none". With `return_statistics`,
        (loss, statistics). "mean" is 0 without a valid token, or if all weights are 0.

    Raises:
        ValueError: a shape or the reduction is invalid, or (on a CPU, or if LIGERZOO_DEBUG=1) a target is outside
            [0, V).
    """
    name = "cross_entropy"
    check_floats(name, logits=logits)
    check_target_dtype(name, target)
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"{name}: logits {tuple(logits.shape)} and target {tuple(target.shape)}; expected (..., V) and (...)"
        )
    n_classes = logits.shape[-1]
    terms = Terms(logit_scale, softcap, temperature, label_smoothing, z_loss)
    check_terms(name, terms)
    check_class_weight(name, class_weight, n_classes)
    target = as_targets(name, target, n_classes, ignore_index)
    token_weight = as_token_weight(name, token_weight, target, ignore_index, accumulation_dtype(logits.dtype))
    results: Sequence[Tensor]
    if uses_triton(logits, backend=backend):
        results = _CrossEntropy.apply(logits, target, class_weight, terms, ignore_index, return_statistics)
    else:
        rows, targets = logits.reshape(-1, n_classes), target.flatten()
        results = reference(rows, targets, terms, ignore_index, class_weight, statistics=return_statistics)
    losses = results[0].view(target.shape)
    if token_weight is not None:
        losses = losses * token_weight
    divisor = denominator(name, losses.dtype, target, reduction, ignore_index, num_items, class_weight, token_weight)
    loss = reduce_losses(losses, divisor)
    if return_statistics:
        return loss, token_statistics_from([t.detach() for t in results], target, ignore_index)
    return loss
