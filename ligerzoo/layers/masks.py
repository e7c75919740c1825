"""Attention masks: which keys each query sees.

Causality, sliding windows, packed texts, images whose tokens all see each other, and any of these together let a query
see one interval of keys. So a mask is the intervals' two ends, a number each per query, and what padding takes out of
them. A matrix of T x S is made from that only for short texts and on a CPU; for long ones on a GPU FlexAttention gets a
mask of blocks. Only what cross-attention sees of images is told otherwise.

Shapes: B batch, T queries, S keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 128


class AttentionMask(ABC):
    """Which keys each query sees, made into what an attention kernel takes when it asks.

    Args:
        queries: T.
        keys: S.
    """

    def __init__(self, queries: int, keys: int) -> None:
        self.queries, self.keys = queries, keys
        self._added: dict[torch.dtype, Tensor] = {}
        self._blocks: Any = None

    @abstractmethod
    def visible(self) -> Tensor:
        """(B or 1, 1, T, S) bool."""

    def added(self, dtype: torch.dtype) -> Tensor:
        """(B or 1, 1, T, S): what to add to scores of this dtype, for hidden keys its most negative finite number."""
        if torch.compiler.is_compiling():  # which keeps what is used again, and refuses to keep it across checkpoints
            return added(self.visible(), dtype)
        if dtype not in self._added:
            self._added[dtype] = added(self.visible(), dtype)
        return self._added[dtype]

    def blocks(self) -> Any:
        """FlexAttention's mask: the blocks of keys that each block of queries sees in full, and those it sees parts
        of."""
        if torch.compiler.is_compiling():
            return self._block_mask()
        if self._blocks is None:
            self._blocks = self._block_mask()
        return self._blocks

    def _block_mask(self) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        seen, seen_in_full = self._seen_blocks()
        return BlockMask.from_kv_blocks(
            *_listed(seen & ~seen_in_full),
            *_listed(seen_in_full),
            BLOCK_SIZE=_BLOCK,
            mask_mod=self._sees,
            seq_lengths=(self.queries, self.keys),
        )

    @abstractmethod
    def _seen_blocks(self) -> tuple[Tensor, Tensor]:
        """(B or 1, blocks of queries, blocks of keys) bool: what is seen at all, and what in full."""

    @abstractmethod
    def _sees(self, b: Tensor, head: Tensor, q: Tensor, key: Tensor) -> Tensor:
        """Whether the query sees the key, as FlexAttention asks: for 0-d numbers of the row, head, query and key."""

    def _queries_in_blocks(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (B, blocks, 128, ...); the last query again where the last block is not full."""
        places = torch.arange(-(-self.queries // _BLOCK) * _BLOCK, device=x.device).clamp(max=self.queries - 1)
        return x[:, places].view(len(x), -1, _BLOCK, *x.shape[2:])

    def _key_blocks(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(blocks,) each: the first and the last key of each block of keys."""
        begin = torch.arange(0, self.keys, _BLOCK, device=device)
        return begin, begin + _BLOCK - 1


class Mask(AttentionMask):
    """Query t sees the keys from `first[t]` to `last[t]` that are not padding.

    A query that sees no key at all, as padding on the left, sees its own key on a GPU. A fused kernel would give a row
    of equal scores gradients many times too large, because it recomputes probabilities as exp(score - lse). On a CPU
    such a query attends to all keys equally, as in transformers' eager attention. All other queries, those of padding
    on the right included, see the same keys on both.

    Args:
        query: (T,) int64, the index of each query's own key.
        first: (B or 1, T) int64.
        last: (B or 1, T) int64.
        keys: S.
        padding_mask: (B, S) bool, False for padding; None for no padding.

    Attributes:
        fallback: (B, T) int64, the own key of a query that sees no key, and -1 for the others; None without padding.
    """

    def __init__(self, query: Tensor, first: Tensor, last: Tensor, keys: int, real: Tensor | None = None) -> None:
        super().__init__(len(query), keys)
        self.query, self.first, self.last, self.padding_mask = query, first, last, real
        self.fallback = None if real is None else query.where(~self._sees_any(real), -1)

    def _sees_any(self, real: Tensor) -> Tensor:
        """(B, T) bool: whether a key between `first` and `last` is not padding, by counting such keys up to each."""
        up_to = F.pad(real.cumsum(1), (1, 0))
        row = torch.arange(len(real), device=real.device)[:, None]
        return up_to[row, (self.last + 1).clamp(max=self.keys)] > up_to[row, self.first.clamp(min=0)]

    def visible(self) -> Tensor:
        """(B or 1, 1, T, S) bool."""
        key = torch.arange(self.keys, device=self.query.device)
        visible = (key >= self.first[..., None]) & (key <= self.last[..., None])
        if self.padding_mask is not None and self.fallback is not None:
            visible = visible & self.padding_mask[:, None]
            if self.padding_mask.device.type != "cpu":
                visible = visible | (key == self.fallback[..., None])
        return visible[:, None]

    def _seen_blocks(self) -> tuple[Tensor, Tensor]:
        first, last = map(self._queries_in_blocks, (self.first, self.last))
        begin, end = self._key_blocks(self.query.device)
        seen = (end >= first.amin(-1)[..., None]) & (begin <= last.amax(-1)[..., None])
        seen_in_full = (begin >= first.amax(-1)[..., None]) & (end <= last.amin(-1)[..., None])
        if self.padding_mask is not None:
            real = (
                F.pad(self.padding_mask, (0, len(begin) * _BLOCK - self.keys))
                .view(len(self.padding_mask), -1, _BLOCK)
                .all(-1)
            )
            seen, seen_in_full = seen.expand(len(real), -1, -1), seen_in_full & real[:, None]
        return seen, seen_in_full

    def _sees(self, b: Tensor, head: Tensor, q: Tensor, key: Tensor) -> Tensor:
        row = b if len(self.first) > 1 else 0
        visible = (key >= self.first[row, q]) & (key <= self.last[row, q])
        if self.padding_mask is not None and self.fallback is not None:
            visible = visible & self.padding_mask[b, key] | (key == self.fallback[b, q])
        return visible


class TileMask(AttentionMask):
    """Keys that are seen in pieces of one length, such as the tiles of images.

    Args:
        sees: (B, T, N) bool, whether each query sees each piece.
        length: the keys of a piece.
    """

    def __init__(self, sees: Tensor, length: int) -> None:
        super().__init__(sees.shape[1], sees.shape[2] * length)
        self.sees, self.length = sees, length

    def visible(self) -> Tensor:
        """(B, 1, T, S) bool."""
        return self.sees.repeat_interleave(self.length, -1)[:, None]

    def _seen_blocks(self) -> tuple[Tensor, Tensor]:
        sees = self._queries_in_blocks(self.sees)
        begin, end = self._key_blocks(self.sees.device)
        piece = self.length * torch.arange(self.sees.shape[2], device=self.sees.device)
        touched = (piece <= end[:, None]) & (piece + self.length > begin[:, None])  # (blocks of keys, N)
        seen = (sees.any(2)[:, :, None] & touched).any(-1)
        return seen, (sees.all(2)[:, :, None] | ~touched).all(-1) & (end < self.keys)

    def _sees(self, b: Tensor, head: Tensor, q: Tensor, key: Tensor) -> Tensor:
        return self.sees[b, q, key // self.length]


def added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores of this dtype: 0, and for hidden keys its most negative finite number."""
    return torch.zeros((), dtype=dtype, device=visible.device).where(visible, torch.finfo(dtype).min)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are chosen for each block of queries, and their numbers, the chosen ones first."""
    chosen = chosen[:, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()
