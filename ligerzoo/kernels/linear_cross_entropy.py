"""The loss head: cross entropy of `hidden @ weight.T + bias` without materializing all logits.

A sweep processes the rows in chunks whose logits fit a budget. A matrix product computes a chunk's logits. One kernel
overwrites them with their gradient (`loss.token_loss` has the formulas). Two matrix products compute the chunk's part
of dhidden and dweight from it. `loss.chunked_head` has the products; on Hopper GPUs they skip ignored tokens.

A sum or mean over tokens has one upstream gradient. The forward sweep computes its gradients up to that factor (6MHV
operations in all), and backward multiplies them by it, see `loss.precomputed_grad`. Results per token have one upstream
gradient each, known only in backward, which sweeps again (8MHV).

Saved: the needed gradients; or, for results per token, hidden, weight, bias and target.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, uses_triton
from ligerzoo.kernels.loss.chunked_head import (
    HeadGradients,
    HeadInputs,
    Needs,
    check_budget,
    gradient_dtype,
    gradients_of,
    head_flops,
    head_type,
    head_workspace,
    rows_per_chunk,
)
from ligerzoo.kernels.loss.precomputed_grad import attach_gradients, precomputes_gradients
from ligerzoo.kernels.loss.reduction import (
    HIDDEN_FIRST,
    Reduction,
    TokenReduction,
    as_targets,
    check_target_dtype,
    check_terms,
    token_reduction,
)
from ligerzoo.kernels.loss.row_kernel import compute_rows_, zero_results
from ligerzoo.kernels.loss.token_loss import (
    NO_UPSTREAM,
    RowResults,
    Terms,
    TokenStatistics,
    Upstream,
    token_statistics_from,
)
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats, check_optional_floats, explains_options


class SweepOptions(NamedTuple):
    """The options of a sweep.

    Attributes:
        budget: MiB of logits that exist at a time; None for the default, see `set_logits_budget`.
        triton: whether to use Triton or plain torch for the rows.
        statistics: whether to compute entropies and argmaxes.
    """

    budget: int | None
    triton: bool
    statistics: bool


class SweepResults(NamedTuple):
    """The fields of `RowResults` and of `HeadGradients`."""

    loss: Tensor
    logp: Tensor
    entropy: Tensor
    logsumexp: Tensor
    argmax: Tensor
    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor

    @property
    def rows(self) -> RowResults:
        return RowResults(*self[:5])

    @property
    def gradients(self) -> HeadGradients:
        return HeadGradients(*self[5:])


def _sweep_fake(head: HeadInputs, target: Tensor, options: SweepOptions, needs: Needs) -> SweepResults:
    hidden, weight, _ = head
    return SweepResults(
        *zero_results(target, accumulation_dtype(hidden.dtype), statistics=options.statistics),
        hidden.new_empty(hidden.shape if needs.hidden else (0,)),
        weight.new_empty(weight.shape if needs.weight else (0,), dtype=gradient_dtype(weight)),
        weight.new_empty(weight.shape[:1] if needs.bias else (0,), dtype=accumulation_dtype(weight.dtype)),
    )


def _sweep_flops(head: HeadInputs, needs: Needs) -> int:
    return head_flops(head.hidden, head.weight, needs)


def _sweep_peak(head: HeadInputs, target: Tensor, options: SweepOptions, needs: Needs) -> int:
    rows = rows_per_chunk(head.hidden, head.weight.shape[0], head.hidden.element_size(), options.budget)
    results = sum(result.numel() * result.element_size() for result in _sweep_fake(head, target, options, needs))
    return results + head_workspace(head.hidden, head.weight, rows, needs)


def _sweep_moved(head: HeadInputs, needs: Needs) -> int:
    """Logits are written and read; for gradients they are also overwritten, and read by each of their products."""
    passes = 2 + any(needs) + needs.hidden + needs.weight
    return passes * len(head.hidden) * len(head.weight) * head.hidden.element_size()


@register("linear_cross_entropy_sweep", fake=_sweep_fake, flops=_sweep_flops, peak=_sweep_peak, moved=_sweep_moved)
def linear_cross_entropy_sweep(
    head: HeadInputs,
    target: Tensor,
    class_weight: Tensor | None,
    upstream: Upstream,
    terms: Terms,
    options: SweepOptions,
    needs: Needs,
) -> SweepResults:
    hidden, weight, _ = head
    results = zero_results(target, accumulation_dtype(hidden.dtype), statistics=options.statistics)
    rows = rows_per_chunk(hidden, weight.shape[0], hidden.element_size(), options.budget)
    dbias = weight.new_zeros(weight.shape[:1] if needs.bias else (0,), dtype=accumulation_dtype(weight.dtype))
    needs_products = needs.hidden or needs.weight
    # The row kernel sums the bias's gradient before it is rounded. The head would sum rounded gradients.
    own_needs = Needs(needs.hidden, needs.weight)
    chunked = head_type(hidden.shape[0], weight)(head, target != terms.ignore_index, rows, own_needs)
    row_options: dict[str, Any] = {"dbias": dbias if needs.bias else None, "triton": options.triton}
    for chunk in chunked.chunks:
        logits = chunked.logits(chunk)
        out = logits if any(needs) else None
        rows_of_chunk = chunked.rows(chunk)
        compute_rows_(
            logits, target, results, upstream, terms, class_weight, out=out, rows=rows_of_chunk, **row_options
        )
        if needs_products:
            chunked.accumulate_gradient(chunk, logits)
    dhidden, dweight, _ = chunked.gradients()
    return SweepResults(*results, dhidden, dweight.to(gradient_dtype(weight)), dbias)


def _reduced_loss(
    head: HeadInputs, class_weight: Tensor | None, mean: TokenReduction, terms: Terms, options: SweepOptions
) -> tuple[Tensor, RowResults]:
    """Returns a sum or mean of the token losses, and the tokens' results, detached. One sweep computes the loss and its
    gradients."""
    hidden, target, divisor = head.hidden, mean.target.reshape(-1), mean.divisor
    token_weight = None if mean.token_weight is None else mean.token_weight.reshape(-1)
    assert divisor is not None
    needs = Needs(*(t is not None and t.requires_grad for t in head))
    with torch.no_grad():
        ones = torch.ones((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        grad_loss, largest = (ones if token_weight is None else token_weight) / divisor, None
        if hidden.dtype == torch.float16 and grad_loss.numel():
            # Small weights would underflow the logits' gradients.
            largest = grad_loss.abs().max()
            largest = torch.where(largest == 0, 1.0, largest)
            grad_loss = grad_loss / largest
        upstream = Upstream(loss=grad_loss.expand(target.shape))
        results = linear_cross_entropy_sweep(head, target, class_weight, upstream, terms, options, needs)
        total = (results.loss if token_weight is None else results.loss * token_weight).sum()
    loss = attach_gradients(total / divisor, *zip(head, results.gradients, strict=True), factor=largest)
    if token_weight is not None:
        loss = attach_gradients(loss, (token_weight, (results.loss / divisor).detach()))
    return loss, results.rows


class _TokenResults(FusedFunction):
    """The results of each token. Backward sweeps again, with the tokens' upstream gradients."""

    @staticmethod
    def forward(
        ctx: FusedContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        terms: Terms,
        options: SweepOptions,
    ) -> tuple[Tensor, ...]:
        head, needs = HeadInputs(hidden, weight, bias), Needs(False, False)
        results = linear_cross_entropy_sweep(head, target, class_weight, NO_UPSTREAM, terms, options, needs).rows
        ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        ctx.terms, ctx.options = terms, options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results.argmax)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, target, class_weight = ctx.saved_tensors
        head, needs = HeadInputs(*inputs), Needs(*ctx.needs_input_grad[:3])
        loss, logp, entropy, logsumexp, _ = upstream
        # Compiled code passes zeros for unused results.
        gradients = Upstream(loss, logp, entropy if ctx.options.statistics else None, logsumexp)
        options = ctx.options._replace(statistics=False)
        results = linear_cross_entropy_sweep(head, target, class_weight, gradients, ctx.terms, options, needs).gradients
        return *gradients_of(inputs, results, needs), None, None, None, None


def prepare_inputs(name: str, head: HeadInputs, target: Tensor, terms: Terms) -> tuple[HeadInputs, Tensor]:
    """Returns the head with flattened hidden states, and the targets, in the dtypes of the computation.

    Raises:
        TypeError: an argument has another type.
        ValueError: shapes, dtypes, terms or targets are invalid.
    """
    check_terms(name, terms)
    check_floats(name, hidden=head.hidden, weight=head.weight)
    check_optional_floats(name, bias=head.bias)
    check_target_dtype(name, target)
    hidden, weight, bias = autocast(*head)
    if (
        hidden.shape[:-1] != target.shape
        or hidden.shape[-1:] != weight.shape[1:]
        or hidden.dtype != weight.dtype
        or (bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype))
    ):
        raise LigerzooError(
            f"hidden {tuple(hidden.shape)} {hidden.dtype}, weight {tuple(weight.shape)} {weight.dtype}, "
            f"target {tuple(target.shape)}, bias {None if bias is None else (*bias.shape, bias.dtype)}",
            where=name,
            expected="(..., H), (V, H), (...) and (V,), all but the target of one floating-point dtype",
            remedy=HIDDEN_FIRST if weight.shape[:-1] == target.shape else None,
        )
    head = HeadInputs(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    return head, as_targets(name, target, weight.shape[0], terms.ignore_index)


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_statistics: Literal[False] = False,
    **options: object,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_statistics: Literal[True],
    **options: object,
) -> tuple[Tensor, TokenStatistics]: ...


@explains_options  # type: ignore[misc]
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
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
    logits_budget: int | None = None,
    backend: Backend = "auto",
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, TokenStatistics]:
    """Cross entropy of `softmax(hidden @ weight.T + bias)` against `target`, without materializing all logits.

    Args:
        hidden: (..., H) hidden states.
        weight: (V, H), the head, in the dtype of `hidden`.
        target: (...) int64, each in [0, V) or `ignore_index`.
        bias: (V,) or None, added to the logits.
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
        logits_budget: MiB of logits that exist at a time (at least one row); None for the default, see
            `set_logits_budget`. On a CPU, a few fp32 copies of a chunk's logits exist too.
        backend: "auto" (Triton on a GPU), "triton" or "torch" (the reference, in chunks too).
        return_statistics: also return the tokens' statistics, detached, from the same sweep.

    Returns:
        The loss in fp32 (fp64 for fp64 input): 0-d, or of the targets' shape for "none". With `return_statistics`,
        (loss, statistics). "mean" and all gradients are 0 without a valid token, or if all weights are 0. A `weight` or
        `hidden` that requires no gradient costs neither the memory nor the time of its gradient.

    Raises:
        ValueError: a shape, a dtype or the reduction is invalid, or (on a CPU, or if LIGERZOO_DEBUG=1) a target is
            outside [0, V). On a GPU without LIGERZOO_DEBUG, the loss of such a token is NaN.
    """
    name = "linear_cross_entropy"
    terms = Terms(logit_scale, softcap, temperature, label_smoothing, z_loss, ignore_index)
    head, target = prepare_inputs(name, HeadInputs(hidden, weight, bias), target, terms)
    n_classes, dtype = weight.shape[0], accumulation_dtype(head.hidden.dtype)
    mean = token_reduction(name, target, n_classes, dtype, terms, reduction, num_items, class_weight, token_weight)
    check_budget(name, logits_budget)
    triton = uses_triton(head.hidden, head.weight, backend=backend)
    options = SweepOptions(logits_budget, triton, return_statistics)
    if mean.divisor is None or not precomputes_gradients():
        results = _TokenResults.apply(*head, target.reshape(-1), class_weight, terms, options)
        loss = mean.loss(results[0])
    else:
        loss, results = _reduced_loss(head, class_weight, mean, terms, options)
    return (loss, mean.statistics(results)) if return_statistics else loss


@explains_options
def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | None = None,
    backend: Backend = "auto",
) -> TokenStatistics:
    """Returns log-probabilities, entropy, logsumexp, argmax and accuracy without materializing all logits.

    One sweep computes all of them. The first three are differentiable. Arguments and errors are those of
    `linear_cross_entropy`.
    """
    head, terms = HeadInputs(hidden, weight, bias), Terms(logit_scale, softcap, temperature, ignore_index=ignore_index)
    results = token_results("token_statistics", head, target, terms, logits_budget, backend, statistics=True)
    return token_statistics_from(results, target, ignore_index)


@explains_options
def token_logps(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns `log_softmax(hidden @ weight.T + bias)` at the targets, (...) fp32; 0 at ignored tokens.

    Preference and reinforcement learning losses are functions of these. Arguments and errors are those of
    `linear_cross_entropy`.
    """
    head, terms = HeadInputs(hidden, weight, bias), Terms(logit_scale, softcap, temperature, ignore_index=ignore_index)
    results = token_results("token_logps", head, target, terms, logits_budget, backend, statistics=False)
    return results.logp.view(target.shape)


def token_results(
    name: str,
    head: HeadInputs,
    target: Tensor,
    terms: Terms,
    logits_budget: int | None,
    backend: Backend,
    *,
    statistics: bool,
) -> RowResults:
    """Returns the results of the flattened targets, differentiable. `name` is the function that messages name."""
    head, target = prepare_inputs(name, head, target, terms)
    check_budget(name, logits_budget)
    options = SweepOptions(logits_budget, uses_triton(head.hidden, head.weight, backend=backend), statistics)
    return RowResults(*_TokenResults.apply(*head, target.reshape(-1), None, terms, options))
