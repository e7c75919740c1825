"""What all layers of one forward share: where the tokens stand, what they may see, and the rotations made of that.

Shapes: B batch, T tokens in the call, S keys that attention is handed (cached and new), R rotated features of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.layers.cache import KVCache, LayerCache
from ligerzoo.layers.masks import Mask
from ligerzoo.layers.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from ligerzoo.layers.cross_attention_inputs import CrossAttentionInputs

_NO_CACHE = KVCache([])

_ATTRIBUTES = (
    "rows",
    "tokens",
    "cache",
    "padding_mask",
    "segment_start",
    "last_visible",
    "cross_attention_inputs",
    "position_ids",
    "router_logits",
    "_ready",
    "cache_position",
    "_end",
    "_rotations",
    "_masks",
)
"""All that a context has."""


class Context:
    """Made once a forward; rotations and masks are made when the first layer asks for them, and kept for the others.

    Args:
        x: (B, T) token ids or (B, T, H) embeddings, of which only the shape and the device matter.
        attention_mask: (B, S), 1 for a token and 0 for padding, cached tokens included; or a ready mask (B, 1, T, S)
            for every layer, boolean (True: visible) or to be added, each row of which sees something; or a `Mask` for
            every layer, without a cache; or None.
        position_ids: (B or 1, T), or (A, B or 1, T) on several axes; by default the tokens' places, counted from the
            start of their text. Without a cache and padding, a position on a single axis that is not the one before it
            plus 1 begins another text, as in transformers.
        cu_seqlens: (n + 1,) int, where n texts packed into one row begin and end: 0, ..., at most T. What follows the
            last of them is padding.
        cache: what came before; it will take up these tokens.

    Attributes:
        cache: as given.
        position_ids: (B or 1, T) or (A, B or 1, T) int64.
        segment_start: (B or 1, T) int64, where the text begins that a token belongs to; None if all begin at 0.
        padding_mask: (B, S) bool, False for padding; None where all tokens are known to be real.
        last_visible: (B, T) int64, the place up to which each token sees with causality; None for its own.
        memory: what cross-attention looks at; None, which it is at first, for nothing.
        router_logits: of each mixture of experts, (B * T, E), in the order of the layers.

    Raises:
        ValueError: the inputs do not fit together.
    """

    def __init__(
        self,
        x: Tensor,
        attention_mask: Tensor | Mask | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> None:
        if x.ndim not in (2, 3) or x.shape[1] == 0:
            raise ValueError(f"tokens of shape {tuple(x.shape)}; expected (B, T) ids or (B, T, H) embeddings, T > 0")
        if not (cache is None or isinstance(cache, KVCache)):
            raise ValueError(f"a cache of type {type(cache).__name__}; expected one that the model's new_cache() made")
        self.rows, self.tokens = x.shape[:2]
        self.cache = cache
        if cache is not None and not cache.serves(self.tokens):
            raise ValueError(
                f"the cache holds {cache.length} tokens whose keys are rotated for at most {cache.useful_until}: "
                "read all tokens anew, with a new cache"
            )
        if cu_seqlens is not None:
            _check_packing(cu_seqlens, x, attention_mask, cache)
        self._ready: Tensor | Mask | None = None
        self.padding_mask: Tensor | None = None
        if isinstance(attention_mask, Mask) or (
            attention_mask is not None and _checked(attention_mask, self.rows, self.tokens, cache).ndim == 4
        ):
            self._ready = attention_mask
        elif attention_mask is not None:
            self.padding_mask = attention_mask.to(x.device, torch.bool).expand(self.rows, -1)
            # Looking at the mask makes the host wait for a GPU, once a prompt; without padding that buys attention
            # kernels which take no mask.
            if self.tokens > 1 and not torch.compiler.is_compiling() and bool(self.padding_mask.all()):
                self.padding_mask = None
        self.cache_position = places = (cache or _NO_CACHE).positions(self.tokens, x.device)
        self.segment_start: Tensor | None = None
        self.last_visible: Tensor | None = None
        self._end: Tensor | None = None  # 0-d: of packed texts
        if cu_seqlens is not None:
            bounds = cu_seqlens.to(x.device, torch.int64)
            self._end = bounds[-1]
            text = torch.searchsorted(bounds, places, right=True) - 1
            self.segment_start = bounds[text][None]
        elif position_ids is not None and position_ids.ndim == 2 and cache is None and attention_mask is None:
            self.segment_start = _segment_starts(position_ids)
        if position_ids is None:
            position_ids = self._places_in_text()
        self.position_ids = position_ids
        self.cross_attention_inputs: CrossAttentionInputs | None = None
        self.router_logits: list[Tensor] = []
        self._rotations: dict[tuple[RotaryEmbedding, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[object, ...], tuple[tuple[int, int], Mask | Tensor | None]] = {}

    def fork(self) -> Context:
        """A context whose notes are not this one's, for a layer that is computed again in the backward pass."""
        fork = object.__new__(Context)
        for name in _ATTRIBUTES:  # which torch.compile can follow in all versions, other than copy.copy
            setattr(fork, name, getattr(self, name))
        fork.router_logits = []
        if torch.compiler.is_compiling():  # which lets nothing out of such a layer but what it returns
            fork._rotations, fork._masks = dict(self._rotations), dict(self._masks)
        return fork

    def call_padding_mask(self) -> Tensor | None:
        """(B, T) bool: which of the call's tokens are no padding; None where all are known to be real."""
        if self._end is not None:
            return (self.cache_position < self._end)[None]
        return None if self.padding_mask is None else self.padding_mask[:, self.cache_position]

    def token_positions(self) -> Tensor:
        """(B or 1, T) int64: how many tokens of its text, padding not counted, stand before each token."""
        if self.padding_mask is not None:
            return (self.padding_mask.cumsum(1) - 1).clamp(min=0)[:, self.cache_position]
        return self._places_in_text()

    def _places_in_text(self) -> Tensor:
        """(B or 1, T) int64: how many tokens of its text, padding counted, stand before each token."""
        return (self.cache_position if self.segment_start is None else self.cache_position - self.segment_start).view(
            -1, self.tokens
        )

    def allow_bidirectional_spans(self, here: Tensor) -> None:
        """Lets tokens side by side for which `here` is true, such as those of an image, see those of them that come
        after, too. A run of them ends with its text.

        Args:
            here: (B, T) bool.
        """
        goes_on = here[:, :-1] & here[:, 1:]
        if self.segment_start is not None:
            goes_on = goes_on & (self.segment_start[:, :-1] == self.segment_start[:, 1:])
        # As with the attention mask, looking makes the host wait for a GPU, and may save the layers a mask.
        if torch.compiler.is_compiling() or bool(goes_on.any()):
            goes_on = F.pad(goes_on, (0, 1), value=False)
            ends = self.cache_position.masked_fill(goes_on, torch.iinfo(torch.int64).max)
            self.last_visible = ends.flip(1).cummin(1).values.flip(1)

    def rotation(self, rotary: RotaryEmbedding, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens' angles, (B or 1, T, R/2) each, for queries and keys of this dtype."""
        if (rotary, dtype) not in self._rotations:
            self._rotations[rotary, dtype] = rotary(self.position_ids, dtype)
        return self._rotations[rotary, dtype]

    def mask(
        self,
        keys: int,
        *,
        window: int | None = None,
        is_causal: bool = True,
        cache: LayerCache | None = None,
        even_if_plain: bool = False,
    ) -> Mask | Tensor | None:
        """What the tokens see of S = `keys` keys, the last that the layer's cache returned.

        Args:
            keys: S.
            window: how many tokens a token sees, itself included: from i - window + 1 on, and without causality up to
                i + window - 1.
            is_causal: no token sees one after it.
            cache: the layer's.
            even_if_plain: make a mask even where `attend` needs none.

        Returns:
            A mask, or the ready one that was given; None where `attend` needs none: tokens that see all before them
            and themselves, or, without causality, everything.
        """
        offset = cache.offset if cache is not None else 0
        kind = window, is_causal, even_if_plain
        made_for, mask = self._masks.get(kind, (None, None))
        if made_for != (keys, offset):  # no part of the dict's key, for torch.compile would take them for constants
            has_unwritten = cache is not None and cache.has_unwritten and self.tokens == 1
            mask = self._mask(keys, offset, window, is_causal, even_if_plain or has_unwritten)
            self._masks[kind] = (keys, offset), mask
        return mask

    def _mask(
        self, keys: int, offset: int, window: int | None, is_causal: bool, even_if_plain: bool
    ) -> Mask | Tensor | None:
        if isinstance(self._ready, Mask):
            return self._ready
        if self._ready is not None:
            return _of_keys(self._ready, offset, keys)
        is_windowed = window is not None and keys > window
        is_chunk = is_causal and 1 < self.tokens < keys
        is_plain = self.padding_mask is None and self.segment_start is None and self.last_visible is None
        if is_plain and not (is_windowed or is_chunk or even_if_plain):
            return None
        query = self.cache_position - offset
        first = torch.zeros_like(query)[None] if self.segment_start is None else self.segment_start
        if is_causal:
            last = query[None].expand_as(first) if self.last_visible is None else self.last_visible - offset
        elif self.segment_start is None:
            last = torch.full_like(first, keys - 1)
        else:
            last = torch.searchsorted(self.segment_start, self.segment_start, right=True) - 1
        first = first.expand_as(last)
        if window is not None:
            first = torch.maximum(first, query - window + 1)
            last = last if is_causal else torch.minimum(last, query + window - 1)
        real = None if self.padding_mask is None else _of_keys(self.padding_mask, offset, keys)
        return Mask(query, first, last, keys, real)


def shifted_labels(labels: Tensor, starts: Tensor | None = None, ignored: int = -100) -> Tensor:
    """What each token should predict: the label of the next one, and nothing at the end of a text.

    Args:
        labels: (B, T) token ids.
        segment_start: see `Context`.
        ignored: the label of a token that predicts nothing.
    """
    shifted = F.pad(labels[..., 1:], (0, 1), value=ignored)
    if starts is not None:
        is_last = F.pad(starts[..., 1:] != starts[..., :-1], (0, 1), value=True)
        shifted = shifted.masked_fill(is_last, ignored)
    return shifted


def _check_packing(cu_seqlens: Tensor, x: Tensor, attention_mask: Tensor | Mask | None, cache: KVCache | None) -> None:
    """Raises ValueError unless these are the bounds of texts in one row. Their values are looked at on a CPU alone, for
    it would make the host wait for a GPU."""
    if cache is not None or attention_mask is not None or len(x) != 1:
        raise ValueError("cu_seqlens say which tokens of one row belong together: no batch, mask or cache with it")
    is_list = isinstance(cu_seqlens, Tensor) and cu_seqlens.ndim == 1 and len(cu_seqlens) > 0
    if not is_list or cu_seqlens.is_floating_point():
        got = f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens)
        raise ValueError(f"cu_seqlens: {got}; expected a tensor of integers, (n + 1,)")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > x.shape[1]:
            shown = f"{bounds[:8]}{' and so on' if len(bounds) > 8 else ''}"
            raise ValueError(f"cu_seqlens: {shown}; expected to ascend from 0 to at most {x.shape[1]}")


def _checked(attention_mask: Tensor, rows: int, tokens: int, cache: KVCache | None) -> Tensor:
    """The mask, if it covers the cached and the new tokens.

    Raises:
        ValueError: it does not.
    """
    shape, keys = tuple(attention_mask.shape), tokens + (cache.length if cache is not None else 0)
    if attention_mask.ndim == 4:
        if shape[2:] != (tokens, keys):
            raise ValueError(f"attention_mask has shape {shape}; expected (batch, 1, {tokens}, {keys})")
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise ValueError(f"a ready attention_mask is boolean or to be added; got {attention_mask.dtype}")
    elif (
        attention_mask.ndim != 2
        or shape[0] not in (1, rows)
        or shape[1] not in (keys, cache.capacity if cache is not None else None)
    ):
        raise ValueError(
            f"attention_mask has shape {shape}; expected ({rows}, {keys}): one entry for each cached and new token"
        )
    return attention_mask


def _of_keys(mask: Tensor, offset: int, keys: int) -> Tensor:
    """The mask's last dimension for so many keys from `offset` on; those it does not tell of are hidden."""
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return F.pad(mask, (0, max(0, offset + keys - mask.shape[-1])), value=hidden)[..., offset : offset + keys]


def _segment_starts(position_ids: Tensor) -> Tensor | None:
    """(B or 1, T): the place at which the positions last began anew; None if they nowhere do."""
    begins = F.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0), value=False)
    if not torch.compiler.is_compiling() and not bool(begins.any()):
        return None
    places = torch.arange(begins.shape[1], device=begins.device)
    return (places * begins).cummax(1).values
