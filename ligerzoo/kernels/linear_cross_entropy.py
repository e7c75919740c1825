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

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, uses_triton
from ligerzoo.kernels.loss.chunked_head import (
    HeadGradients,
    HeadInputs,
    Needs,
    check_budget,
    gradient_dtype,
    head_flops,
    head_type,
    head_workspace,
    rows_per_chunk,
)
from ligerzoo.kernels.loss.precomputed_grad import attach_gradients, precomputes_gradients
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
    RowResults,
    Terms,
    TokenStatistics,
    Upstream,
    token_statistics_from,
)
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats, check_optional_floats


class SweepOptions(NamedTuple):
    """The options of a sweep.

    Attributes:
        ignore_index: the target of ignored rows.
        budget: MiB of logits that exist at a time; None for the default, see `set_logits_budget`.
        triton: whether to use Triton or plain torch for the rows.
        statistics: whether to compute entropies and argmaxes.
    """

    ignore_index: int
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


@register("linear_cross_entropy_sweep", fake=_sweep_fake, flops=_sweep_flops, peak=_sweep_peak)
def _sweep(
    head: HeadInputs, target: Tensor, class_weight: Tensor | None, upstream: Upstream, terms: Terms,
    options: SweepOptions, needs: Needs,
) -> SweepResults:  # fmt: skip
    hidden, weight, _ = head
    results = zero_results(target, accumulation_dtype(hidden.dtype), statistics=options.statistics)
    valid = target != options.ignore_index
    rows = rows_per_chunk(hidden, weight.shape[0], hidden.element_size(), options.budget)
    dbias = weight.new_zeros(weight.shape[:1] if needs.bias else (0,), dtype=accumulation_dtype(weight.dtype))
    needs_products = needs.hidden or needs.weight
    # The row kernel sums the bias's gradient before it is rounded. The head would sum rounded gradients.
    chunked = head_type(hidden.shape[0], weight)(head, valid, rows, Needs(needs.hidden, needs.weight))
    for chunk in chunked.chunks:
        logits = chunked.logits(chunk)
        compute_rows_(
            logits, target, results, upstream, terms, options.ignore_index, class_weight=class_weight,
            out=logits if any(needs) else None, dbias=dbias if needs.bias else None, order=chunked.order,
            count=chunked.count(chunk), first_row=chunk.start, triton=options.triton,
        )  # fmt: skip
        if needs_products:
            chunked.accumulate_gradient(chunk, logits)
    dhidden, dweight, _ = chunked.gradients()
    return SweepResults(*results, dhidden, dweight.to(gradient_dtype(weight)), dbias)


def _reduced_loss(
    head: HeadInputs, target: Tensor, class_weight: Tensor | None, token_weight: Tensor | None, divisor: int | Tensor,
    terms: Terms, options: SweepOptions,
) -> tuple[Tensor, RowResults]:  # fmt: skip
    """Returns the sum of the weighted token losses, divided by `divisor`, and the tokens' results, detached. One sweep
    computes the loss and its gradients."""
    hidden = head.hidden
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
        results = _sweep(head, target, class_weight, upstream, terms, options, needs)
        total = (results.loss if token_weight is None else results.loss * token_weight).sum()
    loss = attach_gradients(total / divisor, *zip(head, results.gradients, strict=True), factor=largest)
    if token_weight is not None:
        loss = attach_gradients(loss, (token_weight, (results.loss / divisor).detach()))
    return loss, results.rows


class _TokenResults(FusedFunction):
    """The results of each token. Backward sweeps again, with the tokens' upstream gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
        terms: Terms, options: SweepOptions,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        results = _sweep(
            HeadInputs(hidden, weight, bias), target, class_weight, NO_UPSTREAM, terms, options, Needs(False, False)
        ).rows
        ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        ctx.terms, ctx.options = terms, options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results.argmax)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, loss: Tensor | None, logp: Tensor | None, entropy: Tensor | None, logsumexp: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        hidden, weight, bias, target, class_weight = ctx.saved_tensors
        ignore_index, budget, triton, statistics = ctx.options
        # Compiled code passes zeros for unused results.
        upstream = Upstream(loss, logp, entropy if statistics else None, logsumexp)
        needs = Needs(*ctx.needs_input_grad[:3])
        results = _sweep(
            HeadInputs(hidden, weight, bias), target, class_weight, upstream, ctx.terms,
            SweepOptions(ignore_index, budget, triton, False), needs,
        )  # fmt: skip
        return (
            results.dhidden if needs.hidden else None,
            results.dweight.to(weight.dtype) if needs.weight else None,
            results.dbias.to(bias.dtype) if needs.bias else None,
            None,
            None,
            None,
            None,
        )


def prepare_inputs(
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, terms: Terms,
) -> tuple[HeadInputs, Tensor]:  # fmt: skip
    """Returns the head with flattened hidden states, and the targets, in the dtypes of the computation.

    Raises:
        TypeError: an argument has another type.
        ValueError: shapes, dtypes or terms are invalid.
    """
    check_floats(name, hidden=hidden, weight=weight)
    check_optional_floats(name, bias=bias)
    check_target_dtype(name, target)
    check_terms(name, terms)
    hidden, weight, bias = autocast(hidden, weight, bias)
    if (
        hidden.shape[:-1] != target.shape
        or hidden.shape[-1:] != weight.shape[1:]
        or hidden.dtype != weight.dtype
        or (bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype))
    ):
        raise ValueError(
            f"{name}: hidden {tuple(hidden.shape)} {hidden.dtype}, weight {tuple(weight.shape)} {weight.dtype}, "
            f"target {tuple(target.shape)}, bias {None if bias is None else (*bias.shape, bias.dtype)}; "
            "expected (..., H), (V, H), (...) and (V,), all but the target of one floating-point dtype"
        )
    head = HeadInputs(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    return head, as_targets(name, target, weight.shape[0], ignore_index)


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
    return_statistics: Literal[False] = False, **options: Any,
) -> Tensor: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
    return_statistics: Literal[True], **options: Any,
) -> tuple[Tensor, TokenStatistics]: ...  # fmt: skip


def linear_cross_entropy(  # type: ignore[misc]
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
    name, terms = "linear_cross_entropy", Terms(logit_scale, softcap, temperature, label_smoothing, z_loss)
    head, target = prepare_inputs(name, hidden, weight, target, bias, ignore_index, terms)
    check_class_weight(name, class_weight, weight.shape[0])
    dtype = accumulation_dtype(head.hidden.dtype)
    token_weight = as_token_weight(name, token_weight, target, ignore_index, dtype)
    check_budget(name, logits_budget)
    triton = uses_triton(head.hidden, head.weight, backend=backend)
    options = SweepOptions(ignore_index, logits_budget, triton, return_statistics)
    targets = target.reshape(-1)
    divisor = denominator(name, dtype, target, reduction, ignore_index, num_items, class_weight, token_weight)
    if divisor is None or not precomputes_gradients():
        results = _TokenResults.apply(*head, targets, class_weight, terms, options)
        losses = results[0].view(target.shape)
        loss = reduce_losses(losses if token_weight is None else losses * token_weight, divisor)
    else:
        token_weights = None if token_weight is None else token_weight.reshape(-1)
        loss, results = _reduced_loss(head, targets, class_weight, token_weights, divisor, terms, options)
    if return_statistics:
        return loss, token_statistics_from([t.detach() for t in results], target, ignore_index)
    return loss


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
    terms = Terms(logit_scale, softcap, temperature)
    results = token_results(
        "token_statistics", hidden, weight, target, bias, terms, ignore_index, logits_budget, backend, statistics=True
    )
    return token_statistics_from(results, target, ignore_index)


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
    terms = Terms(logit_scale, softcap, temperature)
    results = token_results(
        "token_logps", hidden, weight, target, bias, terms, ignore_index, logits_budget, backend, statistics=False
    )
    return results.logp.view(target.shape)


def token_results(
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, terms: Terms, ignore_index: int,
    logits_budget: int | None, backend: Backend, *, statistics: bool,
) -> RowResults:  # fmt: skip
    """Returns the results of the flattened targets, differentiable. `name` is the function that messages name."""
    head, target = prepare_inputs(name, hidden, weight, target, bias, ignore_index, terms)
    check_budget(name, logits_budget)
    triton = uses_triton(head.hidden, head.weight, backend=backend)
    options = SweepOptions(ignore_index, logits_budget, triton, statistics)
    return RowResults(*_TokenResults.apply(*head, target.reshape(-1), None, terms, options))
