"""Attention masks: which keys each query sees.

Causality, sliding windows, packed texts, images whose tokens all see each other, and any of these together let a query
see one interval of keys. So a mask is the intervals' two ends, a number each per query, and what padding takes out of
them. A matrix of T x S is made from that only for short texts and on a CPU; for long ones on a GPU FlexAttention gets a
mask of blocks.

Shapes: B batch, T queries, S keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 128


class Mask:
    """Query t sees the keys from `first[t]` to `last[t]` that are no padding.

    On a GPU it sees itself at any rate: padding may have nothing else to see, and a fused kernel would give a row of
    equal scores, as the most negative number makes them, gradients many times too large, because it recomputes
    probabilities as exp(score - lse). On a CPU such scores are all alike, as in transformers' eager attention. What
    padding makes of what it sees nobody should read.

    Args:
        query: (T,) int64: the queries' own places among the keys.
        first: (B or 1, T) int64.
        last: (B or 1, T) int64.
        keys: S.
        real: (B, S) bool, False for padding; None for none.
    """

    def __init__(self, query: Tensor, first: Tensor, last: Tensor, keys: int, real: Tensor | None = None) -> None:
        self.query, self.first, self.last, self.keys, self.real = query, first, last, keys, real
        self._added: dict[torch.dtype, Tensor] = {}
        self._blocks: Any = None

    def visible(self) -> Tensor:
        """(B or 1, 1, T, S) bool."""
        key = torch.arange(self.keys, device=self.query.device)
        visible = (key >= self.first[..., None]) & (key <= self.last[..., None])
        if self.real is not None:
            visible = visible & self.real[:, None]
            if self.real.device.type != "cpu":
                visible = visible | (key == self.query[:, None])
        return visible[:, None]

    def added(self, dtype: torch.dtype) -> Tensor:
        """(B or 1, 1, T, S): what to add to scores of this dtype, for hidden keys its most negative finite number."""
        if dtype not in self._added:
            self._added[dtype] = added(self.visible(), dtype)
        return self._added[dtype]

    def blocks(self) -> Any:
        """FlexAttention's mask: the blocks of keys that each block of queries sees in full, and those it sees parts
        of."""
        if self._blocks is None:
            self._blocks = self._block_mask()
        return self._blocks

    def _block_mask(self) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        n_queries = self.query.shape[0]
        places = torch.arange(-(-n_queries // _BLOCK) * _BLOCK, device=self.query.device).clamp(max=n_queries - 1)
        first, last = (x[:, places].view(len(x), -1, _BLOCK) for x in (self.first, self.last))
        begin = torch.arange(0, self.keys, _BLOCK, device=self.query.device)
        end = begin + _BLOCK - 1
        seen = (end >= first.amin(-1)[..., None]) & (begin <= last.amax(-1)[..., None])
        seen_in_full = (begin >= first.amax(-1)[..., None]) & (end <= last.amin(-1)[..., None])
        if self.real is not None:
            real = F.pad(self.real, (0, len(begin) * _BLOCK - self.keys)).view(len(self.real), -1, _BLOCK).all(-1)
            seen, seen_in_full = seen.expand(len(real), -1, -1), seen_in_full & real[:, None]
        return BlockMask.from_kv_blocks(
            *_listed(seen & ~seen_in_full),
            *_listed(seen_in_full),
            BLOCK_SIZE=_BLOCK,
            mask_mod=self._sees,
            seq_lengths=(n_queries, self.keys),
        )

    def _sees(self, b: Tensor, head: Tensor, q: Tensor, key: Tensor) -> Tensor:
        row = b if len(self.first) > 1 else 0
        visible = (key >= self.first[row, q]) & (key <= self.last[row, q])
        if self.real is not None:
            visible = visible & self.real[b, key] | (key == self.query[q])
        return visible


def added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores of this dtype: 0, and for hidden keys its most negative finite number."""
    return torch.zeros((), dtype=dtype, device=visible.device).where(visible, torch.finfo(dtype).min)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are chosen for each block of queries, and their numbers, the chosen ones first."""
    chosen = chosen[:, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()
