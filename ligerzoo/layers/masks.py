"""Attention masks: which keys each query attends to.

With causality, sliding windows, packed segments, bidirectional image spans, or any combination of these, a query sees
one interval of keys. So a mask stores the two ends of each interval, plus the padding mask. The T x S matrix is only
created for short sequences and on a CPU; long ones on a GPU use FlexAttention's block mask. Cross-attention to images
uses a mask of tiles instead of intervals.

Shapes: B batch, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.layers.documents import Documents

_BLOCK = 128


class AttentionMask:
    """Which keys each query attends to, converted on demand to the form that an attention kernel needs.

    Args:
        queries: T.
        keys: S.
    """

    def __init__(self, queries: int, keys: int) -> None:
        self.queries, self.keys = queries, keys
        self._additive: dict[torch.dtype, Tensor] = {}
        self._block_mask: Any = None

    def visible(self) -> Tensor:
        """Returns the mask as a matrix, (B or 1, 1, T, S) bool."""
        raise NotImplementedError

    def additive(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix to add to the scores, (B or 1, 1, T, S); see `additive_mask`."""
        if torch.compiler.is_compiling():  # it reuses the result itself, and cannot store it across checkpoints
            return additive_mask(self.visible(), dtype)
        if dtype not in self._additive:
            self._additive[dtype] = additive_mask(self.visible(), dtype)
        return self._additive[dtype]

    def block_mask(self) -> Any:
        """Returns FlexAttention's `BlockMask`: which blocks of keys each block of queries sees fully or partly."""
        if torch.compiler.is_compiling():
            return self._new_block_mask()
        if self._block_mask is None:
            self._block_mask = self._new_block_mask()
        return self._block_mask

    def _new_block_mask(self) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        visible, fully_visible = self._visible_blocks()
        return BlockMask.from_kv_blocks(
            *_block_indices(visible & ~fully_visible),
            *_block_indices(fully_visible),
            BLOCK_SIZE=_BLOCK,
            mask_mod=self._mask_mod(),
            seq_lengths=(self.queries, self.keys),
        )

    def _visible_blocks(self) -> tuple[Tensor, Tensor]:
        """Returns whether each block has visible keys, and only visible keys: (B or 1, query blocks, key blocks)."""
        raise NotImplementedError

    def _mask_mod(self) -> Callable[..., Tensor]:
        """Returns FlexAttention's `mask_mod(b, head, q, key)`: whether the query sees the key, for 0-d indices."""
        raise NotImplementedError

    def _queries_in_blocks(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (B, blocks, 128, ...); repeats the last query to fill the last block."""
        index = torch.arange(-(-self.queries // _BLOCK) * _BLOCK, device=x.device).clamp(max=self.queries - 1)
        return x[:, index].view(len(x), -1, _BLOCK, *x.shape[2:])

    def _key_blocks(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the first and the last key of each block of keys, (blocks,) each."""
        begin = torch.arange(0, self.keys, _BLOCK, device=device)
        return begin, begin + _BLOCK - 1


class MaskPart(NamedTuple):
    """A document of a packed row, and the mask that it has alone.

    Attributes:
        start: its first token.
        length: its number of tokens.
        mask: None if a query sees all keys of the document, or all up to its own.
        is_causal: without a mask, a query sees the keys up to its own.
    """

    start: int
    length: int
    mask: Mask | None
    is_causal: bool


class Mask(AttentionMask):
    """Query t sees the keys from `first[t]` to `last[t]` that are not padding.

    On a GPU, a query without any visible key (such as left padding) sees its own key. A fused kernel recomputes
    probabilities as exp(score - lse), which gives rows of equal scores gradients many times too large. On a CPU such a
    query attends to all keys equally, as in transformers' eager attention. All other queries, including right padding,
    see the same keys on both.

    Args:
        query: (B or 1, T) int64, the index of each query's own key.
        first: (B or 1, T) int64.
        last: (B or 1, T) int64.
        keys: S.
        padding_mask: (B, S) bool, False for padding; None for no padding.
        divided: documents of packed rows, outside which no query sees a key; None if the host does not know them.

    Attributes:
        fallback: (B, T) int64, the own key of a query without visible keys, and -1 for others; None without padding.
    """

    def __init__(
        self,
        query: Tensor,
        first: Tensor,
        last: Tensor,
        keys: int,
        padding_mask: Tensor | None = None,
        divided: Documents | None = None,
    ) -> None:
        super().__init__(query.shape[1], keys)
        self.query, self.first, self.last, self.padding_mask = query, first, last, padding_mask
        self.divided = None if padding_mask is not None else divided
        self.fallback = None if padding_mask is None else query.where(~self._sees_any(padding_mask), -1)

    @cached_property
    def parts(self) -> list[list[MaskPart]]:
        """The documents of each row, with their masks; reads the values of the mask. There must be `divided`."""
        assert self.divided is not None
        return [
            [self._part(row, *span) for span in spans if span[1]] for row, spans in enumerate(self.divided.rows or ())
        ]

    def _part(self, row: int, start: int, length: int) -> MaskPart:
        first, last = (x[row % len(x), start : start + length][None] - start for x in (self.first, self.last))
        query, mask = torch.arange(length, device=first.device)[None], None
        is_causal = torch.equal(last, query)
        if bool((first > 0).any()) or not (is_causal or bool((last >= length - 1).all())):
            mask = Mask(query, first, last, length)
        return MaskPart(start, length, mask, is_causal)

    def _sees_any(self, padding_mask: Tensor) -> Tensor:
        """Returns whether a key from `first` to `last` is not padding, (B, T) bool, by counting such keys."""
        count = F.pad(padding_mask.cumsum(1), (1, 0))
        row = torch.arange(len(padding_mask), device=padding_mask.device)[:, None]
        return count[row, (self.last + 1).clamp(max=self.keys)] > count[row, self.first.clamp(min=0)]

    def visible(self) -> Tensor:
        """Returns the mask as a matrix, (B or 1, 1, T, S) bool."""
        key = torch.arange(self.keys, device=self.query.device)
        visible = (key >= self.first[..., None]) & (key <= self.last[..., None])
        if self.padding_mask is not None and self.fallback is not None:
            visible = visible & self.padding_mask[:, None]
            if self.padding_mask.device.type != "cpu":
                visible = visible | (key == self.fallback[..., None])
        return visible[:, None]

    def _visible_blocks(self) -> tuple[Tensor, Tensor]:
        first, last = map(self._queries_in_blocks, (self.first, self.last))
        begin, end = self._key_blocks(self.query.device)
        visible = (end >= first.amin(-1)[..., None]) & (begin <= last.amax(-1)[..., None])
        fully_visible = (begin >= first.amax(-1)[..., None]) & (end <= last.amin(-1)[..., None])
        if self.padding_mask is not None:
            padded = F.pad(self.padding_mask, (0, len(begin) * _BLOCK - self.keys))
            unpadded_blocks = padded.view(len(padded), -1, _BLOCK).all(-1)
            visible = visible.expand(len(padded), -1, -1)
            fully_visible = fully_visible & unpadded_blocks[:, None]
        return visible, fully_visible

    def _mask_mod(self) -> Callable[..., Tensor]:
        def sees(b: Tensor, head: Tensor, q: Tensor, key: Tensor) -> Tensor:
            row = b if len(self.first) > 1 else 0
            return self._padded((key >= self.first[row, q]) & (key <= self.last[row, q]), b, q, key)

        return sees

    def _padded(self, visible: Tensor, b: Tensor, q: Tensor, key: Tensor) -> Tensor:
        """Whether the query sees the key, from whether it sees it without padding."""
        if self.padding_mask is None or self.fallback is None:
            return visible
        return visible & self.padding_mask[b, key] | (key == self.fallback[b, q])


class CausalMask(Mask):
    """Token t of a whole sequence sees the keys up to t, of its segment and within a window.

    FlexAttention compares indices, where it would load `first` and `last` for each query and key. With a window of 128
    tokens, its forward pass is five times as fast.

    Args:
        query, first, keys, padding_mask: see `Mask`.
        window: tokens that a token sees, including itself; None for no window.
        segment_start: (B or 1, T) int64, the first key of each token's segment; None for one segment.
        documents: the segments, or the texts between padding; None if the host does not know them.
    """

    def __init__(
        self,
        query: Tensor,
        first: Tensor,
        keys: int,
        padding_mask: Tensor | None,
        window: int | None,
        segment_start: Tensor | None,
        documents: Documents | None = None,
    ) -> None:
        super().__init__(query, first, query, keys, padding_mask, None if segment_start is None else documents)
        self.window, self.segment_start, self.documents = window, segment_start, documents

    def _mask_mod(self) -> Callable[..., Tensor]:
        start = None if self.segment_start is None else self.segment_start.int()  # half the bytes to load

        # torch.compile takes the default of an argument as a constant, but not an attribute of the mask. Before torch
        # 2.12, it compiles again for another default only if the argument is keyword-only.
        def sees(b: Tensor, head: Tensor, q: Tensor, key: Tensor, *, window: int | None = self.window) -> Tensor:
            visible = key <= q
            if window is not None:
                visible = visible & (q - key < window)
            if start is not None:
                visible = visible & (key >= start[b if len(start) > 1 else 0, q])
            return self._padded(visible, b, q, key)

        return sees


class DocumentMask(Mask):
    """A token of a packed row sees the tokens of its document, and with a window those closer than it on both sides.

    Args:
        query, first, last, keys: see `Mask`.
        window: the window; None for whole documents.
        documents: the documents of all rows.
    """

    def __init__(
        self, query: Tensor, first: Tensor, last: Tensor, keys: int, window: int | None, documents: Documents
    ) -> None:
        super().__init__(query, first, last, keys, divided=documents)
        self.window, self.within = window, documents


class TileMask(AttentionMask):
    """Each query sees some tiles of keys, such as the tiles of images, and every key of these tiles.

    Args:
        visible_tiles: (B, T, N) bool, whether each query sees each tile.
        tile_length: number of keys per tile; S = N * tile_length.
    """

    def __init__(self, visible_tiles: Tensor, tile_length: int) -> None:
        super().__init__(visible_tiles.shape[1], visible_tiles.shape[2] * tile_length)
        self.visible_tiles, self.tile_length = visible_tiles, tile_length

    def visible(self) -> Tensor:
        """Returns the mask as a matrix, (B, 1, T, S) bool."""
        return self.visible_tiles.repeat_interleave(self.tile_length, -1)[:, None]

    def _visible_blocks(self) -> tuple[Tensor, Tensor]:
        tiles = self._queries_in_blocks(self.visible_tiles)
        begin, end = self._key_blocks(self.visible_tiles.device)
        start = self.tile_length * torch.arange(self.visible_tiles.shape[2], device=self.visible_tiles.device)
        overlaps = (start <= end[:, None]) & (start + self.tile_length > begin[:, None])  # (key blocks, N)
        visible = (tiles.any(2)[:, :, None] & overlaps).any(-1)
        return visible, (tiles.all(2)[:, :, None] | ~overlaps).all(-1) & (end < self.keys)

    def _mask_mod(self) -> Callable[..., Tensor]:
        return lambda b, head, q, key: self.visible_tiles[b, q, key // self.tile_length]


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what to add to scores of `dtype`: 0 for visible keys, the lowest finite number for masked keys."""
    return torch.zeros((), dtype=dtype, device=visible.device).where(visible, torch.finfo(dtype).min)


def as_additive(mask: AttentionMask | Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns the matrix to add to scores of `dtype`, of any kind of mask; None for no mask."""
    if isinstance(mask, AttentionMask):
        return mask.additive(dtype)
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return additive_mask(mask, dtype)
    if mask.dtype == dtype:
        return mask
    is_masked = mask == torch.finfo(mask.dtype).min
    return mask.to(dtype).masked_fill(is_masked, torch.finfo(dtype).min)


def single_query_interval(
    mask: AttentionMask | Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns first and last key, (B or 1,), padding mask and fallback of a `Mask` for one query; Nones for no mask."""
    if mask is None:
        return None, None, None, None
    assert isinstance(mask, Mask)
    return mask.first[:, 0], mask.last[:, 0], mask.padding_mask, None if mask.fallback is None else mask.fallback[:, 0]


def _block_indices(selected: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of selected key blocks of each query block, and block indices with the selected ones first."""
    selected = selected[:, None].int()
    return selected.sum(-1, dtype=torch.int32), selected.argsort(dim=-1, descending=True, stable=True).int()
