"""The key-value caches of all layers of a decoder.

Shapes: B batch, T new tokens, S tokens passed to attention, K key-value heads, D head size.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ligerzoo.kernels.fp8 import FP8
from ligerzoo.layers.cache import BlockCache, LayerCache, RollingLayerCache, TokenCache, writable
from ligerzoo.layers.static_cache import StaticCache, StaticLayerCache, StaticPosition

_TOKEN_CACHES = {TokenCache, RollingLayerCache, StaticLayerCache}
"""Kinds of caches that a cache of all tokens can replace."""


def new_layer_cache(layer: nn.Module, capacity: int | None = None) -> BlockCache:
    """Returns `layer.new_cache(capacity)`; for a layer without this method, a cache that its parts can use.

    That is a cache of all tokens, which is correct for every kind of self-attention, and unused by a layer without
    attention; or the cache of the only part with a method `new_cache` if it is of another kind, such as a state.

    Args:
        layer: a block or attention.
        capacity: maximum number of tokens, for a cache of fixed size; None for a growing or rolling cache.

    Raises:
        ValueError: the layer has no `new_cache`, and several parts with caches of different kinds.
    """
    if hasattr(layer, "new_cache"):
        return layer.new_cache(capacity)  # type: ignore[operator, no-any-return]
    parts = dict(_parts_with_cache("", layer))
    caches = [part.new_cache(capacity) for part in parts.values()]
    others = [cache for cache in caches if type(cache) not in _TOKEN_CACHES]
    if len(caches) == len(others) == 1:
        return others[0]  # type: ignore[no-any-return]
    has_self_attention = len(others) < len(caches)
    if others and not (has_self_attention and not any(cache.counts_tokens for cache in others)):
        listed = ", ".join(f"{name} ({type(part).__name__})" for name, part in parts.items())
        raise ValueError(
            f"{type(layer).__name__}: no method new_cache, and several parts with caches of different kinds: {listed}; "
            "expected new_cache(capacity=None), which returns the cache of the part to which forward passes it"
        )
    return TokenCache() if capacity is None else StaticLayerCache(capacity)


def _parts_with_cache(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the outermost modules within a module, itself included, that have a method `new_cache`."""
    if hasattr(module, "new_cache"):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _parts_with_cache(f"{name}.{child_name}".lstrip("."), child)


class CacheSize(NamedTuple):
    """Memory of the KV cache of a decoder, in bytes.

    Attributes:
        per_token: of a token in all layers of one window, by the window; None for full attention.
        states: of the states of recurrent layers for one sequence.
    """

    per_token: Counter[int | None]
    states: int


def cache_size(model: nn.Module, dtype: torch.dtype | None = None) -> CacheSize:
    """Returns the memory that the layers of a decoder need for their caches: `cached_features` and `state_bytes`.

    Skips layers without these, which are not those of ligerzoo.

    Args:
        model: the decoder.
        dtype: of the keys and values; None for that of the weights.
    """
    itemsize = (next(model.parameters()).dtype if dtype is None else dtype).itemsize
    per_token: Counter[int | None] = Counter()
    states = 0
    for layer in model.modules():
        if features := getattr(layer, "cached_features", 0):
            per_token[getattr(layer, "window", None)] += features * itemsize
        states += getattr(layer, "state_bytes", 0)
    return CacheSize(per_token, states)


def check_cache_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype of a KV cache; raises ValueError unless it is None or float8_e4m3fn."""
    if dtype not in (None, FP8):
        raise ValueError(f"KV cache: dtype={dtype!r}; expected {FP8}, or None for the dtype of the keys and values")
    return dtype


class KVCache:
    """The caches of all layers of a decoder.

    Args:
        layers: one per layer, of any classes, or a pair. `Decoder.new_cache` chooses them by layer.
        dtype: float8_e4m3fn stores keys and values in half the memory of bf16. They are rounded to it, without scales,
            as they are written; beyond +-448 they become +-448. Each token attends to the rounded ones, its own
            included, so results do not depend on how a prompt is divided into calls. None stores them unchanged. The
            states of recurrent layers stay in their dtypes.
        exact: results of tokens have the same bits as in one forward of the whole text without a cache, whatever the
            calls, batches and rows; see `layers.exactness`. All tokens are kept, also in sliding-window layers.

    Attributes:
        dtype, exact: as given.
        max_valid_length: sequence length up to which cached keys stay valid, since longer sequences use other rotary
            frequencies (LongRoPE); None for no limit.
        position_offset: (B or 1, 1) int64, position ids of future tokens minus their sequence indices (M-RoPE, where
            images span fewer positions than tokens); None for 0.
        last_image_mask: (B, 1, images, tiles) bool, the cross-attention mask of the last token; None for all images.
        prompt_lengths: (B,) int64, the first tokens of each row that count, the rest being padding; None for all.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, layers: Iterable[BlockCache], dtype: torch.dtype | None = None, *, exact: bool = False) -> None:
        self.dtype, self.exact = check_cache_dtype(dtype), exact
        self.max_valid_length: int | None = None
        self.position_offset: Tensor | None = None
        self.last_image_mask: Tensor | None = None
        self.prompt_lengths: Tensor | None = None
        self._set_layers(layers)
        if exact:
            self.keep_all_tokens()

    def _set_layers(self, layers: Iterable[BlockCache]) -> None:
        self.layers = list(layers)
        self._parts = [part for layer in self.layers for part in layer.parts]
        self._self_attention = [part for part in self._parts if part.counts_tokens]
        self._cross_attention = [part for part in self._parts if not part.counts_tokens]
        self._static = [cast(StaticCache, part) for part in self._parts if part.is_static]
        for part in self._parts:
            part.dtype = self.dtype
        for layer in self._static:
            layer.position = self._position

    @property
    def _position(self) -> StaticPosition:
        """The lengths of the rows, which all static caches share."""
        return self._static[0].position

    @property
    def is_static(self) -> bool:
        """Whether the caches of all layers have a fixed size, so that a decode step can be captured in a CUDA graph."""
        return len(self._static) == len(self._parts) > 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of static caches."""
        buffers = [buffer for layer in self._static for buffer in (layer._keys, layer._values)]
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state instead of tokens, so that tokens cannot be removed."""
        return any(part.is_recurrent for part in self._parts)

    @property
    def drops_tokens(self) -> bool:
        """Whether a sliding-window layer drops tokens, see `keep_all_tokens`."""
        return any(part.drops_tokens for part in self._parts)

    def require_tokens(self, what: str) -> None:
        """Raises ValueError if a layer is recurrent, so that tokens cannot be removed.

        Args:
            what: what needs to remove tokens, for the error message.
        """
        if self.is_recurrent:
            raise ValueError(
                f"{what}: the model has recurrent layers, such as GatedDeltaNet, which keep a state instead of tokens; "
                "expected a model with self-attention only, since tokens must be removed again"
            )

    def set_length(self, length: int) -> None:
        """Sets the number of tokens that the host knows. A replayed CUDA graph counts on the device only."""
        for layer in self._static:
            layer.length = length
        if self._static:
            self._position.length = length

    def reset(self) -> None:
        """Empties all caches; the memory of static ones stays allocated."""
        for part in self._parts:
            part.reset()
        if self._static:
            self._position.set(0, 0)
        self.position_offset = self.last_image_mask = None

    def set_lengths(self, lengths: Tensor, longest: int) -> None:
        """Sets the number of tokens in each row of static caches; the next ones are written after them.

        Args:
            lengths: (B,) int64.
            longest: the largest of them, or an upper bound.
        """
        self.set_length(longest)
        self._position.set(lengths, longest)

    def prefill_rows(self, index: Tensor, rows: int, prompt_lengths: Tensor | None = None) -> KVCache:
        """Returns a cache that writes prompts to some rows of these static caches; see `PrefillRows`.

        Args:
            index: (n,) int64, the rows.
            rows: B.
            prompt_lengths: (n,) int64; None if all are equal. Recurrent layers ignore the tokens that follow.
        """
        layers = (layer.map(lambda part: cast(StaticCache, part).prefill_rows(index, rows)) for layer in self.layers)
        cache = KVCache(layers, self.dtype, exact=self.exact)
        cache.prompt_lengths = prompt_lengths
        return cache

    def copy_rows_from(
        self,
        other: KVCache,
        sources: Tensor | slice,
        targets: Tensor,
        rows: int,
        tokens: int,
        *,
        frees: bool = False,
    ) -> None:
        """Copies the first tokens of n rows of static caches to n rows of these; `set_lengths` sets their lengths.

        Args:
            other: the caches to copy from, which may be these.
            sources: n of their rows, (n,) int64 or a slice.
            targets: (n,) int64, rows of these caches.
            rows: B of these caches.
            tokens: number of tokens, for which both have room.
            frees: free the memory of each layer of `other` when it is copied. `other` cannot be used afterwards.
        """
        for layer, source in zip(self._static, other._static, strict=True):
            layer.copy_rows_from(source, sources, targets, rows, tokens)
            if frees:
                source.free()

    def copy_tokens_from(self, other: KVCache, source: int, columns: Tensor, target: int, rows: int) -> None:
        """Copies tokens of a row of another cache, of any kind, to the first positions of a row of static caches.

        Tokens that a sliding window has dropped are left out: no later token attends to them.

        Args:
            other: the other cache.
            source: its row.
            columns: (n,) int64 on the CPU, ascending sequence indices of the tokens.
            target: row of these caches.
            rows: B of these caches.
        """
        for part, other_part in zip(self._static, other._parts, strict=True):
            part.copy_tokens_from(other_part, source, columns, target, rows)

    def append_tokens_to(self, other: KVCache, rows: Tensor, positions: Tensor) -> None:
        """Appends tokens of static caches to another cache of any kind.

        Args:
            other: the other cache, of B rows.
            rows: (B,) int64, rows of these caches.
            positions: (B, n) int64, positions of the tokens in each row.
        """
        for part, other_part in zip(self._static, other._parts, strict=True):
            part.append_tokens_to(other_part, rows, positions)

    def is_valid_for(self, tokens: int) -> bool:
        """Whether `tokens` more tokens can reuse the cached keys; if not, process all tokens with a new cache."""
        limit = self.max_valid_length
        return limit is None or not 0 < self.length <= limit < self.length + tokens

    @property
    def _counter(self) -> LayerCache | None:
        """The layer that counts tokens: the first with any, since a layer without attention appends none."""
        for layer in self._self_attention:
            if layer.length > 0:
                return layer
        return self._self_attention[0] if self._self_attention else None

    @property
    def length(self) -> int:
        """Number of tokens in the cache, padding included; an upper bound for static caches, see `StaticPosition`."""
        return counter.length if (counter := self._counter) else 0

    @property
    def cross_attention_length(self) -> int:
        """Number of states in the cache of each cross-attention layer."""
        return self._cross_attention[0].length if self._cross_attention else 0

    @property
    def capacity(self) -> int | None:
        """Maximum number of tokens; None for no limit."""
        return counter.capacity if (counter := self._counter) else None

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the sequence indices of the next T = `tokens` tokens, (B or 1, T) int64."""
        counter = self._counter
        return torch.arange(tokens, device=device)[None] if counter is None else counter.positions(tokens, device)

    @property
    def rows(self) -> int | None:
        """Batch size of the cached tokens; None for an empty cache."""
        return next((part.rows for part in self._parts if part.rows is not None), None)

    def select_rows(self, index: Tensor) -> None:
        """Makes row i of all caches a copy of row `index[i]`; see `LayerCache.select_rows`."""
        rows = self.rows
        for part in self._parts:
            part.select_rows(index)
        if self._static and (lengths := self._position.lengths) is not None:
            self._position.lengths = lengths.index_select(0, index.to(lengths.device))
        for name in ("position_offset", "last_image_mask", "prompt_lengths"):
            value = getattr(self, name)
            if value is not None and len(value) == rows:  # else 1 row, the same for all
                setattr(self, name, value.index_select(0, index.to(value.device)))

    def remove_last(self, tokens: int | Tensor) -> None:
        """Removes the last tokens; cross-attention caches keep their states. See `LayerCache.remove_last`.

        Caches of recurrent layers cannot remove tokens; see `is_recurrent`.

        Args:
            tokens: number of tokens; of each row, (B,) int64 on the device, if all caches are static and not empty.
                Then `length`, which the host knows, does not change; see `set_lengths`.

        Raises:
            ValueError: there are fewer tokens, or a number for each row but caches that are empty or not static.
        """
        if isinstance(tokens, Tensor):
            self.require_tokens("remove_last")
            lengths = self._position.lengths if self.is_static else None
            if lengths is None:
                raise ValueError("remove_last: got a tensor; expected an int, since the caches are empty or not static")
            lengths -= tokens
            return
        # A layer without keys and values appends nothing, and `set_length` gives it a length.
        layers = [layer for layer in self._self_attention if layer.length > 0 and layer.rows is not None]
        for layer in layers:
            layer.check_removal(tokens)
        for layer in layers:
            layer.remove_last(tokens)

    def reorder(self, indices: Tensor) -> None:
        """Another name of `select_rows`."""
        self.select_rows(indices)

    def crop(self, length: int) -> None:
        """Keeps the first tokens only. To keep none empties the cache, as `reset` does.

        Positions and masks of images stay those after the last image, so only remove text that follows it.

        Args:
            length: number of tokens to keep, padding included.

        Raises:
            ValueError: the cache holds fewer tokens, the number is negative, or a layer with a sliding window has
                dropped tokens that the window would reach again; see `keep_all_tokens`; or a layer is recurrent. The
                cache is unchanged then.
        """
        if not 0 <= length <= self.length:
            remedy = ". remove_last(n) removes the last n tokens" if length < 0 else ""
            raise ValueError(f"KVCache.crop: got length={length}; expected 0 to {self.length}{remedy}")
        if length == 0:
            self.reset()
        else:
            self.remove_last(self.length - length)

    def clone(self) -> KVCache:
        """Returns an independent copy, for example to continue one prompt in several ways."""
        clone = copy.copy(self)
        clone._set_layers(layer.map(lambda part: part.clone()) for layer in self.layers)
        if clone._static:
            position = clone._position.clone()
            for layer in clone._static:
                layer.position = position
        return clone

    def make_writable(self) -> None:
        """Copies tensors that were created within `torch.inference_mode`, which cannot be updated outside of it."""
        for part in self._parts:
            part.make_writable()
        if self._static:
            position = self._position
            position.lengths = writable(position.lengths)

    def keep_all_tokens(self) -> None:
        """Makes an empty cache keep all tokens, also in sliding-window layers, so that any number can be removed.

        Raises:
            ValueError: the cache holds tokens already, or a layer is recurrent.
        """
        self.require_tokens("keep_all_tokens")
        if self.drops_tokens:
            if self.length > 0:
                raise ValueError(f"keep_all_tokens: the cache holds {self.length} tokens; expected an empty cache")
            self._set_layers(
                layer.map(lambda part: TokenCache() if part.drops_tokens else part) for layer in self.layers
            )

    def get_seq_length(self) -> int:
        """Returns `length`; the name that Hugging Face's caches use."""
        return self.length
