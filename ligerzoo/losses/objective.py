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

Shapes: B rows, T tokens of a row, H features, V classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from ligerzoo.kernels import token_logps, token_statistics
from ligerzoo.kernels.ahead import with_gradients
from ligerzoo.kernels.dispatch import Backend, uses_triton, wide
from ligerzoo.kernels.head import Needs, head_type, most_rows, rows_per_chunk
from ligerzoo.kernels.linear_cross_entropy import prepared
from ligerzoo.kernels.token_loss import Terms, Upstream, empty_results, walk_rows_

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
            logits are made once more, 8MHV operations in place of 6MHV.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference).
    """

    bias: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    logits_budget: int | None
    backend: Backend


class LossOutput(NamedTuple):
    """A loss, and what people log of it.

    Attributes:
        loss: 0-d, fp32 (fp64 for fp64 input).
        metrics: detached tensors by name, 0-d, on the loss's device: reading one makes the host wait.
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
    for unknown in head.keys() - HeadOptions.__annotations__.keys():
        raise TypeError(f"{name}() got an unexpected keyword argument {unknown!r}")


def evaluate(
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, objective: Objective, head: HeadOptions,
    temperature: float = 1.0,
) -> Evaluated:  # fmt: skip
    """The value of an objective over (B, T, H) hidden states, a (V, H) head and (B, T) targets.

    Args:
        name: the loss, which errors are about.
        temperature: divides the logits, after the softcap.

    Raises:
        TypeError: `head` has an option that heads do not have.
        ValueError: shapes, dtypes or targets do not fit, as in `ligerzoo.kernels.token_logps`.
    """
    check_head(name, head)
    objective = objective._replace(constants=[None if c is None else c.detach() for c in objective.constants])
    wants_gradients = any(t is not None and t.requires_grad for t in (hidden, weight, head.get("bias")))
    traced = torch.compiler.is_compiling() or hidden.is_meta
    if wants_gradients and torch.is_grad_enabled() and not traced:
        evaluated = _in_one_sweep(name, hidden, weight, target, objective, temperature, **head)
        if evaluated is not None:
            return evaluated
    return by_autograd(hidden, weight, target, objective, head, temperature)


def by_autograd(
    hidden: Tensor, weight: Tensor, target: Tensor, objective: Objective, head: HeadOptions, temperature: float = 1.0
) -> Evaluated:  # fmt: skip
    """The same by autograd alone: the specification."""
    entropy = None
    if objective.entropy:
        statistics = token_statistics(hidden, weight, target, temperature=temperature, **head)
        logps, entropy = statistics.logps, statistics.entropy
    else:
        logps = token_logps(hidden, weight, target, temperature=temperature, **head)
    value = objective.formula(logps, entropy, *objective.constants).to(logps.dtype)  # whatever the constants' is
    return Evaluated(value, logps.detach(), None if entropy is None else entropy.detach())


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
    at_a_time = min(most_rows(n_classes, size, budget) // (members * length), n_groups)
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
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, objective: Objective, temperature: float, *,
    bias: Tensor | None = None, ignore_index: int = -100, softcap: float | None = None, logit_scale: float = 1.0,
    logits_budget: int | None = None, backend: Backend = "auto",
) -> Evaluated | None:  # fmt: skip
    """The value with its gradients; None if the logits of a group do not fit the budget. (Nor for fp16, in which the
    gradients of single tokens may vanish unless the loss's scale multiplies them, and only backward knows that.)"""
    terms, formula, shape = Terms(logit_scale, softcap, temperature), objective.formula, target.shape
    x, weight, target, bias = prepared(name, hidden, weight, target, bias, ignore_index, terms)
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
        results = empty_results(targets, wide(x.dtype), statistics=objective.entropy)
        entropy = results.entropy if objective.entropy else None
        upstream = Upstream(
            logp=torch.zeros_like(results.logp), entropy=None if entropy is None else torch.zeros_like(entropy)
        )
        normalizer = results.logp.new_empty((2, targets.shape[0]))
        known = None if triton and entropy is None else results  # what the normalizer alone cannot tell
        value = results.logp.new_zeros(())
        dbias = None
        if bias is not None and bias.requires_grad:
            dbias = torch.zeros_like(bias, dtype=wide(bias.dtype))
        head = head_type(x.shape[0], weight)(
            x, weight, targets != ignore_index, plan.tokens_at_a_time, needs, bias, plan.order
        )
        for i, chunk in enumerate(head.chunks):
            logits = head.logits(chunk)
            walk = functools.partial(
                walk_rows_, logits, targets, terms=terms, ignore_index=ignore_index, order=head.order,
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
            walk(known, upstream, out=logits, sums=dbias)
            head.take_gradient(chunk, logits)
        dhidden, dweight, _ = head.gradients()
    value = with_gradients(value, (x, dhidden), (weight, dweight), *([] if dbias is None else [(bias, dbias)]))
    return Evaluated(value, results.logp.view(shape), None if entropy is None else entropy.view(shape))
