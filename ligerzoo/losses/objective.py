"""Objectives over log-probabilities, differentiated while the logits that they come from still exist.

An objective of post-training is a sum over groups: of tokens (a policy gradient), of rows (KTO, GSPO), or of pairs of
rows (DPO). Within a group it is any function of the log-probabilities of the group's tokens, but no group depends on
another. So one sweep over a loss head is enough: where the logits of whole groups fit the budget together, the head
makes them, one walk over them gives log-probabilities, autograd differentiates the objective with respect to those few
numbers, and a second walk turns the logits in place into their gradient, from which the head takes its own:

    logits -> logps -> objective -> d objective / d logps -> dlogits -> dhidden, dweight

That is 6MHV operations, as many as a cross entropy needs. The log-probabilities of `token_logps`, differentiated by
autograd alone, need 8MHV, for backward has to make the logits again. They remain the specification, and the way of
groups whose logits do not fit the budget, of compiled code, and of evaluation.

Logits may be given in place of hidden states, with None in place of the head's weight. They are read, never written to,
and their gradient is made in the forward pass too.

Shapes: B rows, T tokens of a row, H features, V classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from ligerzoo.kernels import cross_entropy, token_logps, token_statistics
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, uses_triton
from ligerzoo.kernels.linear_cross_entropy import prepare_inputs
from ligerzoo.kernels.loss.chunked_head import HeadInputs, Needs, head_type, max_rows, rows_per_chunk
from ligerzoo.kernels.loss.precomputed_grad import attach_gradients
from ligerzoo.kernels.loss.reduction import as_targets, check_terms
from ligerzoo.kernels.loss.row_kernel import compute_rows_, zero_results
from ligerzoo.kernels.loss.token_loss import Terms, Upstream, reference
from ligerzoo.losses.names import about_option

Group = Literal["token", "row", "pair"]
"""What an objective is a sum over: single tokens, rows, or pairs of a row of the batch's first half and the one at the
same place in the second."""


class HeadOptions(TypedDict, total=False):
    """What a loss takes besides hidden states, the head's weight and targets; as `ligerzoo.kernels.token_logps` does.

    Attributes:
        bias: (V,), added to the logits.
        ignore_index: the target of a token that does not count, -100 by default.
        softcap: c, for logits `c tanh(logits / c)`.
        logit_scale: multiplies the logits, before the softcap.
        logits_budget: MiB of logits that exist at a time; None for `set_logits_budget`'s. Those of a whole pair (or
            row, where the loss is of rows) of T tokens, in 16 bits 4 T V bytes (or 2), should fit: else each token's
            logits are made once more, 8MHV operations in place of 6MHV. Has no effect on logits that are given.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference).
    """

    bias: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    logits_budget: int | None
    backend: Backend


class LogpOptions(HeadOptions, total=False):
    """The options of a head, and how log-probabilities are computed from its logits.

    Attributes:
        temperature: divides the logits, after the softcap; 1.0 by default. A reference model's log-probabilities should
            have the same.
    """

    temperature: float


class LossOutput(NamedTuple):
    """A loss, and what people log of it.

    Attributes:
        loss: 0-d, fp32 (fp64 for fp64 input).
        metrics: detached tensors by name, 0-d, on the loss's device: reading one makes the host wait. Each is a mean
            over the sequences, pairs or tokens of this call, even if `num_items` divides the loss by other numbers. The
            mean over micro-batches or processes weights each call by the number of its sequences, pairs or tokens.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class Objective(NamedTuple):
    """A function of log-probabilities, and the constants that it needs of each row.

    Attributes:
        formula: (logps (b, T), entropy (b, T) or None, *constants of these rows) -> 0-d, the sum over the groups that
            the b rows are, divided by all it is to be divided by: of pairs the first rows of all come first. For tokens
            b is their number, and T is 1.
        constants: (B, ...) each, or None; for tokens (B, T).
        group: what the formula is a sum over.
        entropy: whether the formula looks at entropies.
    """

    formula: Callable[..., Tensor]
    constants: Sequence[Tensor | None]
    group: Group
    entropy: bool = False


class Evaluated(NamedTuple):
    """The value of an objective, differentiable, and as constants the (B, T) log-probabilities and entropies (None if
    the objective does not look at them); 0 where a token does not count."""

    value: Tensor
    logps: Tensor
    entropy: Tensor | None


def check_head(name: str, head: HeadOptions) -> None:
    """Raises TypeError for what is no option of the head, which is where all that `name` does not know arrives."""
    for unknown in head.keys() - LogpOptions.__annotations__.keys():
        what_it_is = about_option(unknown, dict(head)[unknown])
        raise TypeError(f"{name}() got an unexpected keyword argument {unknown!r}{what_it_is}")


def evaluate(
    name: str, hidden: Tensor, weight: Tensor | None, target: Tensor, objective: Objective, head: LogpOptions
) -> Evaluated:
    """The value of an objective over (B, T, H) hidden states, a (V, H) head and (B, T) targets; or over (B, T, V)
    logits, without a head.

    Args:
        name: the loss, which errors are about.

    Raises:
        TypeError: `head` has an option that heads do not have.
        ValueError: shapes, dtypes or targets do not fit, as in `ligerzoo.kernels.token_logps`.
    """
    check_head(name, head)
    if weight is None:
        check_logits(name, hidden, head)
    objective = objective._replace(constants=[None if c is None else c.detach() for c in objective.constants])
    wants_gradients = any(t is not None and t.requires_grad for t in (hidden, weight, head.get("bias")))
    traced = torch.compiler.is_compiling() or hidden.is_meta
    if weight is None and not traced:
        return _of_logits(name, hidden, target, objective, **head)
    if weight is not None and wants_gradients and torch.is_grad_enabled() and not traced:
        evaluated = _in_one_sweep(name, hidden, weight, target, objective, **head)
        if evaluated is not None:
            return evaluated
    return by_autograd(hidden, weight, target, objective, head)


def by_autograd(
    hidden: Tensor, weight: Tensor | None, target: Tensor, objective: Objective, head: LogpOptions
) -> Evaluated:
    """The same by autograd alone: the specification."""
    logps, entropy = token_results(hidden, weight, target, head, entropy=objective.entropy)
    value = objective.formula(logps, entropy, *objective.constants).to(logps.dtype)  # whatever the constants' is
    return Evaluated(value, logps.detach(), None if entropy is None else entropy.detach())


def token_results(
    hidden: Tensor, weight: Tensor | None, target: Tensor, head: LogpOptions, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(B, T) log-probabilities of the targets, and entropies if they are wanted; differentiable."""
    if weight is None:
        return _results_of_logits(hidden, target, entropy=entropy, **head)
    if not entropy:
        return token_logps(hidden, weight, target, **head), None
    statistics = token_statistics(hidden, weight, target, **head)
    return statistics.logps, statistics.entropy


def _results_of_logits(
    logits: Tensor, target: Tensor, *, entropy: bool, bias: Tensor | None = None, ignore_index: int = -100,
    softcap: float | None = None, logit_scale: float = 1.0, temperature: float = 1.0, logits_budget: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if not entropy:
        return -cross_entropy(
            logits, target, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
            temperature=temperature, reduction="none", backend=backend,
        ), None  # fmt: skip
    terms = Terms(logit_scale, softcap, temperature)
    results = reference(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), terms, ignore_index)
    return results.logp.view(target.shape), results.entropy.view(target.shape)


def check_logits(name: str, logits: Tensor, head: HeadOptions) -> None:
    """Raises ValueError for logits that are no floating-point numbers, or that come with a bias."""
    if not logits.is_floating_point() or head.get("bias") is not None:
        raise ValueError(
            f"{name}: weight=None with logits {tuple(logits.shape)} {logits.dtype} and "
            f"bias {None if head.get('bias') is None else 'given'}; expected (B, T, V) floating-point logits, no bias"
        )


def _of_logits(
    name: str, logits: Tensor, target: Tensor, objective: Objective, *, bias: Tensor | None = None,
    ignore_index: int = -100, softcap: float | None = None, logit_scale: float = 1.0, temperature: float = 1.0,
    logits_budget: int | None = None, backend: Backend = "auto",
) -> Evaluated:  # fmt: skip
    """The value over given logits. One walk gives log-probabilities, a second one the gradient of the logits."""
    terms, shape = Terms(logit_scale, softcap, temperature), target.shape
    check_terms(name, terms)
    x = logits.reshape(-1, logits.shape[-1])
    x = x if x.stride(-1) == 1 else x.contiguous()
    targets = as_targets(name, target, x.shape[-1], ignore_index).reshape(-1)
    wants_gradient = logits.requires_grad and torch.is_grad_enabled()
    with torch.no_grad(), torch.cuda.device(x.device if x.is_cuda else -1):
        results = zero_results(targets, accumulation_dtype(x.dtype), statistics=objective.entropy)
        normalizer, triton = results.logp.new_empty((2, targets.shape[0])), uses_triton(x, backend=backend)
        walk = functools.partial(
            compute_rows_, x, targets, terms=terms, ignore_index=ignore_index, normalizer=normalizer, triton=triton
        )
        walk(results)
        logps, entropy = results.logp.view(shape), results.entropy.view(shape) if objective.entropy else None
        if not wants_gradient:
            return Evaluated(objective.formula(logps, entropy, *objective.constants).to(logps.dtype), logps, entropy)
        value, (of_logp, *of_entropy) = _differentiated(objective.formula, logps, entropy, objective.constants)
        upstream = Upstream(logp=of_logp.reshape(-1), entropy=of_entropy[0].reshape(-1) if of_entropy else None)
        # In fp16 the gradients of single tokens may vanish before backward multiplies them by the loss's scale.
        dlogits = torch.empty_like(x, dtype=accumulation_dtype(x.dtype) if x.dtype == torch.float16 else x.dtype)
        walk(None if triton and entropy is None else results, upstream, out=dlogits)
    value = attach_gradients(value.to(logps.dtype), (logits, dlogits.view(logits.shape)))
    return Evaluated(value, logps, entropy)


class _Plan(NamedTuple):
    """How the tokens of a batch are swept.

    Attributes:
        length: of the rows that the formula sees; 1 if each token is a group.
        tokens_at_a_time: those of a chunk.
        rows: which rows each chunk has; None if each token is a group, so that a chunk may have any.
        order: the tokens of those rows, one chunk behind the other; None if the head may choose.
    """

    length: int
    tokens_at_a_time: int
    rows: list[Tensor] | None = None
    order: Tensor | None = None


def _plan(x: Tensor, n_classes: int, target: Tensor, group: Group, budget: int | None) -> _Plan | None:
    """Chunks of whole groups whose logits fit the budget; None if those of one group do not."""
    size = x.element_size()
    if group == "token":
        return _Plan(1, rows_per_chunk(x, n_classes, size, budget))
    (n_rows, length), members = target.shape, 2 if group == "pair" else 1
    n_groups = n_rows // members
    at_a_time = min(max_rows(n_classes, size, budget) // (members * length), n_groups)
    if at_a_time == 0:
        return None
    grouped = torch.arange(n_rows, device=x.device).view(members, n_groups)
    rows = [grouped[:, start : start + at_a_time].reshape(-1) for start in range(0, n_groups, at_a_time)]
    order = torch.cat(rows)[:, None] * length + torch.arange(length, device=x.device)
    return _Plan(length, at_a_time * members * length, rows, order.reshape(-1))


def _differentiated(
    formula: Callable[..., Tensor], logps: Tensor, entropy: Tensor | None, constants: Sequence[Tensor | None]
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """The value, and its gradients with respect to log-probabilities and entropies."""
    with torch.enable_grad():
        leaves = [t.clone().requires_grad_() for t in (logps, entropy) if t is not None]
        value = formula(leaves[0], None if entropy is None else leaves[1], *constants)
        return value.detach(), torch.autograd.grad(value, leaves)


def _in_one_sweep(
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, objective: Objective, *, bias: Tensor | None = None,
    ignore_index: int = -100, softcap: float | None = None, logit_scale: float = 1.0, temperature: float = 1.0,
    logits_budget: int | None = None, backend: Backend = "auto",
) -> Evaluated | None:  # fmt: skip
    """The value with its gradients; None if the logits of a group do not fit the budget. (Nor for fp16, in which the
    gradients of single tokens may vanish unless the loss's scale multiplies them, and only backward knows that.)"""
    terms, formula, shape = Terms(logit_scale, softcap, temperature), objective.formula, target.shape
    (x, weight, bias), target = prepare_inputs(name, hidden, weight, target, bias, ignore_index, terms)
    if x.dtype == torch.float16 or target.numel() == 0:
        return None
    plan = _plan(x, weight.shape[0], target, objective.group, logits_budget)
    if plan is None:
        return None
    constants = objective.constants
    if plan.rows is None:
        constants = [None if c is None else c.reshape(-1, 1) for c in constants]

    def of_rows(x: Tensor) -> Tensor:
        return x.view(-1, plan.length)

    targets, triton = target.reshape(-1), uses_triton(x, weight, backend=backend)
    needs = Needs(x.requires_grad, weight.requires_grad)
    with torch.no_grad(), torch.cuda.device(x.device if x.is_cuda else -1):
        results = zero_results(targets, accumulation_dtype(x.dtype), statistics=objective.entropy)
        entropy = results.entropy if objective.entropy else None
        upstream = Upstream(
            logp=torch.zeros_like(results.logp), entropy=None if entropy is None else torch.zeros_like(entropy)
        )
        normalizer = results.logp.new_empty((2, targets.shape[0]))
        known = None if triton and entropy is None else results  # what the normalizer alone cannot tell
        value = results.logp.new_zeros(())
        dbias = None
        if bias is not None and bias.requires_grad:
            dbias = torch.zeros_like(bias, dtype=accumulation_dtype(bias.dtype))
        head = head_type(x.shape[0], weight)(
            HeadInputs(x, weight, bias), targets != ignore_index, plan.tokens_at_a_time, needs, plan.order
        )
        for i, chunk in enumerate(head.chunks):
            logits = head.logits(chunk)
            walk = functools.partial(
                compute_rows_, logits, targets, terms=terms, ignore_index=ignore_index, order=head.order,
                count=head.count(chunk), first_row=chunk.start, normalizer=normalizer, triton=triton,
            )  # fmt: skip
            walk(results)
            rows: Any = plan.rows[i] if plan.rows else chunk if head.order is None else head.order[chunk]
            part, gradients = _differentiated(
                formula,
                of_rows(results.logp)[rows],
                None if entropy is None else of_rows(entropy)[rows],
                [None if c is None else c[rows] for c in constants],
            )
            value += part
            for of_result, gradient in zip((upstream.logp, upstream.entropy), gradients, strict=False):
                assert of_result is not None
                of_rows(of_result)[rows] = gradient
            walk(known, upstream, out=logits, dbias=dbias)
            head.accumulate_gradient(chunk, logits)
        dhidden, dweight, _ = head.gradients()
    value = attach_gradients(value, (x, dhidden), (weight, dweight), *([] if dbias is None else [(bias, dbias)]))
    return Evaluated(value, results.logp.view(shape), None if entropy is None else entropy.view(shape))
