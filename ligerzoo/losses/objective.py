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
        logits_budget: MiB of logits that exist at a time; None for `set_logits_budget`'s.
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
            the b rows are: of pairs the first rows of all come first. For tokens b is their number, and T is 1.
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


def evaluate(
    hidden: Tensor, weight: Tensor, target: Tensor, objective: Objective, head: HeadOptions, temperature: float = 1.0
) -> Evaluated:  # fmt: skip
    """The value of an objective over (B, T, H) hidden states, a (V, H) head and (B, T) targets.

    Args:
        temperature: divides the logits, after the softcap.

    Raises:
        ValueError: shapes, dtypes or targets do not fit, as in `ligerzoo.kernels.token_logps`.
    """
    objective = objective._replace(constants=[None if c is None else c.detach() for c in objective.constants])
    wants_gradients = any(t is not None and t.requires_grad for t in (hidden, weight, head.get("bias")))
    traced = torch.compiler.is_compiling() or hidden.is_meta
    if wants_gradients and torch.is_grad_enabled() and not traced:
        evaluated = _in_one_sweep(hidden, weight, target, objective, temperature, **head)
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
    value = objective.formula(logps, entropy, *objective.constants)
    return Evaluated(value, logps.detach(), None if entropy is None else entropy.detach())


def _chunks_of_groups(
    n_rows: int, length: int, group: Group, tokens_at_a_time: int, device: torch.device
) -> list[Tensor]:  # fmt: skip
    """The rows of each chunk, as many whole groups as fit; none if not even one does."""
    members = 2 if group == "pair" else 1
    groups_at_a_time = min(tokens_at_a_time // (members * length), n_rows // members)
    if groups_at_a_time == 0:
        return []
    rows = torch.arange(n_rows, device=device).view(members, -1)
    starts = range(0, n_rows // members, groups_at_a_time)
    return [rows[:, start : start + groups_at_a_time].reshape(-1) for start in starts]


def _in_one_sweep(
    hidden: Tensor, weight: Tensor, target: Tensor, objective: Objective, temperature: float, *,
    bias: Tensor | None = None, ignore_index: int = -100, softcap: float | None = None, logit_scale: float = 1.0,
    logits_budget: int | None = None, backend: Backend = "auto",
) -> Evaluated | None:  # fmt: skip
    """The value with its gradients; None if the logits of a group do not fit the budget. (Nor for fp16, in which the
    gradients of single tokens may vanish unless the loss's scale multiplies them, and only backward knows that.)"""
    terms = Terms(logit_scale, softcap, temperature)
    name = "a loss over log-probabilities"
    x, weight, target, bias = prepared(name, hidden, weight, target, bias, ignore_index, terms)
    formula, constants, group, _ = objective
    (n_rows, length), n_classes, size = target.shape, weight.shape[0], x.element_size()
    if x.dtype == torch.float16 or target.numel() == 0:
        return None
    if group == "token":
        rows_of_chunks, order, tokens_at_a_time = [], None, rows_per_chunk(x, n_classes, size, logits_budget)
        length, constants = 1, [None if c is None else c.reshape(-1, 1) for c in constants]
    else:
        most = most_rows(n_classes, size, logits_budget)
        rows_of_chunks = _chunks_of_groups(n_rows, length, group, most, x.device)
        if not rows_of_chunks:
            return None
        order = (torch.cat(rows_of_chunks)[:, None] * length + torch.arange(length, device=x.device)).reshape(-1)
        tokens_at_a_time = rows_of_chunks[0].shape[0] * length

    targets, triton = target.reshape(-1), uses_triton(x, weight, backend=backend)
    needs = Needs(*(t is not None and t.requires_grad for t in (x, weight, bias)))
    with torch.no_grad(), torch.cuda.device(x.device if x.is_cuda else -1):
        results = empty_results(targets, wide(x.dtype), statistics=objective.entropy)
        normalizer = results.logp.new_empty((2, targets.shape[0]))
        of_logp, of_entropy = torch.zeros_like(results.logp), torch.zeros_like(results.entropy)
        upstream = Upstream(logp=of_logp, entropy=of_entropy if objective.entropy else None)
        known = None if triton and not objective.entropy else results  # what the normalizer alone cannot tell
        logps, entropy = (t.view(-1, length) for t in (results.logp, results.entropy))
        total = logps.new_zeros(())
        head = head_type(x.shape[0], weight)(x, weight, targets != ignore_index, tokens_at_a_time, needs, order=order)
        for i, chunk in enumerate(head.chunks):
            logits = head.logits(chunk)
            walk = functools.partial(
                walk_rows_, logits, targets, terms=terms, ignore_index=ignore_index, bias=bias, order=head.order,
                count=head.count(chunk), first_row=chunk.start, normalizer=normalizer, triton=triton,
            )  # fmt: skip
            walk(results)
            rows: Any = chunk if group == "token" else rows_of_chunks[i]
            if group == "token" and head.order is not None:
                rows = head.order[chunk]
            with torch.enable_grad():
                seen = (logps, entropy) if objective.entropy else (logps,)
                leaves = [t[rows].clone().requires_grad_() for t in seen]
                part = formula(
                    leaves[0],
                    leaves[1] if objective.entropy else None,
                    *(None if c is None else c[rows] for c in constants),
                )
                gradients = torch.autograd.grad(part, leaves)
            total += part.detach()
            for of_result, gradient in zip((of_logp, of_entropy), gradients, strict=False):
                of_result.view(-1, length)[rows] = gradient
            walk(known, upstream, out=logits)
            head.take_gradient(chunk, logits)
        dhidden, dweight, dbias = head.gradients()
    value = with_gradients(total, (x, dhidden), (weight, dweight), (bias, dbias))
    shape = target.shape
    return Evaluated(value, logps.view(shape), entropy.view(shape) if objective.entropy else None)
