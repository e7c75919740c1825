"""`DividedTokens`: rows of which each process of a group has some consecutive tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.layers.row_parts import RowParts


@dataclass(frozen=True, kw_only=True)
class DividedTokens(RowParts):
    """Rows of which each process of a group has some consecutive tokens.

    Attributes:
        group: n processes.
        count: n.
        rank: index of this process in the group.
        tokens: T.
    """

    group: dist.ProcessGroup
    count: int
    rank: int
    tokens: int = 0

    @classmethod
    def over(cls, group: dist.ProcessGroup) -> Self:
        """Returns the parts of the processes of a group."""
        return cls(group=group, count=dist.get_world_size(group), rank=dist.get_rank(group))

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a process group cannot be copied

    def of(self, tokens: int) -> Self:
        return replace(self, tokens=tokens)

    @property
    def length(self) -> int:
        """c."""
        return -(-self.tokens // self.count)

    def own(self, x: Tensor, dim: int = 1, fill: int = 0) -> Tensor:
        first, last = (min(index * self.length, self.tokens) for index in (self.rank, self.rank + 1))
        return pad(x.narrow(dim, first, last - first), dim, self.length - (last - first), fill)

    def padded(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (B, n * c, ...), with zeros after the last token."""
        return pad(x, 1, self.length * self.count - self.tokens)


def pad(x: Tensor, dim: int, missing: int, fill: int = 0) -> Tensor:
    """Adds `missing` entries to the end of a dimension."""
    if missing == 0:
        return x
    after = x.ndim - 1 - dim % x.ndim
    return F.pad(x, (*(0, 0) * after, 0, missing), value=fill)
