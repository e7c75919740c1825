"""The loss head: cross entropy of `hidden @ weight.T + bias` without ever holding all logits.

The rows are swept in chunks whose logits fit a budget: a matrix product makes a chunk's logits, one kernel turns them
in place into their own gradient (`token_loss` has the formulas), two matrix products turn that into the chunk's part of
dhidden and dweight. Tokens that do not count need no logits. See `head` for the products and their precision.

A loss that is a sum over tokens, with weights known beforehand, has the upstream gradient in common, so its gradients
can be made in the forward sweep (6MHV operations in all) and are multiplied by it in backward, in fp32 and into fresh
tensors. The results of single tokens have an upstream gradient each, unknown until backward, which then sweeps again
(8MHV).

Saved: the gradients that are needed; or, for the results of single tokens, hidden, weight, bias and target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.ahead import with_gradients
from ligerzoo.kernels.cross_entropy import Reduction, check_class_weight, check_targets, reduce
from ligerzoo.kernels.dispatch import Backend, autocast, once_differentiable, register, uses_triton, wide
from ligerzoo.kernels.head import Needs, gradient_dtype, head_type, rows_per_chunk
from ligerzoo.kernels.token_loss import (
    PLAIN,
    TERMS_SCHEMA,
    RowResults,
    Terms,
    Upstream,
    empty_results,
    walk_rows_,
)
from ligerzoo.kernels.token_loss import reference as rows_reference


def reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    terms: Terms = PLAIN,
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
) -> RowResults:
    """The results of each row in plain torch, all logits at once: the specification and the tests' oracle."""
    return rows_reference(F.linear(hidden, weight), target, terms, ignore_index, bias, class_weight)


class _Options(NamedTuple):
    terms: Terms
    ignore_index: int
    budget: int | None
    triton: bool
    entropy: bool
    argmax: bool


def _sweep_fake(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    of_loss: Tensor | None, of_logp: Tensor | None, of_entropy: Tensor | None, of_logsumexp: Tensor | None,
    scale: float, softcap: float | None, temperature: float, label_smoothing: float, z_loss: float,
    ignore_index: int, budget: int | None, triton: bool, entropy: bool, argmax: bool,
    needs_hidden: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return (
        *empty_results(target, wide(hidden.dtype), entropy=entropy, argmax=argmax),
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0,), dtype=gradient_dtype(weight)),
        weight.new_empty(weight.shape[:1] if needs_bias else (0,), dtype=wide(weight.dtype)),
    )


@register(
    "linear_cross_entropy_sweep(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, "
    "Tensor? of_loss, Tensor? of_logp, Tensor? of_entropy, Tensor? of_logsumexp, "
    f"{TERMS_SCHEMA}, int ignore_index, int? budget, bool triton, bool entropy, bool argmax, "
    "bool needs_hidden, bool needs_weight, bool needs_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_sweep_fake,
)
def _sweep(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    of_loss: Tensor | None, of_logp: Tensor | None, of_entropy: Tensor | None, of_logsumexp: Tensor | None,
    scale: float, softcap: float | None, temperature: float, label_smoothing: float, z_loss: float,
    ignore_index: int, budget: int | None, triton: bool, entropy: bool, argmax: bool,
    needs_hidden: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_targets(target, weight.shape[0], ignore_index)
    upstream = Upstream(of_loss, of_logp, of_entropy, of_logsumexp)
    terms = Terms(scale, softcap, temperature, label_smoothing, z_loss)
    needs = Needs(needs_hidden, needs_weight, needs_bias)
    results = empty_results(target, wide(hidden.dtype), entropy=entropy, argmax=argmax)
    counts = target != ignore_index
    rows = rows_per_chunk(hidden, weight, hidden.element_size(), budget)
    head = head_type(hidden.shape[0], weight)(hidden, weight, counts, rows, needs)
    for start in range(0, head.n_rows, rows):
        logits = head.logits(start)
        walk_rows_(
            logits, target, results, upstream, terms, ignore_index, bias, class_weight,
            out=logits if any(needs) else None, order=head.order, count=head.count, first_row=start, triton=triton,
        )  # fmt: skip
        if any(needs):
            head.take_gradient(start, logits)
    dhidden, dweight, dbias = head.gradients()
    return *results, dhidden, dweight.to(gradient_dtype(weight)), dbias


def _summed_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_weight: Tensor | None, target: Tensor,
    class_weight: Tensor | None, options: _Options,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The sum of the tokens' weighted losses, and their results as constants; gradients are made in this one sweep."""
    terms, *others = options
    of_loss = torch.ones((), device=hidden.device).expand(target.shape) if token_weight is None else token_weight
    needs = [t is not None and t.requires_grad for t in (hidden, weight, bias)]
    with torch.no_grad():
        *results, dhidden, dweight, dbias = _sweep(
            hidden, weight, target, bias, class_weight, of_loss.detach(), None, None, None, *terms, *others, *needs
        )
    loss = (results[0] * of_loss).sum()
    return with_gradients(loss, (hidden, dhidden), (weight, dweight), (bias, dbias)), results


class _TokenResults(torch.autograd.Function):
    """The results of each token; backward sweeps again, now with the upstream gradients of each."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        terms, *others = options
        results = _sweep(
            hidden, weight, target, bias, class_weight, None, None, None, None, *terms, *others, False, False, False
        )[:5]
        ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results[4])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, class_weight = ctx.saved_tensors
        terms, ignore_index, budget, triton, entropy, _ = ctx.options
        of_loss, of_logp, of_entropy, of_logsumexp, _ = upstream
        of_entropy = of_entropy if entropy else None  # compiled code gives zeros for what nobody used
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        *_, dhidden, dweight, dbias = _sweep(
            hidden, weight, target, bias, class_weight, of_loss, of_logp, of_entropy, of_logsumexp,
            *terms, ignore_index, budget, triton, False, False, needs_hidden, needs_weight, needs_bias,
        )  # fmt: skip
        return (
            dhidden if needs_hidden else None,
            dweight.to(weight.dtype) if needs_weight else None,
            dbias.to(bias.dtype) if needs_bias else None,
            *(None,) * 3,
        )


@dataclass(frozen=True)
class TokenStatistics:
    """What the model's distribution over the vocabulary says of each token; 0 for a token that does not count.

    Of shape (...), as the targets; fp32 (fp64 for fp64 input) where not said otherwise.
    """

    logps: Tensor
    """The target's log-probability."""
    entropy: Tensor
    """The entropy of the distribution, in nats."""
    logsumexp: Tensor
    """The logarithm of the sum of the exponentials of the logits."""
    argmax: Tensor
    """The likeliest token, int64."""
    accuracy: Tensor
    """0-d: of the tokens that count, the share whose target is the likeliest one; 0 if none counts."""


def _statistics(results: Sequence[Tensor], target: Tensor, ignore_index: int) -> TokenStatistics:
    _, logps, entropy, logsumexp, argmax = (t.view(target.shape) for t in results)
    counts = target != ignore_index
    accuracy = ((argmax == target) & counts).sum() / counts.sum().clamp(min=1)
    return TokenStatistics(logps, entropy, logsumexp, argmax, accuracy)


def _check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None) -> None:
    if (
        hidden.shape[:-1] != target.shape
        or hidden.shape[-1:] != weight.shape[1:]
        or hidden.dtype != weight.dtype
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        raise ValueError(
            f"linear_cross_entropy: hidden {tuple(hidden.shape)} {hidden.dtype}, "
            f"weight {tuple(weight.shape)} {weight.dtype}, "
            f"target {tuple(target.shape)}, bias {None if bias is None else tuple(bias.shape)}; "
            "expected (..., H), (V, H) of one dtype, (...) and (V,)"
        )
    check_class_weight(class_weight, weight.shape[0])


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
        z_loss: the factor of `logsumexp(logits)^2`, added to each token's loss.
        softcap: c, for logits `c tanh(logits / c)`.
        logit_scale: multiplies the logits, before the softcap.
        temperature: divides the logits, after the softcap.
        reduction: "mean" over the tokens that count (by their weights, if there are any), "sum", or "none" for the loss
            of each token.
        num_items: divides the sum in place of the number of tokens that count (an int or a 0-d tensor): the same number
            for all micro-batches of a step makes gradient accumulation exact.
        logits_budget: MiB of logits that exist at a time (one row at least); None for `set_logits_budget`'s. On a CPU a
            few copies of these in fp32 come on top.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference, in chunks too).
        return_statistics: whether to return the tokens' statistics too, as constants, from the same sweep.

    Returns:
        fp32 (fp64 for fp64 input): 0-d, or of the targets' shape for "none"; or (loss, statistics). Without a token
        that counts, "mean" is 0 and all gradients are 0. A frozen `weight` or `hidden` costs neither the memory nor the
        time of its gradient.

    Raises:
        ValueError: the shapes or dtypes do not fit, the reduction is unknown, or (on a CPU, or when LIGERZOO_DEBUG=1) a
            target is no class. On a GPU without LIGERZOO_DEBUG such a token's loss is NaN.
    """
    hidden, weight, bias = autocast(hidden, weight, bias)
    _check(hidden, weight, target, bias, class_weight)
    terms = Terms(logit_scale, softcap, temperature, label_smoothing, z_loss)
    triton = uses_triton(hidden, weight, backend=backend)
    options = _Options(terms, ignore_index, logits_budget, triton, return_statistics, return_statistics)
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    weights = None if token_weight is None else token_weight.expand(target.shape).reshape(-1)
    if reduction == "none" or not torch.is_grad_enabled():  # without gradients there is nothing to make ahead
        results = _TokenResults.apply(rows, weight, bias, targets, class_weight, options)
        losses = results[0].view(target.shape)
        if token_weight is not None:
            losses = losses * token_weight
    else:
        losses, results = _summed_loss(rows, weight, bias, weights, targets, class_weight, options)
    loss = reduce(losses, target, reduction, ignore_index, num_items, class_weight, token_weight)
    if return_statistics:
        return loss, _statistics([t.detach() for t in results], target, ignore_index)
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
    hidden, weight, bias = autocast(hidden, weight, bias)
    _check(hidden, weight, target, bias, None)
    terms = Terms(logit_scale, softcap, temperature)
    options = _Options(terms, ignore_index, logits_budget, uses_triton(hidden, weight, backend=backend), True, True)
    rows = hidden.reshape(-1, hidden.shape[-1])
    results = _TokenResults.apply(rows, weight, bias, target.reshape(-1), None, options)
    return _statistics(results, target, ignore_index)


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
    hidden, weight, bias = autocast(hidden, weight, bias)
    _check(hidden, weight, target, bias, None)
    terms = Terms(logit_scale, softcap, temperature)
    options = _Options(terms, ignore_index, logits_budget, uses_triton(hidden, weight, backend=backend), False, False)
    rows = hidden.reshape(-1, hidden.shape[-1])
    _, logps, *_ = _TokenResults.apply(rows, weight, bias, target.reshape(-1), None, options)
    return logps.view(target.shape)
