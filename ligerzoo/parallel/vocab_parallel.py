"""A loss head whose vocabulary is sharded over several processes.

`vocab_parallel_linear_cross_entropy` is `linear_cross_entropy` for a head whose rows are sharded over a process group,
as in Megatron-LM (Shoeybi et al. 2019, section 3) and `torch.distributed.tensor`. Every process has all hidden states
and targets, and computes the logits of its classes. With l_r the logsumexp of process r's logits,

    logsumexp = log sum_r exp(l_r),   loss = logsumexp - x_y,   and  d logsumexp / d l_r = exp(l_r - logsumexp).

So the processes exchange a few numbers per token, and then each overwrites its own logits with their gradient. dhidden
is summed over the processes. dweight is sharded like the weight.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, cdiv, uses_triton
from ligerzoo.kernels.linear_cross_entropy import SweepOptions, linear_cross_entropy_sweep
from ligerzoo.kernels.loss.chunked_head import HeadInputs, Needs, head_type, rows_per_chunk
from ligerzoo.kernels.loss.precomputed_grad import attach_gradients, precomputes_gradients
from ligerzoo.kernels.loss.reduction import (
    Reduction,
    as_targets,
    check_target_dtype,
    check_terms,
    denominator,
    reduce_losses,
)
from ligerzoo.kernels.loss.row_kernel import compute_rows_, zero_results
from ligerzoo.kernels.loss.token_loss import NO_UPSTREAM, Terms, Upstream

_IGNORED = -100  # in a process's own targets; `ignore_index` may be one of its classes


class _ShardOptions(NamedTuple):
    """The options of a sweep over one process's shard of the classes.

    Attributes:
        group: the processes; None for all.
        first_class: the shard's first class.
        is_padding: whether all classes of the shard are padding.
        rows: rows per chunk.
        terms: the transform and the loss.
        triton: whether to use Triton or plain torch for the rows.
    """

    group: dist.ProcessGroup | None
    first_class: int
    is_padding: bool
    rows: int
    terms: Terms
    triton: bool


def _sweep(
    hidden: Tensor, weight: Tensor, target: Tensor, grad_loss: Tensor | None, needs: Needs, options: _ShardOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the losses of all rows and, for upstream gradients, dhidden and dweight."""
    group, first_class, is_padding, rows, terms, triton = options
    if hidden.is_meta:
        return _counted_sweep(hidden, weight, target, needs, options)
    valid = target != terms.ignore_index
    in_shard = (target >= first_class) & (target < first_class + weight.shape[0]) & valid & (not is_padding)
    # If another process has the target, class 0 replaces it: only the row's logsumexp is used.
    own_target = torch.where(valid, torch.where(in_shard, target - first_class, 0), _IGNORED)
    losses = torch.zeros_like(target, dtype=accumulation_dtype(hidden.dtype))
    own = zero_results(target, losses.dtype, statistics=False)
    grad_logp, grad_logsumexp = torch.zeros_like(losses), torch.zeros_like(losses)
    head = head_type(hidden.shape[0], weight)(HeadInputs(hidden, weight), valid, rows, needs)
    own_terms = terms._replace(z_loss=0.0, ignore_index=_IGNORED)
    compute = functools.partial(compute_rows_, target=own_target, results=own, terms=own_terms, triton=triton)
    for chunk in head.chunks:
        logits = head.logits(chunk)
        tokens = head.tokens(chunk)
        compute_chunk = functools.partial(compute, logits, rows=head.rows(chunk))
        compute_chunk(upstream=NO_UPSTREAM)
        own_logsumexp, own_logp, is_own = own.logsumexp[tokens], own.logp[tokens], in_shard[tokens]
        if is_padding:
            own_logsumexp = torch.full_like(own_logsumexp, -torch.inf)
        largest = own_logsumexp.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        x_target = torch.where(is_own, own_logp + own_logsumexp, 0.0)
        shares = torch.stack([(own_logsumexp - largest).exp(), x_target, is_own.to(x_target.dtype)])
        dist.all_reduce(shares, dist.ReduceOp.SUM, group)
        logsumexp = largest + shares[0].log()
        x_target = torch.where(shares[2] > 0, shares[1], torch.nan)  # the target is outside the vocabulary
        losses[tokens] = torch.where(valid[tokens], logsumexp - x_target + terms.z_loss * logsumexp.square(), 0.0)
        if grad_loss is not None and any(needs):
            # If the shard has the target, x_y = logp + l_r, so l_r gets the gradients of both x_y and logsumexp.
            g = grad_loss[tokens]
            grad_x_target = torch.where(is_own, -g, 0.0)
            grad_logp[tokens] = grad_x_target
            grad_logsumexp[tokens] = (
                g * (1 + 2 * terms.z_loss * logsumexp) * (own_logsumexp - logsumexp).exp() + grad_x_target
            )
            compute_chunk(upstream=Upstream(logp=grad_logp, logsumexp=grad_logsumexp), out=logits)
            head.accumulate_gradient(chunk, logits)
    dhidden, dweight, _ = head.gradients()
    if needs.hidden and grad_loss is not None:
        dist.all_reduce(dhidden, dist.ReduceOp.SUM, group)
    return losses, dhidden, dweight


def _counted_sweep(
    hidden: Tensor, weight: Tensor, target: Tensor, needs: Needs, options: _ShardOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """`_sweep` on meta: its memory, its products and its communication."""
    for first in range(0, len(hidden), options.rows):
        rows = min(options.rows, len(hidden) - first)
        numbers = hidden.new_empty((3, rows), dtype=accumulation_dtype(hidden.dtype))
        dist.all_reduce(numbers[0], dist.ReduceOp.MAX, options.group)
        dist.all_reduce(numbers, dist.ReduceOp.SUM, options.group)
    head, own = HeadInputs(hidden, weight), SweepOptions(None, options.triton, statistics=False)
    results = linear_cross_entropy_sweep(head, target, None, NO_UPSTREAM, options.terms, own, needs)
    if needs.hidden:
        dist.all_reduce(results.dhidden, dist.ReduceOp.SUM, options.group)
    return results.loss, results.dhidden, results.dweight


def _summed_loss(hidden: Tensor, weight: Tensor, target: Tensor, options: _ShardOptions) -> Tensor:
    """Returns the sum of the losses. One sweep computes it and its gradients, as in `linear_cross_entropy`."""
    needs = Needs(hidden.requires_grad, weight.requires_grad)
    with torch.no_grad():
        ones = hidden.new_ones((), dtype=accumulation_dtype(hidden.dtype)).expand(target.shape)
        losses, dhidden, dweight = _sweep(hidden, weight, target, ones, needs, options)
    return attach_gradients(losses.sum(), (hidden, dhidden), (weight, dweight))


class _TokenLosses(FusedFunction):
    """The loss of each token. Backward sweeps again, with the tokens' upstream gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, options: _ShardOptions) -> Tensor:
        ctx.save_for_backward(hidden, weight, target)
        ctx.options = options
        return _sweep(hidden, weight, target, None, Needs(False, False), options)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad[:2])
        _, dhidden, dweight = _sweep(hidden, weight, target, upstream.contiguous(), needs, ctx.options)
        return dhidden if needs.hidden else None, dweight.to(weight.dtype) if needs.weight else None, None, None


@functools.cache
def _check_equal_shards(name: str, shard_size: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Returns the number of rows per process. Communicates once per size; raises ValueError in all processes if their
    numbers differ."""
    sizes = torch.tensor([shard_size, -shard_size], device=device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX, group)
    most, least = int(sizes[0]), -int(sizes[1])
    if most != least:
        what = f"the processes have {least} to {most} rows of weight"
        expected = "the same number; pad the last shards and pass vocab_size"
        raise LigerzooError(what, where=name, expected=expected)
    return shard_size


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    logits_budget: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`linear_cross_entropy` with the classes sharded over the processes of a group.

    All processes must call it, with the same hidden states and targets. It supports no bias, label smoothing, class or
    token weights, or statistics.

    Args:
        hidden: (..., H), or a `DTensor` replicated over the mesh.
        weight: (V / processes, H), this process's shard of the head: rank r has the r-th of equal parts. Or a `DTensor`
            of (V, H) with `Shard(0)` on a one-dimensional mesh, whose group is then used.
        target: (...) int64, each in [0, V) or `ignore_index`.
        group: the processes; None for all.
        vocab_size: the number of classes without padding. Classes from this one on affect no loss and no gradient. None
            if there is no padding.
        ignore_index: the target of ignored tokens.
        z_loss: adds `z_loss * logsumexp(logits)^2` to each token's loss.
        softcap: c, for logits `c tanh(logits / c)`.
        logit_scale: multiplies the logits, before the softcap.
        temperature: divides the logits, after the softcap.
        reduction: "mean" over the valid tokens, "sum", or "none" for one loss per token.
        num_items: with "mean", divides the sum instead of the number of valid tokens; see `linear_cross_entropy`.
        logits_budget: MiB of this process's logits that exist at a time; see `linear_cross_entropy`.
        backend: "auto" (Triton on a GPU), "triton" or "torch" (the reference, in chunks too).

    Returns:
        The loss in fp32 (fp64 for fp64 input), the same on all processes: 0-d, or of the targets' shape for "none".

    Raises:
        ValueError: a shape, a dtype or a placement is invalid, or (on a CPU, or if LIGERZOO_DEBUG=1) a target is
            outside [0, V).
    """
    name = "vocab_parallel_linear_cross_entropy"
    if isinstance(hidden, DTensor):
        hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
    if isinstance(weight, DTensor):
        if weight.placements != (Shard(0),):
            raise ValueError(f"{name}: weight has placements {weight.placements}; expected (Shard(0),)")
        n_classes, group = weight.shape[0], weight.device_mesh.get_group()
        shard_size = cdiv(n_classes, dist.get_world_size(group))
        weight = weight.to_local()
    else:
        shard_size = _check_equal_shards(name, weight.shape[0], weight.device, group)
        n_classes = shard_size * dist.get_world_size(group)
    if vocab_size is not None:
        if vocab_size > n_classes:
            expected = f"at most {n_classes}, the weight's rows in all processes"
            raise LigerzooError(where=f"{name}: vocab_size", got=vocab_size, expected=expected)
        n_classes = vocab_size
    hidden, weight = autocast(hidden, weight)
    if hidden.shape[:-1] != target.shape or hidden.shape[-1:] != weight.shape[1:] or hidden.dtype != weight.dtype:
        what = (
            f"hidden {tuple(hidden.shape)} {hidden.dtype}, this process's weight {tuple(weight.shape)} {weight.dtype}"
        )
        expected = "(..., H), (V / processes, H) of one dtype, and (...)"
        raise LigerzooError(f"{what}, target {tuple(target.shape)}", where=name, expected=expected)
    terms = Terms(logit_scale, softcap, temperature, z_loss=z_loss, ignore_index=ignore_index)
    check_terms(name, terms)
    check_target_dtype(name, target)
    target = as_targets(name, target, n_classes, ignore_index)
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    first_class = dist.get_rank(group) * shard_size
    # All processes must process tokens in the same order, so all must choose the same head (see `head_type`): keep at
    # least one row, and align its memory.
    own_weight = weight[: max(1, n_classes - first_class)] if weight.shape[0] else F.pad(weight, (0, 0, 0, 1))
    if own_weight.storage_offset() % 8:
        own_weight = own_weight.clone()
    options = _ShardOptions(
        group,
        first_class,
        first_class >= n_classes,
        rows_per_chunk(rows, shard_size, rows.element_size(), logits_budget),
        terms,
        uses_triton(rows, weight, backend=backend),
    )
    if reduction == "none" or not precomputes_gradients():
        losses: Tensor = _TokenLosses.apply(rows, own_weight, targets, options)
        losses = losses.view(target.shape)
    else:
        losses = _summed_loss(rows, own_weight, targets, options)
    return reduce_losses(losses, denominator(name, losses.dtype, target, reduction, ignore_index, num_items))
