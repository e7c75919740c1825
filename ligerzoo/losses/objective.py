"""Losses over log-probabilities, differentiated chunk by chunk while the logits exist.

A post-training loss is a sum over groups of tokens: single tokens (GRPO), sequences (KTO, GSPO), or pairs of sequences
(DPO). The loss of a group is any function of the log-probabilities of its tokens, and no group depends on another. So
one sweep over the tokens is enough. A sweep visits the tokens chunk by chunk, with whole groups in each chunk. For each
chunk the LM head computes logits; autograd differentiates the loss with respect to the log-probabilities; a kernel
overwrites the logits with their gradient; and the head accumulates the gradients of hidden states and weight:

    logits -> logps -> loss -> d loss / d logps -> dlogits -> dhidden, dweight

This costs 6MHV operations, as a cross entropy does. Plain autograd through `token_logps` costs 8MHV, because backward
computes the logits again. It is the specification, and it runs if the logits of one group exceed the budget, under
torch.compile, and without gradients.

Given logits replace the hidden states, with None for the head's weight. They are never modified; the forward pass
computes their gradient too.

Shapes: B sequences, T tokens per sequence, H features, V classes, M = B T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels import cross_entropy
from ligerzoo.kernels.autograd import under_transform
from ligerzoo.kernels.dispatch import accumulation_dtype, uses_triton
from ligerzoo.kernels.linear_cross_entropy import prepare_inputs, token_results
from ligerzoo.kernels.loss.chunked_head import (
    DenseHead,
    HeadInputs,
    Needs,
    RaggedHead,
    head_type,
    max_rows,
    rows_per_chunk,
)
from ligerzoo.kernels.loss.precomputed_grad import attach_gradients
from ligerzoo.kernels.loss.reduction import as_targets
from ligerzoo.kernels.loss.row_kernel import compute_rows_, zero_results
from ligerzoo.kernels.loss.token_loss import NO_UPSTREAM, RowResults, Upstream, reference
from ligerzoo.losses.options import LogpOptions, LossInputs
from ligerzoo.token_parts import divided_tokens

LossGroup = Literal["token", "sequence", "pair"]
"""What a loss sums over: tokens, sequences, or pairs of sequences b and B/2 + b of a batch."""


class LossOutput(NamedTuple):
    """A loss and its metrics.

    Attributes:
        loss: 0-d, fp32 (fp64 for fp64 input).
        metrics: detached 0-d tensors by name, on the device of the loss; reading one syncs with the device. Each is a
            mean over the sequences, pairs or tokens of this call, even if `num_items` divides the loss. To average over
            microbatches or processes, weight each call by its number of sequences, pairs or tokens.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class GroupObjective(NamedTuple):
    """A loss that is a sum over groups of tokens, as a function of log-probabilities.

    Attributes:
        function: (logps (b, T), entropy (b, T) or None, *constants of these b sequences) -> 0-d, the summed loss of
            their groups, already divided. A chunk of pairs has its first sequences first. For groups of single tokens,
            b counts tokens and T is 1.
        constants: tensors (B, ...) or None that `function` reads; (B, T) for groups of single tokens.
        group: what the loss sums over.
        uses_entropy: whether `function` reads the entropy.
    """

    function: Callable[..., Tensor]
    constants: Sequence[Tensor | None]
    group: LossGroup
    uses_entropy: bool = False


class ObjectiveResult(NamedTuple):
    """A differentiable 0-d loss, and (B, T) log-probabilities and entropies as constants, 0 at ignored tokens.

    `entropy` is None if the objective does not use it.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor | None


def evaluate_objective(inputs: LossInputs, objective: GroupObjective, options: LogpOptions) -> ObjectiveResult:
    """Evaluates an objective, with gradients computed in the forward pass where possible.

    Args:
        inputs: hidden states or logits, weight and targets.
        objective: the loss; gets no gradients for its constants.
        options: those of the LM head.

    Raises:
        ValueError: shapes, dtypes or targets are invalid, as in `ligerzoo.kernels.token_logps`.
    """
    hidden, weight = inputs.hidden, inputs.weight
    objective = objective._replace(constants=[None if c is None else c.detach() for c in objective.constants])
    needs_gradient = any(t is not None and t.requires_grad for t in (hidden, weight, options.bias))
    is_traced = torch.compiler.is_compiling() or hidden.is_meta or under_transform()
    if weight is None and not is_traced:
        return _evaluate_given_logits(inputs, objective, options)
    is_whole = divided_tokens(inputs.target.numel()) is None
    if weight is not None and needs_gradient and torch.is_grad_enabled() and is_whole and not is_traced:
        result = _evaluate_in_one_sweep(inputs, weight, objective, options)
        if result is not None:
            return result
    return evaluate_by_autograd(inputs, objective, options)


def evaluate_by_autograd(inputs: LossInputs, objective: GroupObjective, options: LogpOptions) -> ObjectiveResult:
    """Evaluates an objective through plain autograd: the specification of `evaluate_objective`."""
    logps, entropy = token_logps_and_entropy(inputs, options, objective.uses_entropy)
    loss = objective.function(logps, entropy, *objective.constants).to(logps.dtype)  # constants may be fp64
    return ObjectiveResult(loss, logps.detach(), None if entropy is None else entropy.detach())


def token_logps_and_entropy(
    inputs: LossInputs, options: LogpOptions, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns the (B, T) log-probabilities of the targets, and entropies if requested; differentiable."""
    name, hidden, weight, target = inputs
    shape = target.shape
    if weight is not None:
        if (parts := divided_tokens(target.numel())) is not None:
            hidden = parts.own(hidden.reshape(1, -1, hidden.shape[-1]))
            target = parts.own(target.reshape(1, -1), fill=options.ignore_index)
        head, budget = HeadInputs(hidden, weight, options.bias), options.logits_budget
        results = token_results(name, head, target, options.terms, budget, options.backend, statistics=with_entropy)
    else:
        parts, target = None, as_targets(name, target, hidden.shape[-1], options.ignore_index)
        if not with_entropy:
            temperature = options.temperature
            return -cross_entropy(hidden, target, temperature=temperature, reduction="none", **options.of_logits), None
        logits = hidden.reshape(-1, hidden.shape[-1])
        results = reference(logits, target.reshape(-1), options.terms)
    logps, entropy = results.logp, results.entropy if with_entropy else None
    if parts is not None:
        logps, entropy = parts.gather(logps.view(1, -1)), None if entropy is None else parts.gather(entropy.view(1, -1))
    return logps.view(shape), None if entropy is None else entropy.view(shape)


def _evaluate_given_logits(inputs: LossInputs, objective: GroupObjective, options: LogpOptions) -> ObjectiveResult:
    """Evaluates an objective over given logits: one pass for log-probabilities, a second one for their gradient."""
    name, logits, _, target = inputs
    shape, x = target.shape, logits.reshape(-1, logits.shape[-1])
    x = x if x.stride(-1) == 1 else x.contiguous()
    targets = as_targets(name, target, x.shape[-1], options.ignore_index).reshape(-1)
    needs_gradient = logits.requires_grad and torch.is_grad_enabled()
    with torch.no_grad(), torch.cuda.device(x.device if x.is_cuda else -1):
        results = zero_results(targets, accumulation_dtype(x.dtype), statistics=objective.uses_entropy)
        normalizer, triton = results.logp.new_empty((2, targets.shape[0])), uses_triton(x, backend=options.backend)
        shared: dict[str, Any] = {"terms": options.terms, "normalizer": normalizer, "triton": triton}
        compute_rows_(x, targets, results, NO_UPSTREAM, **shared)
        logps, entropy = results.logp.view(shape), results.entropy.view(shape) if objective.uses_entropy else None
        if not needs_gradient:
            loss = objective.function(logps, entropy, *objective.constants).to(logps.dtype)
            return ObjectiveResult(loss, logps, entropy)
        loss, (dlogps, *dentropy) = _loss_and_gradients(objective.function, logps, entropy, objective.constants)
        upstream = Upstream(logp=dlogps.reshape(-1), entropy=dentropy[0].reshape(-1) if dentropy else None)
        # fp32 for fp16: gradients of single tokens may underflow before backward multiplies them by the loss scale.
        dlogits = torch.empty_like(x, dtype=accumulation_dtype(x.dtype) if x.dtype == torch.float16 else x.dtype)
        compute_rows_(x, targets, None if triton and entropy is None else results, upstream, out=dlogits, **shared)
    loss = attach_gradients(loss.to(logps.dtype), (logits, dlogits.view(logits.shape)))
    return ObjectiveResult(loss, logps, entropy)


class _ChunkPlan(NamedTuple):
    """How a sweep divides the tokens of a batch into chunks.

    Attributes:
        length: tokens per sequence that the objective's function gets; 1 for groups of single tokens.
        tokens_per_chunk: the most tokens of a chunk.
        sequences: the sequences of each chunk; None for groups of single tokens, where chunks hold any tokens.
        order: (M,), the tokens in the order of the chunks; None if the head may choose the order.
    """

    length: int
    tokens_per_chunk: int
    sequences: list[Tensor] | None = None
    order: Tensor | None = None


def _plan_chunks(x: Tensor, n_classes: int, target: Tensor, group: LossGroup, budget: int | None) -> _ChunkPlan | None:
    """Plans chunks of whole groups whose logits fit the budget; None if the logits of one group exceed it."""
    size = x.element_size()
    if group == "token":
        return _ChunkPlan(1, rows_per_chunk(x, n_classes, size, budget))
    (n_sequences, length), group_size = target.shape, 2 if group == "pair" else 1
    n_groups = n_sequences // group_size
    groups_per_chunk = min(max_rows(n_classes, size, budget) // (group_size * length), n_groups)
    if groups_per_chunk == 0:
        return None
    grouped = torch.arange(n_sequences, device=x.device).view(group_size, n_groups)
    sequences = [
        grouped[:, start : start + groups_per_chunk].reshape(-1) for start in range(0, n_groups, groups_per_chunk)
    ]
    order = torch.cat(sequences)[:, None] * length + torch.arange(length, device=x.device)
    return _ChunkPlan(length, groups_per_chunk * group_size * length, sequences, order.reshape(-1))


def _loss_and_gradients(
    function: Callable[..., Tensor], logps: Tensor, entropy: Tensor | None, constants: Sequence[Tensor | None]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the loss, and its gradients with respect to log-probabilities and entropies."""
    with torch.enable_grad():
        leaves = [t.clone().requires_grad_() for t in (logps, entropy) if t is not None]
        loss = function(leaves[0], None if entropy is None else leaves[1], *constants)
        return loss.detach(), torch.autograd.grad(loss, leaves)


class _Sweep(NamedTuple):
    """What the chunks of a sweep share.

    Attributes:
        objective: the loss; constants of single tokens are (M, 1).
        plan: the chunks.
        targets: (M,).
        head: computes logits, and accumulates the gradients of hidden states and weight.
        results: of the M tokens.
        upstream: gradients of the loss with respect to log-probabilities and entropies.
        dbias: accumulates the gradient of the bias; None if not needed.
        options: further arguments of `compute_rows_`.
    """

    objective: GroupObjective
    plan: _ChunkPlan
    targets: Tensor
    head: DenseHead | RaggedHead
    results: RowResults
    upstream: Upstream
    dbias: Tensor | None
    options: dict[str, Any]

    def process(self, i: int) -> Tensor:
        """Computes the results and gradients of chunk i; returns its loss."""
        objective, plan, targets, head, results, upstream, dbias, _ = self
        chunk = head.chunks[i]
        logits, options = head.logits(chunk), {**self.options, "rows": head.rows(chunk)}
        compute_rows_(logits, targets, results, NO_UPSTREAM, **options)
        # The sequences of this chunk, or its tokens for groups of single tokens.
        index: Any = plan.sequences[i] if plan.sequences else head.tokens(chunk)
        loss, gradients = _loss_and_gradients(
            objective.function,
            results.logp.view(-1, plan.length)[index],
            results.entropy.view(-1, plan.length)[index] if objective.uses_entropy else None,
            [None if c is None else c[index] for c in objective.constants],
        )
        for buffer, gradient in zip((upstream.logp, upstream.entropy), gradients, strict=False):
            assert buffer is not None
            buffer.view(-1, plan.length)[index] = gradient
        # The normalizer is enough for the gradients of log-probabilities.
        needed = None if options["triton"] and not objective.uses_entropy else results
        compute_rows_(logits, targets, needed, upstream, out=logits, dbias=dbias, **options)
        head.accumulate_gradient(chunk, logits)
        return loss


def _evaluate_in_one_sweep(
    inputs: LossInputs, weight: Tensor, objective: GroupObjective, options: LogpOptions
) -> ObjectiveResult | None:
    """Evaluates an objective with its gradients; returns None if the logits of one group exceed the budget.

    Also returns None for fp16: gradients of single tokens may underflow unless they include the loss scale, which only
    backward knows.
    """
    name, hidden, _, target = inputs
    terms, shape = options.terms, target.shape
    (x, weight, bias), target = prepare_inputs(name, HeadInputs(hidden, weight, options.bias), target, terms)
    if x.dtype == torch.float16 or target.numel() == 0:
        return None
    plan = _plan_chunks(x, weight.shape[0], target, objective.group, options.logits_budget)
    if plan is None:
        return None
    if plan.sequences is None:
        constants = [None if c is None else c.reshape(-1, 1) for c in objective.constants]
        objective = objective._replace(constants=constants)
    targets, triton = target.reshape(-1), uses_triton(x, weight, backend=options.backend)
    with torch.no_grad(), torch.cuda.device(x.device if x.is_cuda else -1):
        results = zero_results(targets, accumulation_dtype(x.dtype), statistics=objective.uses_entropy)
        entropy = results.entropy if objective.uses_entropy else None
        upstream = Upstream(
            logp=torch.zeros_like(results.logp), entropy=None if entropy is None else torch.zeros_like(entropy)
        )
        normalizer = results.logp.new_empty((2, targets.shape[0]))
        dbias = None
        if bias is not None and bias.requires_grad:
            dbias = torch.zeros_like(bias, dtype=accumulation_dtype(bias.dtype))
        needs = Needs(x.requires_grad, weight.requires_grad)
        head = head_type(x.shape[0], weight)(
            HeadInputs(x, weight, bias), targets != terms.ignore_index, plan.tokens_per_chunk, needs, plan.order
        )
        row_options = {"terms": terms, "normalizer": normalizer, "triton": triton}
        sweep = _Sweep(objective, plan, targets, head, results, upstream, dbias, row_options)
        loss = results.logp.new_zeros(())
        for i in range(len(head.chunks)):
            loss += sweep.process(i)
        dhidden, dweight, _ = head.gradients()
    loss = attach_gradients(loss, (x, dhidden), (weight, dweight), *([] if dbias is None else [(bias, dbias)]))
    return ObjectiveResult(loss, results.logp.view(shape), None if entropy is None else entropy.view(shape))
