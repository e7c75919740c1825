"""The loss head: cross entropy of `hidden @ weight.T + bias` without ever holding all logits.

The rows are swept in chunks whose logits fit a budget: a matrix product makes a chunk's logits, one kernel turns them
in place into their own gradient (`token_loss` has the formulas), two matrix products turn that into the chunk's part of
dhidden and dweight. See `head` for the products, their precision, and where tokens that do not count cost none.

A sum or mean over tokens, with weights known beforehand, has one upstream gradient for all of them, so its gradients
can be made in the forward sweep (6MHV operations in all) and are multiplied by it in backward, see `ahead`. The results
of single tokens have an upstream gradient each, unknown until backward, which then sweeps again (8MHV).

Saved: the gradients that are needed; or, for the results of single tokens, hidden, weight, bias and target.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, once_differentiable, uses_triton
from ligerzoo.kernels.loss.chunked_head import HeadInputs, Needs, gradient_dtype, head_type, rows_per_chunk
from ligerzoo.kernels.loss.precomputed_grad import attach_gradients
from ligerzoo.kernels.loss.reduction import (
    Reduction,
    as_targets,
    as_token_weight,
    check_class_weight,
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


class SweepOptions(NamedTuple):
    """How rows are swept.

    Attributes:
        ignore_index: the target of a row that is ignored.
        budget: MiB of logits that exist at a time, or None for `set_logits_budget`'s.
        triton: by Triton, or by plain torch.
        statistics: whether to compute entropies and argmaxes.
    """

    ignore_index: int
    budget: int | None
    triton: bool
    statistics: bool


class SweepResults(NamedTuple):
    """`RowResults`, and `HeadGradients`."""

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


def _sweep_fake(head: HeadInputs, target: Tensor, options: SweepOptions, needs: Needs) -> SweepResults:
    hidden, weight, _ = head
    return SweepResults(
        *zero_results(target, accumulation_dtype(hidden.dtype), statistics=options.statistics),
        hidden.new_empty(hidden.shape if needs.hidden else (0,)),
        weight.new_empty(weight.shape if needs.weight else (0,), dtype=gradient_dtype(weight)),
        weight.new_empty(weight.shape[:1] if needs.bias else (0,), dtype=accumulation_dtype(weight.dtype)),
    )


@register("linear_cross_entropy_sweep", fake=_sweep_fake)
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
    # The head would sum the bias's gradient from logits that are rounded already.
    chunked = head_type(hidden.shape[0], weight)(head, valid, rows, needs._replace(bias=False))
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
    """The sum of the tokens' weighted losses, divided, and their results as constants; gradients are made in this one
    sweep."""
    hidden = head.hidden
    needs = Needs(*(t is not None and t.requires_grad for t in head))
    with torch.no_grad():
        ones = torch.ones((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        grad_loss, largest = (ones if token_weight is None else token_weight) / divisor, None
        if hidden.dtype == torch.float16 and grad_loss.numel():
            # Small weights would take the logits' gradients out of its range.
            largest = grad_loss.abs().max()
            largest = torch.where(largest == 0, 1.0, largest)
            grad_loss = grad_loss / largest
        upstream = Upstream(loss=grad_loss.expand(target.shape))
        results = _sweep(head, target, class_weight, upstream, terms, options, needs)
        total = (results.loss if token_weight is None else results.loss * token_weight).sum()
    gradients = results.dhidden, results.dweight, results.dbias
    loss = attach_gradients(total / divisor, *zip(head, gradients, strict=True), factor=largest)
    if token_weight is not None:
        loss = attach_gradients(loss, (token_weight, (results.loss / divisor).detach()))
    return loss, results.rows


class _TokenResults(torch.autograd.Function):
    """The results of each token; backward sweeps again, now with the upstream gradients of each."""

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
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Tensor | None, ...]:
        *head, target, class_weight = ctx.saved_tensors
        upstream = Upstream(*upstreams[:4])
        if not ctx.options.statistics:  # compiled code gives zeros for what nobody used
            upstream = upstream._replace(entropy=None)
        needs = Needs(*ctx.needs_input_grad[:3])
        options = ctx.options._replace(statistics=False)
        results = _sweep(HeadInputs(*head), target, class_weight, upstream, ctx.terms, options, needs)
        gradients = results.dhidden, results.dweight, results.dbias
        head_gradients = (
            g.to(t.dtype) if needed else None for g, t, needed in zip(gradients, head, needs, strict=True)
        )
        return *head_gradients, None, None, None, None


def prepare_inputs(
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, terms: Terms,
) -> tuple[HeadInputs, Tensor]:  # fmt: skip
    """The head, of rows, and the targets, in the dtypes that they are computed in; ValueError if they do not fit."""
    hidden, weight, bias = autocast(hidden, weight, bias)
    if (
        hidden.shape[:-1] != target.shape
        or hidden.shape[-1:] != weight.shape[1:]
        or hidden.dtype != weight.dtype
        or not hidden.is_floating_point()
        or (bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype))
    ):
        raise ValueError(
            f"{name}: hidden {tuple(hidden.shape)} {hidden.dtype}, weight {tuple(weight.shape)} {weight.dtype}, "
            f"target {tuple(target.shape)}, bias {None if bias is None else (*bias.shape, bias.dtype)}; "
            "expected (..., H), (V, H), (...) and (V,), all but the target of one floating-point dtype"
        )
    check_terms(name, terms)
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
    """Cross entropy of `softmax(hidden @ weight.T + bias)` against `target`; the logits never exceed `logits_budget`.

    Args:
        hidden: (..., H) hidden states.
        weight: (V, H), the head, in the dtype of `hidden`.
        target: (...) int64, each in [0, V) or `ignore_index`.
        bias: (V,) or None, added to the logits.
        ignore_index: the target of a token that does not count.
        label_smoothing: the share of a target spread evenly over all classes.
        class_weight: (V,), a factor for the loss of each class, as in `torch.nn.functional.cross_entropy`. A constant.
        token_weight: (...), a factor for the loss of each token; differentiable.
        z_loss: the factor of `logsumexp(logits)^2`, added to each token's loss, whatever its class's weight.
        softcap: c, for logits `c tanh(logits / c)`.
        logit_scale: multiplies the logits, before the softcap.
        temperature: divides the logits, after the softcap.
        reduction: "mean" over the tokens that count (by their weights, if there are any), "sum", or "none" for the loss
            of each token.
        num_items: with "mean", divides the sum in place of the number of tokens that count (an int or a 0-d tensor):
            the same number for all micro-batches of a step makes gradient accumulation exact.
        logits_budget: MiB of logits that exist at a time (one row at least); None for `set_logits_budget`'s. On a CPU a
            few copies of these in fp32 come on top.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference, in chunks too).
        return_statistics: whether to return the tokens' statistics too, as constants, from the same sweep.

    Returns:
        fp32 (fp64 for fp64 input): 0-d, or of the targets' shape for "none"; or (loss, statistics). Without a token
        that valid, or a weight that is not 0, "mean" is 0 and all gradients are 0. A frozen `weight` or `hidden` costs
        neither the memory nor the time of its gradient.

    Raises:
        ValueError: the shapes or dtypes do not fit, the reduction is unknown, or (on a CPU, or when LIGERZOO_DEBUG=1) a
            target is no class. On a GPU without LIGERZOO_DEBUG such a token's loss is NaN.
    """
    name, terms = "linear_cross_entropy", Terms(logit_scale, softcap, temperature, label_smoothing, z_loss)
    head, target = prepare_inputs(name, hidden, weight, target, bias, ignore_index, terms)
    check_class_weight(name, class_weight, weight.shape[0])
    dtype = accumulation_dtype(head.hidden.dtype)
    token_weight = as_token_weight(name, token_weight, target, ignore_index, dtype)
    triton = uses_triton(head.hidden, head.weight, backend=backend)
    options = SweepOptions(ignore_index, logits_budget, triton, return_statistics)
    targets = target.reshape(-1)
    divisor = denominator(name, dtype, target, reduction, ignore_index, num_items, class_weight, token_weight)
    if divisor is None or not torch.is_grad_enabled():  # without gradients there is nothing to make ahead
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
    """Log-probability, entropy, logsumexp, argmax and accuracy of given targets, without ever holding all logits.

    All of one sweep; differentiable, but for the last two. Arguments and errors are those of `linear_cross_entropy`.
    """
    terms = Terms(logit_scale, softcap, temperature)
    head, target = prepare_inputs("token_statistics", hidden, weight, target, bias, ignore_index, terms)
    triton = uses_triton(head.hidden, head.weight, backend=backend)
    options = SweepOptions(ignore_index, logits_budget, triton, True)
    results = _TokenResults.apply(*head, target.reshape(-1), None, terms, options)
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
    """`log_softmax(hidden @ weight.T + bias)` at the targets, (...) fp32; 0 where the target is `ignore_index`.

    What preference and reinforcement losses stand on. Arguments and errors are those of `linear_cross_entropy`.
    """
    terms = Terms(logit_scale, softcap, temperature)
    head, target = prepare_inputs("token_logps", hidden, weight, target, bias, ignore_index, terms)
    triton = uses_triton(head.hidden, head.weight, backend=backend)
    options = SweepOptions(ignore_index, logits_budget, triton, False)
    logps: Tensor = _TokenResults.apply(*head, target.reshape(-1), None, terms, options)[1]
    return logps.view(target.shape)
