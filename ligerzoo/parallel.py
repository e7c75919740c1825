"""Operations over tensors that several processes hold together.

`vocab_parallel_linear_cross_entropy` is `linear_cross_entropy` for a head whose rows are spread over a process group,
as Megatron-LM's (Shoeybi et al. 2019, section 3) and `torch.distributed.tensor` spread them. Every process has all
hidden states and targets, and the logits of its own classes. With l_r the logsumexp of process r's logits,

    logsumexp = log sum_r exp(l_r),   loss = logsumexp - x_y,   and  d logsumexp / d l_r = exp(l_r - logsumexp),

so two numbers a token travel, and every process then turns its own logits into their gradient in place. dhidden is
summed over the processes; dweight stays where its rows are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, cdiv, once_differentiable, uses_triton
from ligerzoo.kernels.loss.chunked_head import HeadInputs, Needs, head_type, rows_per_chunk
from ligerzoo.kernels.loss.precomputed_grad import attach_gradients
from ligerzoo.kernels.loss.reduction import Reduction, as_targets, check_terms, denominator, reduce_losses
from ligerzoo.kernels.loss.row_kernel import compute_rows_, zero_results
from ligerzoo.kernels.loss.token_loss import Terms, Upstream

_IGNORED = -100  # among a process's own targets, where any number that is not negative may be a class


class _Options(NamedTuple):
    group: dist.ProcessGroup | None
    first_class: int
    is_padding: bool
    rows: int
    terms: Terms
    ignore_index: int
    triton: bool


def _sweep(
    hidden: Tensor, weight: Tensor, target: Tensor, grad_loss: Tensor | None, needs: Needs, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of all rows and, for an upstream gradient, dhidden and dweight."""
    group, first_class, is_padding, rows, terms, ignore_index, triton = options
    valid = target != ignore_index
    in_shard = (target >= first_class) & (target < first_class + weight.shape[0]) & valid & (not is_padding)
    # A row whose target another process has is here a row of class 0, of which only the logsumexp is used.
    own_target = torch.where(valid, torch.where(in_shard, target - first_class, 0), _IGNORED)
    losses = torch.zeros_like(target, dtype=accumulation_dtype(hidden.dtype))
    own = zero_results(target, losses.dtype, statistics=False)
    grad_logp, grad_logsumexp = torch.zeros_like(losses), torch.zeros_like(losses)
    head = head_type(hidden.shape[0], weight)(HeadInputs(hidden, weight), valid, rows, needs)
    walk = functools.partial(
        compute_rows_, target=own_target, results=own, terms=terms._replace(z_loss=0.0), ignore_index=_IGNORED,
        order=head.order, triton=triton,
    )  # fmt: skip
    for part in head.chunks:
        logits = head.logits(part)
        chunk: Any = part if head.order is None else head.order[part]
        walk_part = functools.partial(walk, logits, first_row=part.start, count=head.count(part))
        walk_part()
        own_logsumexp, own_logp, in_shard_chunk = own.logsumexp[chunk], own.logp[chunk], in_shard[chunk]
        if is_padding:
            own_logsumexp = torch.full_like(own_logsumexp, -torch.inf)
        largest = own_logsumexp.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        x_target = torch.where(in_shard_chunk, own_logp + own_logsumexp, 0.0)
        shares = torch.stack([(own_logsumexp - largest).exp(), x_target, in_shard_chunk.to(x_target.dtype)])
        dist.all_reduce(shares, dist.ReduceOp.SUM, group)
        logsumexp = largest + shares[0].log()
        x_target = torch.where(shares[2] > 0, shares[1], torch.nan)  # a target that nobody has is no class
        losses[chunk] = torch.where(valid[chunk], logsumexp - x_target + terms.z_loss * logsumexp.square(), 0.0)
        if grad_loss is not None and any(needs):
            # x_y = logp + l_r where the target is here, so that l_r has the two of them to answer for.
            g = grad_loss[chunk]
            grad_x_target = torch.where(in_shard_chunk, -g, 0.0)
            grad_logp[chunk] = grad_x_target
            grad_logsumexp[chunk] = (
                g * (1 + 2 * terms.z_loss * logsumexp) * (own_logsumexp - logsumexp).exp() + grad_x_target
            )
            walk_part(upstream=Upstream(logp=grad_logp, logsumexp=grad_logsumexp), out=logits)
            head.accumulate_gradient(part, logits)
    dhidden, dweight, _ = head.gradients()
    if needs.hidden and grad_loss is not None:
        dist.all_reduce(dhidden, dist.ReduceOp.SUM, group)
    return losses, dhidden, dweight


def _summed_loss(hidden: Tensor, weight: Tensor, target: Tensor, options: _Options) -> Tensor:
    """Gradients are made in this one sweep, as in `linear_cross_entropy`."""
    needs = Needs(hidden.requires_grad, weight.requires_grad)
    with torch.no_grad():
        ones = hidden.new_ones((), dtype=accumulation_dtype(hidden.dtype)).expand(target.shape)
        losses, dhidden, dweight = _sweep(hidden, weight, target, ones, needs, options)
    return attach_gradients(losses.sum(), (hidden, dhidden), (weight, dweight))


class _TokenLosses(torch.autograd.Function):
    """Backward sweeps again, with the upstream gradient of each token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, options: _Options) -> Tensor:
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
def _equal_part(name: str, part: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """How many rows each process has; asks the others, once. ValueError on all of them if they differ."""
    sizes = torch.tensor([part, -part], device=device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX, group)
    most, least = int(sizes[0]), -int(sizes[1])
    if most != least:
        raise ValueError(
            f"{name}: the processes have {least} to {most} rows of weight; expected equal parts: "
            "pad the last ones and say vocab_size"
        )
    return part


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
    """`linear_cross_entropy` with the classes spread over the processes of a group.

    To be called by all processes alike, with the same hidden states and targets. It has no bias, smoothing, weights or
    statistics.

    Args:
        hidden: (..., H), or a `DTensor` replicated over the mesh.
        weight: (V / processes, H), this process's classes: rank r has the r-th of as many equal parts. Or a `DTensor`
            of (V, H), sharded over its rows on a one-dimensional mesh, whose group is then used.
        target: (...) int64 in all of the vocabulary, or `ignore_index`.
        group: the processes; None for all.
        vocab_size: classes from this one on are padding, which no logit, loss or gradient knows of; None for none.
        logits_budget: MiB of this process's logits that exist at a time; see `linear_cross_entropy` for this and the
            other arguments.

    Returns:
        fp32 (fp64 for fp64 input), the same on all processes: 0-d, or of the targets' shape for "none".

    Raises:
        ValueError: shapes, dtypes or placements do not fit, or (on a CPU, or when LIGERZOO_DEBUG=1) a target is no
            class.
    """
    name = "vocab_parallel_linear_cross_entropy"
    if isinstance(hidden, DTensor):
        hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
    if isinstance(weight, DTensor):
        if weight.placements != (Shard(0),):
            raise ValueError(f"{name}: weight is placed {weight.placements}; expected (Shard(0),)")
        n_classes, group = weight.shape[0], weight.device_mesh.get_group()
        part = cdiv(n_classes, dist.get_world_size(group))
        weight = weight.to_local()
    else:
        part = _equal_part(name, weight.shape[0], weight.device, group)
        n_classes = part * dist.get_world_size(group)
    if vocab_size is not None:
        if vocab_size > n_classes:
            raise ValueError(
                f"{name}: vocab_size={vocab_size}; expected at most {n_classes}, the rows of all processes"
            )
        n_classes = vocab_size
    hidden, weight = autocast(hidden, weight)
    if hidden.shape[:-1] != target.shape or hidden.shape[-1:] != weight.shape[1:] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"{name}: hidden {tuple(hidden.shape)} {hidden.dtype}, this process's weight {tuple(weight.shape)} "
            f"{weight.dtype}, target {tuple(target.shape)}; "
            "expected (..., H), (V / processes, H) of one dtype, and (...)"
        )
    terms = Terms(logit_scale, softcap, temperature, z_loss=z_loss)
    check_terms(name, terms)
    target = as_targets(name, target, n_classes, ignore_index)
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    first_class = dist.get_rank(group) * part
    # One row at least, and whole units of memory to begin at: all processes must take the rows in the same order.
    own_weight = weight[: max(1, n_classes - first_class)] if weight.shape[0] else F.pad(weight, (0, 0, 0, 1))
    if own_weight.storage_offset() % 8:
        own_weight = own_weight.clone()
    options = _Options(
        group,
        first_class,
        first_class >= n_classes,
        rows_per_chunk(rows, part, rows.element_size(), logits_budget),
        terms,
        ignore_index,
        uses_triton(rows, weight, backend=backend),
    )
    if reduction == "none" or not torch.is_grad_enabled():  # without gradients there is nothing to make ahead
        losses: Tensor = _TokenLosses.apply(rows, own_weight, targets, options)  # type: ignore[no-untyped-call]
        losses = losses.view(target.shape)
    else:
        losses = _summed_loss(rows, own_weight, targets, options)
    return reduce_losses(losses, denominator(name, losses.dtype, target, reduction, ignore_index, num_items))
