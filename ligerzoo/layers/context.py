"""What all layers of one forward share: positions, masks and rotary angles of the tokens.

Shapes: B batch, T tokens in the call, S keys that attention receives (cached and new), R rotated features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.device import to_device
from ligerzoo.kernels.autograd import any_true
from ligerzoo.layers.cache import KeysAndValues, LayerCache
from ligerzoo.layers.context_inputs import check_context_inputs
from ligerzoo.layers.documents import Documents, segments, spans, unpadded
from ligerzoo.layers.input_properties import any_begins_segment, begins_segment, known_starts, masks_any, reads_values
from ligerzoo.layers.kv_cache import KVCache
from ligerzoo.layers.layer_outputs import LayerOutputs
from ligerzoo.layers.masks import CausalMask, DocumentMask, Mask
from ligerzoo.layers.rotary import RotaryEmbedding
from ligerzoo.layers.row_parts import WHOLE_ROWS, RowParts

_NO_CACHE = KVCache([])


class TokenInputs(Protocol):
    """Further inputs of the tokens of rows, such as `CrossAttentionInputs`."""

    def own(self, parts: RowParts, rows: int, tokens: int) -> Self:
        """Returns those of the tokens of this process, of `rows` x `tokens` in all."""


class AddedFeatures(TokenInputs, Protocol):
    """Features that are added to hidden states between blocks, as `DeepStack`."""

    def add(self, x: Tensor, block: int) -> Tensor:
        """Returns the output of the block with this index plus its features; x: (B, T, H) -> (B, T, H)."""


class BlockInputs(TokenInputs, Protocol):
    """Further inputs of blocks, as `PerLayerInputs`."""

    def of_block(self, block: int) -> Tensor:
        """Returns the input of the block with this index, (B, T, P)."""


class Context:
    """Positions and masks of one forward. The first layer that needs rotary angles or a mask creates them for all.

    Args:
        x: (B, T) token ids or (B, T, H) embeddings. Only shape and device are used.
        attention_mask: one of
            - (B, S) padding mask: 1 for a token, 0 for padding; cached tokens included;
            - (B, 1, T, S) attention mask for all layers: boolean (True: visible), or added to the scores. Each query
              must see a key;
            - a `Mask` for all layers, without a cache;
            - None: no padding.
        position_ids: (B or 1, T), or (A, B or 1, T) on A axes. Default: the index of each token in its segment. Without
            cache and padding, a new segment starts wherever an id is not its predecessor plus 1, as in transformers.
        cu_seqlens: (n + 1,) int, boundaries of n segments packed into one row: 0, ..., at most T. Tokens after the last
            boundary are padding.
        cache: the KV cache of earlier tokens; layers append the new tokens to it.
        outputs: what layers store. Default: router logits only.
        exact: give packed documents, and texts with padding at their ends, the attention that they have alone, to the
            bit, even where another way is faster. Default positions then count no padding.
        parts: how the tokens are divided over processes; None if they are not. The other arguments are of all tokens.
        residual_parts: how blocks divide those tokens over processes; None if they do not. See `divide`.

    Attributes:
        rows: B.
        tokens: T.
        cache: as given.
        position_ids: (B or 1, T) or (A, B or 1, T) int64.
        has_default_positions: whether `position_ids` were not given.
        cache_position: (B or 1, T) int64, index of each token in its row, cached tokens included.
        segment_start: (B or 1, T) int64, index of the first token of each token's segment; None if all are 0.
        padding_mask: (B, S) bool, False for padding; None without padding.
        last_visible: (B, T) int64, index of the last token that each token attends to in causal attention; None for the
            token itself.
        spans_need_window: `last_visible` holds for attention with a sliding window only.
        cross_attention_inputs: `CrossAttentionInputs`, what cross-attention attends to; initially None, for nothing.
        deepstack: features that are added to hidden states between the first blocks; initially None, for nothing.
        block_inputs: inputs of blocks in addition to hidden states; initially None.
        token_types: (B, T) token types, for `AbsolutePositionDecoder`; initially None, for type 0.
        shared_keys: keys and values of layers that later layers attend to as well, by name; initially empty.
        outputs: as given.
        documents: what attends to each other in packed or padded rows; None if the host does not know it.
        parts: as given.
        residual_parts: as given.
        is_exact: whether tokens get the bits that they have in an exact forward of their text alone.
        router_logits, attentions, hidden_states: those of `outputs`.

    Raises:
        TypeError: an input has another type.
        ValueError: the shapes, dtypes or values of the inputs are inconsistent, or `exact` is not possible for them.
    """

    rows: int
    tokens: int
    cache: KVCache | None
    padding_mask: Tensor | None
    documents: Documents | None
    is_exact: bool
    cache_position: Tensor
    segment_start: Tensor | None
    last_visible: Tensor | None
    spans_need_window: bool
    has_default_positions: bool
    position_ids: Tensor
    cross_attention_inputs: TokenInputs | None
    deepstack: AddedFeatures | None
    block_inputs: BlockInputs | None
    token_types: Tensor | None
    shared_keys: dict[str, KeysAndValues]
    outputs: LayerOutputs
    parts: RowParts
    residual_parts: RowParts
    _whole: Context | None
    _full_mask: Tensor | Mask | None
    _packed_end: Tensor | None  # 0-d: last boundary of packed segments
    _rotations: dict[tuple[RotaryEmbedding, torch.dtype], tuple[Tensor, Tensor]]
    _masks: dict[tuple[object, ...], tuple[tuple[int, int], Mask | Tensor | None]]

    def __init__(
        self,
        x: Tensor,
        attention_mask: Tensor | Mask | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        outputs: LayerOutputs | None = None,
        *,
        exact: bool = False,
        parts: RowParts | None = None,
        residual_parts: RowParts | None = None,
    ) -> None:
        check_context_inputs(x, attention_mask, position_ids, cu_seqlens, cache)
        self.rows, self.tokens = x.shape[:2]
        self.cache = cache
        self.parts = WHOLE_ROWS if parts is None else parts  # torch 2.11 cannot compile an object as a default
        self.residual_parts = WHOLE_ROWS if residual_parts is None else residual_parts
        self._full_mask = self.padding_mask = self.documents = self._whole = None
        find_documents = partial(Documents, tokens=self.tokens, device=x.device, exact=exact)
        may_read = cache is None and reads_values()
        if isinstance(attention_mask, Mask) or (attention_mask is not None and attention_mask.ndim == 4):
            self._full_mask = attention_mask
        elif attention_mask is not None:
            self.padding_mask = attention_mask.to(x.device, torch.bool).expand(self.rows, -1)
            # A host sync, once per prompt: without padding, faster attention kernels without a mask can run.
            is_checked = self.tokens > 1 or exact or (cache is not None and cache.exact)
            if is_checked and not torch.compiler.is_compiling():
                if not masks_any(self.padding_mask):
                    self.padding_mask = None
                elif may_read:
                    self.documents = find_documents(partial(unpadded, self.padding_mask))
        if cache is not None and cache.exact and not (self._full_mask is None and self.padding_mask is None):
            raise ValueError(
                "attention_mask: got padding or a 4-D mask, with an exact cache; expected no padding. Pass rows of one "
                "length, or use generate"
            )
        self.cache_position = (cache or _NO_CACHE).positions(self.tokens, x.device)
        self.segment_start = self.last_visible = self._packed_end = None
        self.spans_need_window = False
        if cu_seqlens is not None:
            bounds = to_device(cu_seqlens, x.device).to(torch.int64)
            self._packed_end = bounds[-1]
            segment = torch.searchsorted(bounds, self.cache_position, right=True) - 1
            self.segment_start = bounds[segment]
            if may_read and (exact or cu_seqlens.device.type == "cpu"):
                self.documents = find_documents(lambda: [spans(cu_seqlens.tolist())])
        elif position_ids is not None and position_ids.ndim == 2 and cache is None and attention_mask is None:
            is_start = begins_segment(position_ids)
            found = is_start.cpu() if may_read else known_starts()  # a host sync
            if any_begins_segment(is_start if found is None else found):
                index = torch.arange(self.tokens, device=is_start.device)
                self.segment_start = (index * is_start).cummax(1).values
                if found is not None:
                    self.documents = find_documents(partial(segments, found, self.rows))
        if exact:
            self.documents = self._exact_documents(find_documents)
        self.is_exact = exact or (cache is not None and cache.exact)
        self.has_default_positions = position_ids is None
        if position_ids is None:
            position_ids = self.token_positions() if exact else self._segment_positions()
        self.position_ids = position_ids
        self.cross_attention_inputs = self.deepstack = self.block_inputs = self.token_types = None
        self.shared_keys = {}
        self.outputs = LayerOutputs(router_logits=[]) if outputs is None else outputs
        self._rotations, self._masks = {}, {}

    @property
    def router_logits(self) -> list[Tensor] | None:
        """See `LayerOutputs`."""
        return self.outputs.router_logits

    @router_logits.setter
    def router_logits(self, value: list[Tensor] | None) -> None:
        self.outputs.router_logits = value

    @property
    def attentions(self) -> list[Tensor] | None:
        """See `LayerOutputs`."""
        return self.outputs.attentions

    @attentions.setter
    def attentions(self, value: list[Tensor] | None) -> None:
        self.outputs.attentions = value

    @property
    def hidden_states(self) -> list[Tensor] | None:
        """See `LayerOutputs`."""
        return self.outputs.hidden_states

    @hidden_states.setter
    def hidden_states(self, value: list[Tensor] | None) -> None:
        self.outputs.hidden_states = value

    def _exact_documents(self, find_documents: Callable[..., Documents]) -> Documents | None:
        """Returns the documents of an exact context, of which each row without padding is one; None with a cache.

        Raises:
            ValueError: the host does not know them, or attention to the cache is not exact.
        """
        is_whole = self.padding_mask is None and self._full_mask is None and self.segment_start is None
        got = None
        if self.cache is not None and not self.cache.exact:
            got = "a cache that is not exact"
        elif torch.compiler.is_compiling():
            got = "compiled code"
        elif self.documents is None and not is_whole:
            got = "a 4-D mask, or packing or padding whose values are not read"
        if got is not None:
            raise ValueError(
                f"exact: got {got}; expected packed rows, or rows with padding at their ends, in eager mode. Use "
                "exact=False"
            )
        if self.cache is not None or self.documents is not None:
            return self.documents
        return find_documents(lambda: [spans([0, self.tokens])] * self.rows)

    def replace(self, **changes: object) -> Context:
        """Returns a copy with other values of some attributes, which creates its rotary angles and masks again."""
        copy, changes = object.__new__(Context), {"_rotations": {}, "_masks": {}} | changes
        for name in _FIELDS:  # torch 2.11 traces neither copy.copy nor vars
            setattr(copy, name, changes[name] if name in changes else getattr(self, name))
        return copy

    def fork(self) -> Context:
        """Returns a copy with separate, empty outputs, for a layer that is recomputed in the backward pass."""
        rotations, masks = self._rotations, self._masks
        if torch.compiler.is_compiling():  # a checkpointed layer may only return tensors, not store them
            rotations, masks = dict(rotations), dict(masks)
        shared_keys = dict(self.shared_keys)
        return self.replace(
            outputs=self.outputs.of_block(), shared_keys=shared_keys, _rotations=rotations, _masks=masks
        )

    @property
    def whole(self) -> Context:
        """The context of all tokens, if this is that of the tokens of this process."""
        return self if self._whole is None else self._whole

    def own(self, x: Tensor) -> tuple[Tensor, Context]:
        """Returns the tokens of this process, of (B, T, ...), and their context, which lacks masks: see `whole`."""
        if self.parts.count == 1:
            return x, self
        own, changes = self.parts.own(x), self._own_inputs(self.parts, self.rows, self.tokens)
        positions = self.parts.own(self.position_ids, dim=-1)
        return own, self.replace(_whole=self, tokens=own.shape[1], position_ids=positions, **changes)

    def divide(self, x: Tensor) -> tuple[Tensor, Context]:
        """Returns the input of the first block, of (B, T, H), and the context of the blocks.

        If processes divide the tokens between the layers of blocks, it is (1, c, H) for those of this process: the
        tokens of all rows are one row. The layers of blocks that see other tokens gather them, and the positions and
        masks of the context are theirs. See `ligerzoo.parallel.sequence_parallel`.
        """
        if self.residual_parts.count == 1:
            return x, self
        tokens = self.rows * self.tokens
        parts = self.residual_parts.of(tokens)
        same: dict[str, object] = {"_rotations": self._rotations, "_masks": self._masks}
        context = self.replace(residual_parts=parts, **same, **self._own_inputs(parts, 1, tokens))
        return parts.own(x.reshape(1, tokens, -1)), context

    def gather(self, x: Tensor) -> Tensor:
        """Returns the output of the last block, (B, T, H), in a context of `divide`, and gathers what layers stored."""
        if self.residual_parts.count == 1:
            return x
        self._gather_outputs(self.residual_parts, 1)
        return self.residual_parts.gather(x).view(self.rows, self.tokens, -1)

    def _own_inputs(self, parts: RowParts, rows: int, tokens: int) -> dict[str, object]:
        """Returns the further inputs of the tokens of this process, by attribute."""
        inputs = {name: getattr(self, name) for name in ("deepstack", "cross_attention_inputs", "block_inputs")}
        return {name: None if given is None else given.own(parts, rows, tokens) for name, given in inputs.items()}

    def gather_outputs(self) -> None:
        """Gathers what layers stored of the tokens of this process."""
        if self.parts.count > 1:
            self._gather_outputs(self.parts, self.rows)

    def _gather_outputs(self, parts: RowParts, rows: int) -> None:
        for stored in (self.outputs.hidden_states or [], self.outputs.router_logits or []):
            for index, x in enumerate(stored):
                gathered = parts.gather(x.view(rows, -1, x.shape[-1]))
                shape = (self.rows, -1) if x.ndim == 3 else (-1,)
                stored[index] = gathered.reshape(*shape, x.shape[-1]).clone()  # FSDP2 warns of outputs that are views

    def require_padding_mask(self, layer: str) -> None:
        """Raises ValueError if an attention mask was given: a recurrent layer can apply a padding mask only."""
        if self._full_mask is not None:
            raise ValueError(
                f"attention_mask: got a mask of 4 dimensions, or a Mask; expected a (B, S) padding mask, since {layer} "
                "has no attention scores. Pack texts with cu_seqlens or position_ids"
            )

    def call_padding_mask(self) -> Tensor | None:
        """Returns the padding mask of the call's tokens, (B or 1, T) bool, False for padding; None without padding."""
        if self._packed_end is not None:
            return self.cache_position < self._packed_end
        if self.cache is not None and self.cache.prompt_lengths is not None:
            return self.cache_position < self.cache.prompt_lengths[:, None]
        return None if self.padding_mask is None else self._at_tokens(self.padding_mask)

    def token_positions(self) -> Tensor:
        """Returns the index of each token in its segment, padding not counted, (B or 1, T) int64."""
        if self.padding_mask is not None:
            return self._at_tokens((self.padding_mask.cumsum(1) - 1).clamp(min=0))
        return self._segment_positions()

    def _segment_positions(self) -> Tensor:
        """Returns the index of each token in its segment, padding counted, (B or 1, T) int64."""
        return self.cache_position if self.segment_start is None else self.cache_position - self.segment_start

    def _at_tokens(self, x: Tensor) -> Tensor:
        """Returns the entries of the call's tokens, (B, T), of one entry for each cached and new token, (B, S)."""
        return x.gather(1, self.cache_position.expand(len(x), -1))

    def allow_bidirectional_spans(self, in_span: Tensor, *, need_window: bool = False) -> None:
        """Lets the tokens of each span, such as an image, also attend to later tokens of the same span.

        Args:
            in_span: (B, T) bool. Adjacent True tokens of one segment are a span.
            need_window: only in attention with a sliding window (Gemma 4).
        """
        self.spans_need_window = need_window
        continues = in_span[:, :-1] & in_span[:, 1:]
        if self.segment_start is not None:
            continues = continues & (self.segment_start[:, :-1] == self.segment_start[:, 1:])
        # A host sync, as for the padding mask: without spans no mask is needed.
        if torch.compiler.is_compiling() or any_true(continues):
            continues = F.pad(continues, (0, 1), value=False)
            ends = self.cache_position.masked_fill(continues, torch.iinfo(torch.int64).max)
            self.last_visible, self._masks = ends.flip(1).cummin(1).values.flip(1), {}

    def rotation(self, rotary: RotaryEmbedding, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of the rotary angles, (B or 1, T, R/2) each, for queries and keys of `dtype`."""
        if (rotary, dtype) not in self._rotations:
            if self._whole is None:
                self._rotations[rotary, dtype] = rotary(self.position_ids, dtype)
            else:  # the frequencies may depend on the largest position
                cos, sin = self._whole.rotation(rotary, dtype)
                self._rotations[rotary, dtype] = self.parts.own(cos), self.parts.own(sin)
        return self._rotations[rotary, dtype]

    def mask(
        self,
        keys: int,
        *,
        window: int | None = None,
        chunk: int | None = None,
        is_causal: bool = True,
        cache: LayerCache | None = None,
        force: bool = False,
    ) -> Mask | Tensor | None:
        """Returns the attention mask over the last S = `keys` keys.

        Args:
            keys: S.
            window: tokens that a token attends to, including itself: token i attends from i - window + 1 on and, in
                bidirectional attention, up to i + window - 1. None for no window.
            chunk: C; tokens attend within chunks of C tokens of their text or segment, padding not counted. None for
                one chunk.
            is_causal: mask later tokens.
            cache: the layer's cache, after the new keys were appended.
            force: return a mask even where `attend` needs none.

        Returns:
            A mask, or the (B, 1, T, S) mask given to the constructor. None if `attend` needs none: causal attention
            without window and padding, or bidirectional attention to all keys.
        """
        offset = cache.offset if cache is not None else 0
        kind = window, chunk, is_causal, force
        size, mask = self._masks.get(kind, (None, None))
        if size != (keys, offset):  # not part of the key: torch.compile would treat them as constants
            has_unwritten = cache is not None and cache.has_unwritten
            mask = self._mask(keys, offset, window, chunk, is_causal, force or has_unwritten)
            self._masks[kind] = (keys, offset), mask
        return mask

    def _mask(
        self, keys: int, offset: int, window: int | None, chunk: int | None, is_causal: bool, force: bool
    ) -> Mask | Tensor | None:
        if isinstance(self._full_mask, Mask):
            return self._full_mask
        if self._full_mask is not None:
            return _slice_keys(self._full_mask, offset, keys)
        is_windowed = (window is not None and keys > window) or (chunk is not None and keys > chunk)
        is_chunk = is_causal and 1 < self.tokens < keys
        last_visible = None if window is None and self.spans_need_window else self.last_visible
        is_plain = self.padding_mask is None and self.segment_start is None and last_visible is None
        if is_plain and not (is_windowed or is_chunk or force):
            return None
        query = self.cache_position - offset
        start, documents = self.segment_start, self.documents
        if chunk is not None:
            start, documents = self._chunk_start(chunk) - offset, self._chunks(chunk)
        first = torch.zeros_like(query) if start is None else start
        if is_causal:
            last = query if last_visible is None else last_visible - offset
        elif self.segment_start is None:
            last = query[:, -1:].expand_as(query)
        else:
            last = torch.searchsorted(self.segment_start, self.segment_start, right=True) - 1
        first, last = torch.broadcast_tensors(first, last)  # type: ignore[no-untyped-call]
        if window is not None:
            first = torch.maximum(first, query - window + 1)
            last = last if is_causal else torch.minimum(last, query + window - 1)
        padding_mask = None if self.padding_mask is None else _slice_keys(self.padding_mask, offset, keys)
        if is_causal and last_visible is None and self.tokens == keys and offset == 0:
            return CausalMask(query, first, keys, padding_mask, window, start, documents)
        if self.documents is not None and self.documents.exact:
            raise ValueError("exact: got attention to later tokens; expected causal attention. Use exact=False")
        is_whole = self.tokens == keys and offset == 0 and self.segment_start is not None
        documents = self.documents if is_whole else None
        if documents is not None and padding_mask is None and not is_causal:
            return DocumentMask(query, first, last, keys, window, documents)
        return Mask(query, first, last, keys, padding_mask, documents)

    def _chunk_start(self, chunk: int) -> Tensor:
        """Returns the index of the first key of each token's chunk, (B or 1, T) int64."""
        within = self.token_positions()
        if self.padding_mask is None:
            return self.cache_position - within % chunk
        count = self.padding_mask.cumsum(1)
        return torch.searchsorted(count, within // chunk * chunk + 1).clamp(max=count.shape[1] - 1)

    def _chunks(self, chunk: int) -> Documents | None:
        """Returns the chunks of the documents, or of whole rows; None if the host does not know them."""
        is_whole = self.padding_mask is None and self.segment_start is None
        if self.documents is not None:
            return self.documents.divided(chunk)
        if self.cache is not None or not is_whole or not reads_values():
            return None
        whole = Documents(lambda: [spans([0, self.tokens])] * self.rows, self.tokens, self.cache_position.device)
        return whole.divided(chunk)


_FIELDS = tuple(Context.__annotations__)


def shifted_labels(labels: Tensor, segment_start: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """Returns the target of each token: the label of the next token, or `ignore_index` at the end of a segment.

    Args:
        labels: (B, T) token ids.
        segment_start: see `Context`.
        ignore_index: target of a token that predicts nothing.
    """
    shifted = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    if segment_start is not None:
        is_last = F.pad(segment_start[..., 1:] != segment_start[..., :-1], (0, 1), value=True)
        shifted = shifted.masked_fill(is_last, ignore_index)
    return shifted


def _slice_keys(mask: Tensor, offset: int, keys: int) -> Tensor:
    """Returns `keys` entries of the mask's last dimension from `offset` on; entries past its end are masked."""
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return F.pad(mask, (0, max(0, offset + keys - mask.shape[-1])), value=hidden)[..., offset : offset + keys]
