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

from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, once_differentiable, register, uses_triton
from ligerzoo.kernels.loss.chunked_head import Needs, gradient_dtype, head_type, rows_per_chunk
from ligerzoo.kernels.loss.precomputed_grad import with_gradients
from ligerzoo.kernels.loss.reduction import (
    Reduction,
    as_targets,
    as_token_weight,
    check_class_weight,
    check_terms,
    denominator,
    reduced,
)
from ligerzoo.kernels.loss.token_loss import (
    TERMS_SCHEMA,
    Terms,
    TokenStatistics,
    Upstream,
    empty_results,
    statistics_of,
    walk_rows_,
)


class _Options(NamedTuple):
    terms: Terms
    ignore_index: int
    budget: int | None
    triton: bool
    statistics: bool


def _sweep_fake(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    of_loss: Tensor | None, of_logp: Tensor | None, of_entropy: Tensor | None, of_logsumexp: Tensor | None,
    scale: float, softcap: float | None, temperature: float, label_smoothing: float, z_loss: float,
    ignore_index: int, budget: int | None, triton: bool, statistics: bool,
    needs_hidden: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return (
        *empty_results(target, accumulation_dtype(hidden.dtype), statistics=statistics),
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0,), dtype=gradient_dtype(weight)),
        weight.new_empty(weight.shape[:1] if needs_bias else (0,), dtype=accumulation_dtype(weight.dtype)),
    )


@register(
    "linear_cross_entropy_sweep(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, "
    "Tensor? of_loss, Tensor? of_logp, Tensor? of_entropy, Tensor? of_logsumexp, "
    f"{TERMS_SCHEMA}, int ignore_index, int? budget, bool triton, bool statistics, "
    "bool needs_hidden, bool needs_weight, bool needs_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_sweep_fake,
)
def _sweep(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    of_loss: Tensor | None, of_logp: Tensor | None, of_entropy: Tensor | None, of_logsumexp: Tensor | None,
    scale: float, softcap: float | None, temperature: float, label_smoothing: float, z_loss: float,
    ignore_index: int, budget: int | None, triton: bool, statistics: bool,
    needs_hidden: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    upstream = Upstream(of_loss, of_logp, of_entropy, of_logsumexp)
    terms = Terms(scale, softcap, temperature, label_smoothing, z_loss)
    needs = Needs(needs_hidden, needs_weight)  # the bias's gradient is summed here, from what is not rounded yet
    results = empty_results(target, accumulation_dtype(hidden.dtype), statistics=statistics)
    counts = target != ignore_index
    rows = rows_per_chunk(hidden, weight.shape[0], hidden.element_size(), budget)
    head = head_type(hidden.shape[0], weight)(hidden, weight, counts, rows, needs, bias)
    dbias = weight.new_zeros(weight.shape[:1] if needs_bias else (0,), dtype=accumulation_dtype(weight.dtype))
    for chunk in head.chunks:
        logits = head.logits(chunk)
        walk_rows_(
            logits, target, results, upstream, terms, ignore_index, class_weight=class_weight,
            out=logits if any(needs) or needs_bias else None, sums=dbias if needs_bias else None, order=head.order,
            count=head.count(chunk), first_row=chunk.start, triton=triton,
        )  # fmt: skip
        if any(needs):
            head.take_gradient(chunk, logits)
    dhidden, dweight, _ = head.gradients()
    return *results, dhidden, dweight.to(gradient_dtype(weight)), dbias


def _reduced_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weight: Tensor | None, divisor: int | Tensor, options: _Options,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The sum of the tokens' weighted losses, divided, and their results as constants; gradients are made in this one
    sweep."""
    terms, *others = options
    needs = [t is not None and t.requires_grad for t in (hidden, weight, bias)]
    with torch.no_grad():
        ones = torch.ones((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        of_loss, largest = (ones if token_weight is None else token_weight) / divisor, None
        if hidden.dtype == torch.float16 and of_loss.numel():
            # Small weights would take the logits' gradients out of its range.
            largest = of_loss.abs().max()
            largest = torch.where(largest == 0, 1.0, largest)
            of_loss = of_loss / largest
        *results, dhidden, dweight, dbias = _sweep(
            hidden, weight, target, bias, class_weight, of_loss.expand(target.shape), None, None, None,
            *terms, *others, *needs,
        )  # fmt: skip
        losses = results[0]
        total = (losses if token_weight is None else losses * token_weight).sum()
    loss = with_gradients(total / divisor, (hidden, dhidden), (weight, dweight), (bias, dbias), factor=largest)
    if token_weight is not None:
        loss = with_gradients(loss, (token_weight, (losses / divisor).detach()))
    return loss, results


class _TokenResults(torch.autograd.Function):
    """The results of each token; backward sweeps again, now with the upstream gradients of each."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        terms, *others = options
        results = _sweep(
            hidden, weight, target, bias, class_weight, None, None, None, None, *terms, *others, False, False, False
        )[:5]
        ctx.save_for_backward(hidden, weight, target, bias, class_weight)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results[4])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, target, bias, class_weight = ctx.saved_tensors
        terms, ignore_index, budget, triton, statistics = ctx.options
        of_loss, of_logp, of_entropy, of_logsumexp, _ = upstream
        of_entropy = of_entropy if statistics else None  # compiled code gives zeros for what nobody used
        needs_hidden, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        *_, dhidden, dweight, dbias = _sweep(
            hidden, weight, target, bias, class_weight, of_loss, of_logp, of_entropy, of_logsumexp,
            *terms, ignore_index, budget, triton, False, needs_hidden, needs_weight, needs_bias,
        )  # fmt: skip
        return (
            dhidden if needs_hidden else None,
            dweight.to(weight.dtype) if needs_weight else None,
            None,
            dbias.to(bias.dtype) if needs_bias else None,
            None,
            None,
        )


def prepared(
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, terms: Terms,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(rows of hidden, weight, target, bias) in the dtypes that they are computed in; ValueError if they do not fit."""
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
    return hidden.reshape(-1, hidden.shape[-1]), weight, as_targets(name, target, weight.shape[0], ignore_index), bias


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
        that counts, or a weight that is not 0, "mean" is 0 and all gradients are 0. A frozen `weight` or `hidden` costs
        neither the memory nor the time of its gradient.

    Raises:
        ValueError: the shapes or dtypes do not fit, the reduction is unknown, or (on a CPU, or when LIGERZOO_DEBUG=1) a
            target is no class. On a GPU without LIGERZOO_DEBUG such a token's loss is NaN.
    """
    name, terms = "linear_cross_entropy", Terms(logit_scale, softcap, temperature, label_smoothing, z_loss)
    rows, weight, target, bias = prepared(name, hidden, weight, target, bias, ignore_index, terms)
    check_class_weight(name, class_weight, weight.shape[0])
    token_weight = as_token_weight(name, token_weight, target, ignore_index, accumulation_dtype(rows.dtype))
    triton = uses_triton(rows, weight, backend=backend)
    options = _Options(terms, ignore_index, logits_budget, triton, return_statistics)
    targets = target.reshape(-1)
    divisor = denominator(
        name, accumulation_dtype(rows.dtype), target, reduction, ignore_index, num_items, class_weight, token_weight
    )
    if divisor is None or not torch.is_grad_enabled():  # without gradients there is nothing to make ahead
        results = _TokenResults.apply(rows, weight, targets, bias, class_weight, options)
        losses = results[0].view(target.shape)
        loss = reduced(losses if token_weight is None else losses * token_weight, divisor)
    else:
        token_weights = None if token_weight is None else token_weight.reshape(-1)
        loss, results = _reduced_loss(rows, weight, targets, bias, class_weight, token_weights, divisor, options)
    if return_statistics:
        return loss, statistics_of([t.detach() for t in results], target, ignore_index)
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
    rows, weight, target, bias = prepared("token_statistics", hidden, weight, target, bias, ignore_index, terms)
    options = _Options(terms, ignore_index, logits_budget, uses_triton(rows, weight, backend=backend), True)
    results = _TokenResults.apply(rows, weight, target.reshape(-1), bias, None, options)
    return statistics_of(results, target, ignore_index)


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
    rows, weight, target, bias = prepared("token_logps", hidden, weight, target, bias, ignore_index, terms)
    options = _Options(terms, ignore_index, logits_budget, uses_triton(rows, weight, backend=backend), False)
    logps: Tensor = _TokenResults.apply(rows, weight, target.reshape(-1), bias, None, options)[1]
    return logps.view(target.shape)
