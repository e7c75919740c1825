"""Experts of MoE layers, divided over processes (Lepikhin et al. 2020).

Routing gives each token k slots. Sorted by expert, the slots of one process's experts are adjacent rows:

    tensor   all processes of the group gather the same tokens. Each computes the rows of its experts, and the outputs
             of all are added up
    expert   each process has other tokens. It sends the rows to the processes of their experts, which send back the
             outputs (all-to-all); the slots of a token are added up where the token is

The number of rows depends on the routing, so a layer waits for its routing on the host.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import uses_triton
from ligerzoo.kernels.routing import permute, sort_by_expert, unpermute
from ligerzoo.layers.moe import Experts
from ligerzoo.parallel.divided_layer import DividedLayer
from ligerzoo.parallel.sequence_parallel import ResidualParts, block_parts

Rows = TypeVar("Rows", list[int], list[list[int]])


class _ToRows(FusedFunction):
    """Copies tokens (T, H) to the rows (T * k, H) of their slots."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, slots: SortedSlots) -> Tensor:
        ctx.slots = slots
        return permute(x, slots.rows, slots.triton)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor, None]:
        return unpermute(dy.contiguous(), ctx.slots.rows, ctx.slots.bounds, ctx.slots.triton), None


class _FromRows(FusedFunction):
    """Adds up the rows of the slots of each token: (T * k, H) -> (T, H)."""

    @staticmethod
    def forward(ctx: FusedContext, values: Tensor, slots: SortedSlots) -> Tensor:
        ctx.slots = slots
        return unpermute(values.contiguous(), slots.rows, slots.bounds, slots.triton)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor, None]:
        return permute(dy, ctx.slots.rows, ctx.slots.triton), None


class _Average(FusedFunction):
    """x, of which each process uses a share: the gradient is divided by their number."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, processes: int) -> Tensor:
        ctx.processes = processes
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor, None]:
        return dy / ctx.processes, None


class _Exchange(FusedFunction):
    """Sends rows to the processes of a group, in their order, and returns what they send (all-to-all)."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchanged(x, received, sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(dy, ctx.sent, ctx.received, ctx.group), None, None, None


def _exchanged(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def _on_host(rows: Tensor, balanced: Rows) -> Rows:
    """Returns numbers of rows as a list; on meta, which routes nothing, those of processes with equal numbers."""
    return balanced if rows.is_meta else cast(Rows, rows.tolist())


class SortedSlots(NamedTuple):
    """The slots of tokens, sorted by expert.

    Attributes:
        rows: (T, k), the row of each slot.
        bounds: (E + 1,): expert e has the rows from bounds[e] to bounds[e + 1].
        triton: whether Triton moves the rows.
    """

    rows: Tensor
    bounds: Tensor
    triton: bool

    def tokens(self, x: Tensor) -> Tensor:
        """(T, H) -> (T * k, H), the token of each row."""
        copies: Tensor = _ToRows.apply(x, self)
        return copies

    def values(self, of_slots: Tensor) -> Tensor:
        """(T, k) -> (T * k, 1), the value of each row."""
        rows = self.rows.flatten().long()
        slots = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows), device=rows.device))
        return of_slots.flatten().index_select(0, slots)[:, None]

    def sums(self, values: Tensor) -> Tensor:
        """(T * k, H) -> (T, H), the sum of each token's rows."""
        sums: Tensor = _FromRows.apply(values, self)
        return sums


class _Experts(DividedLayer, Experts):
    """Experts of which this process has the ones from `rank * n` on."""

    def sorted_slots(self, x: Tensor, expert_ids: Tensor) -> SortedSlots:
        """Returns the slots of tokens, sorted by expert, of all processes."""
        group = self.tensor_shard.group
        rows, bounds = sort_by_expert(expert_ids, len(self.down_proj) * group.size())
        return SortedSlots(rows, bounds, uses_triton(x, backend=self.backend))

    def of_rows(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Computes the experts of rows, (n, H), (n, 1), (n, 1) -> (n, H).

        Without rows, it computes one that is 0, since all processes need gradients of the same parameters.
        """
        missing = (0, 0, 0, int(not len(x)))
        y: Tensor = super().forward(*(F.pad(rows, missing) for rows in (x, expert_ids, weights)))
        return y[: len(x)]


class TensorParallelExperts(_Experts):
    """Adds up the outputs of the experts of all processes, which get the same tokens."""

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        part = self.tensor_shard
        with part.replaced(part.local_values()):
            given = (part.all_tokens(one).flatten(0, -2) for one in (x, expert_ids, expert_weights))
            x, expert_ids, expert_weights = given
            slots, count = self.sorted_slots(x, expert_ids), len(self.down_proj)
            first, share = count * dist.get_rank(part.group), expert_ids.numel() // part.group.size()
            begin, end = _on_host(slots.bounds[[first, first + count]], [0, share])
            tokens, ids = slots.tokens(x), slots.values(expert_ids - first)
            weights = slots.values(expert_weights)
            y = self.of_rows(tokens[begin:end], ids[begin:end], weights[begin:end])
            return part.own_tokens(slots.sums(F.pad(y, (0, 0, begin, len(tokens) - end))))


class ExpertParallelExperts(_Experts):
    """Sends tokens to the processes of their experts, and their outputs back.

    Gradients are averaged over all processes. FSDP2 averages those of experts over the processes that have them, so
    they are divided by the number of others here.

    Attributes:
        shards: the mesh over which FSDP2 shards the experts of this process.
        copies: the processes that have the same tokens, unless blocks divide them: each sends its part.
    """

    shards: DeviceMesh
    copies: ResidualParts

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        if self.copies.count == 1 or block_parts.get() is not None:
            return self.exchanged(x, expert_ids, expert_weights)
        copies = self.copies.of(len(x))
        own = [copies.own(one[None])[0] for one in (x, expert_ids, expert_weights)]
        return copies.gather(self.exchanged(*own)[None])[0]

    def exchanged(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Computes the experts of this process's tokens, wherever they are."""
        part, group = self.tensor_shard, self.tensor_shard.group
        others = group.size() // self.copies.count
        value_of = part.local_values()
        with part.replaced(lambda one: _Average.apply(value_of(one), others)):
            slots = self.sorted_slots(x, expert_ids)
            counts = slots.bounds.diff().view(group.size(), -1)  # of each expert, by process
            counts_here = torch.empty_like(counts)
            dist.all_to_all_single(counts_here, counts, group=group)
            shares = [len(one) for one in expert_ids.flatten().tensor_split(group.size())]
            sent, received = _on_host(torch.stack([counts.sum(1), counts_here.sum(1)]), [shares, shares])
            experts = torch.arange(counts.shape[1], device=x.device).repeat(group.size())
            ids = experts.repeat_interleave(counts_here.flatten(), output_size=sum(received))[:, None]
            rows, weights = slots.tokens(x), slots.values(expert_weights)
            rows, weights = (_Exchange.apply(one, received, sent, group) for one in (rows, weights))
            return slots.sums(_Exchange.apply(self.of_rows(rows, ids, weights), sent, received, group))
