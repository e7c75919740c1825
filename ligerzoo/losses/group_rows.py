"""Rows of tensors that the processes of a group have: gathers them, and reduces what each process computed of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype


@dataclass(frozen=True)
class GroupRows:
    """Rows of tensors that the processes of a group have, one process after the other.

    Attributes:
        group: the group; None for a single process.
        counts: rows of each process.
        rank: number of this process.
    """

    group: dist.ProcessGroup | None
    counts: Sequence[int]
    rank: int

    @property
    def first(self) -> int:
        """The index of the first row of this process."""
        return sum(self.counts[: self.rank])

    def gather(self, own: Tensor) -> Tensor:
        """Returns the rows of all processes."""
        if self.group is None:
            return own
        most = max(self.counts)
        gathered = own.new_empty((len(self.counts), most, *own.shape[1:]))
        dist.all_gather([*gathered], _padded(own, most).contiguous(), group=self.group)
        if min(self.counts) == most:
            return gathered.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(gathered, self.counts, strict=True)])

    def own_sum(self, addends: Tensor) -> Tensor:
        """Returns the sums over the processes of the rows of this process."""
        if self.group is None:
            return addends
        addends = addends.to(accumulation_dtype(addends.dtype))
        most, own = max(self.counts), self.counts[self.rank]
        parts = [_padded(part, most).contiguous() for part in torch.split(addends, list(self.counts))]
        total = addends.new_empty((most, *addends.shape[1:]))
        dist.reduce_scatter(total, parts, group=self.group)
        return total[:own]

    def logsumexp(self, values: Tensor) -> Tensor:
        """Returns the log of the sum of exponentials over the processes."""
        if self.group is None:
            return values
        gathered = values.new_empty((len(self.counts), *values.shape))
        dist.all_gather([*gathered], values, group=self.group)
        return gathered.logsumexp(0)


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0,) * (2 * x.dim() - 1) + (rows - x.shape[0],))
