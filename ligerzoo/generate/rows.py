"""The rows of a batch that starts together: their tokens, and the model's KV cache for them, growing or in slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.checks import FLAG
from ligerzoo.generate.graphs import GraphPool, independent_length, model_graphs
from ligerzoo.generate.options import (
    DEFAULT_CACHE,
    CacheOptions,
    CausalModel,
    SupportsGenerate,
    check_option,
    invalid,
    require,
)
from ligerzoo.generate.prompts import Prompts
from ligerzoo.generate.slots import CAPTURED_TOKENS, Slots
from ligerzoo.layers import KVCache
from ligerzoo.layers.capture import can_capture
from ligerzoo.layers.static_cache import DECODE_TOKENS


class BatchRows:
    """The rows of a batch, in a KV cache that grows, with padding on the left.

    Args:
        model: the model.
        prompts: the prompts, which the model reads once for all copies.
        max_new_tokens: largest number of new tokens.
        options: of a new KV cache; the default ones with `cache`, which has its own. None for no cache.
        cache: KV cache to extend in place, None for a new one. In the end it holds all tokens but the newest, and a row
            for each copy. An exception empties it.

    Attributes:
        count: R, the prompts times their copies.
        device: device of the tokens.
        placeholders: token ids of images and videos, which the model refuses among several tokens without their inputs.
        prompts: (R, L) token ids of the prompts, padded on the left; (R, 0) for embeddings.
        prompts_mask: (R, L) bool, False for padding of `prompts`; None for no padding, and for embeddings.
    """

    def __init__(
        self,
        model: CausalModel,
        prompts: Prompts,
        max_new_tokens: int,
        options: CacheOptions | None,
        cache: KVCache | None,
    ) -> None:
        self._prompts, self._copies, self._given_cache = prompts, prompts.copies, cache
        self._end = prompts.length
        self._cached = 0  # tokens in the cache
        self._limit = self._end + max_new_tokens
        self.count, self.device = prompts.rows * prompts.copies, prompts.device
        self.prompts = prompts.ids.repeat_interleave(prompts.copies, 0)
        self._model = model
        # Without what `model.compile()` sets: each kind of step would be compiled, beyond torch's limit for a function.
        self._call: Callable[..., Any] = model._call_impl if isinstance(model, nn.Module) else model
        self.placeholders = frozenset(getattr(model, "placeholders", ()))
        self._uses_cache, self._options = options is not None, options or DEFAULT_CACHE
        if self._given_cache is not None:
            self._options = CacheOptions(self._given_cache.dtype, self._given_cache.exact)
        self._cache = self._empty_cache()
        self._padding_mask: Tensor | None = None
        if prompts.padding_mask is not None:
            self._padding_mask = prompts.padding_mask.repeat_interleave(prompts.copies, 0)
        self.prompts_mask = self._padding_mask if self.prompts.shape[1] > 0 else None
        self._position_ids: Tensor | None = None
        # New tokens, with spare columns. A finished row keeps reading its own tokens: padding may have no embedding.
        self._tokens = torch.empty(self.count, 0, dtype=torch.int64, device=self.device)
        self._newest = self._tokens

    @property
    def is_exact(self) -> bool:
        """Whether the logits are those of a whole forward, to the bit."""
        return self._options.exact

    @property
    def continuations(self) -> Tensor:
        """The tokens after the prompts, (R, new tokens)."""
        return self._tokens[:, : self._end - self._prompts.length]

    @property
    def length(self) -> int:
        """Number of tokens in each row, prompt included."""
        return self._end

    def prefill(self) -> Tensor:
        """Runs the model on the tokens of the prompts that are not in the cache.

        Returns:
            (R, V) fp32 logits of the next tokens.
        """
        prompts, start = self._prompts, 0
        if self._given_cache is not None:
            self._given_cache.make_writable()
            if not self._given_cache.is_valid_for(prompts.length - self._given_cache.length):
                self._given_cache.reset()
            start = self._given_cache.length
        logits = self._forward(prompts.inputs[:, start:], prompts.model_inputs, stride=self._copies)[:, -1]
        if self._copies == 1:
            return logits
        index = torch.arange(prompts.rows, device=self.device).repeat_interleave(self._copies)
        if self._cache is not None:
            self._cache.select_rows(index)
        return logits[index]

    def decode(self) -> Tensor:
        """Runs the model on the newest tokens.

        Recomputes all tokens without a cache, or if the cache cannot serve another token.

        Returns:
            (R, V) fp32 logits of the next tokens.
        """
        if self._uses_cache and (self._cache is None or self._cache.is_valid_for(1)):
            return self._forward(self._newest, {})[:, -1]
        if self._given_cache is not None:
            self._given_cache.reset()
        self._cache = self._empty_cache()
        return self._forward(self._all_inputs(), self._all_model_inputs())[:, -1]

    def score(self, tokens: Tensor) -> Tensor:
        """Appends n tokens to each row, and runs the model on the newest token and on them.

        Args:
            tokens: (R, n) int64, n at most `room_for_drafts(n)`.

        Returns:
            (R, n + 1, V) fp32 logits: of the first of these tokens, of the second, ..., and of the next one.
        """
        inputs = torch.cat([self._newest, tokens], 1)
        self._reserve(tokens.shape[1] + 1)
        self.append(tokens)
        return self._decode_all(inputs)

    def room_for_drafts(self, tokens: int) -> int:
        """Returns how many tokens, up to the given number, `score` can process now."""
        room = self._limit - self._end - 1
        if self._independent_length is not None:
            room = min(room, self._independent_length - self._end)
        return max(0, min(tokens, room))

    @cached_property
    def _independent_length(self) -> int | None:
        return independent_length(self._model)  # type: ignore[arg-type]

    def append(self, tokens: Tensor) -> None:
        """Appends n tokens to each row, (R, n). The model has run since, or `_reserve` was called."""
        column = self._end - self._prompts.length
        self._tokens[:, column : column + tokens.shape[1]] = tokens
        self._newest = tokens[:, -1:]
        self._end += tokens.shape[1]

    def rewind(self, tokens: int) -> None:
        """Removes the last tokens of each continuation, and as many from the cache; some token of it must remain."""
        if tokens > 0:
            self._remove_cached(tokens)
            self._end -= tokens
            self._newest = self.continuations[:, -1:]

    def truncate(self, new_tokens: int) -> None:
        """Drops all but the first tokens of each continuation. The cache keeps those that it holds."""
        self._end = self._prompts.length + new_tokens

    @property
    def keeps_cache(self) -> bool:
        """Whether the cache outlives the call. Then no token may be decoded that `truncate` drops."""
        return self._given_cache is not None

    @property
    def pool(self) -> GraphPool | None:
        """Memory of the captured graphs that compute the logits; None for eager ones."""
        return None

    def release(self, rows: list[int]) -> None:
        """Frees what finished rows need, where this is possible. Their logits are undefined from then on."""

    def __enter__(self) -> BatchRows:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Releases what the model runs need. After an exception, the caller's cache may hold a part of a token."""
        if error is not None and self._given_cache is not None:
            self._given_cache.reset()
        elif self.keeps_cache and (surplus := self._cached - (self._end - 1)) > 0:
            self._remove_cached(surplus)
        self._cache = None

    def _decode_all(self, tokens: Tensor) -> Tensor:
        """Runs the model on the last n tokens, (R, n), and returns the logits (R, n, V) after each."""
        return self._forward(tokens, {}, kept=tokens.shape[1])

    def _remove_cached(self, tokens: int) -> None:
        """Removes the last tokens of the cache."""
        assert self._cache is not None
        self._cache.remove_last(tokens)
        self._cached -= tokens

    def _forward(self, x: Tensor, model_inputs: Mapping[str, object], stride: int = 1, kept: int = 1) -> Tensor:
        """Runs the model on the last tokens of each row, or of each `stride`-th row.

        Returns:
            (R, kept, V) fp32 logits after the last `kept` tokens.
        """
        self._reserve()
        mask, position_ids = None, None
        if self._padding_mask is not None and self._position_ids is not None:
            mask = self._padding_mask[::stride, : self._end]
            position_ids = self._position_ids[::stride, self._end - x.shape[1] : self._end]
        tokens, embeddings = (None, {"inputs_embeds": x}) if x.is_floating_point() else (x, {})
        options = {"past_key_values": self._cache, "use_cache": self._uses_cache, "logits_to_keep": kept}
        output = self._call(tokens, mask, position_ids, **options, **embeddings, **model_inputs)
        self._cache, self._cached = output.past_key_values, self._end
        logits: Tensor = output.logits[:, -kept:].float()
        return logits

    def _empty_cache(self) -> KVCache | None:
        """Returns the cache to start with; None for one that the model makes."""
        if self._given_cache is not None or self._options.is_default:
            return self._given_cache
        return self._options.new_cache(self._model)

    def _all_inputs(self) -> Tensor:
        """Returns all tokens of all rows, or their embeddings if the prompts are embeddings."""
        inputs, new = self._prompts.inputs.repeat_interleave(self._copies, 0), self.continuations
        if inputs.is_floating_point():
            new = self._model.get_input_embeddings()(new)
        return torch.cat([inputs, new], 1)

    def _all_model_inputs(self) -> Mapping[str, object]:
        """Returns the model inputs of all rows."""
        prompts = self._prompts
        if self._copies == 1 or not prompts.model_inputs:
            return prompts.model_inputs
        return self._model.repeat_rows(prompts.model_inputs, self._copies, prompts.ids, prompts.padding_mask)

    def _reserve(self, tokens: int = 1) -> None:
        """Adds columns for new tokens if fewer than `tokens` are free, and computes their position ids."""
        used = self._end - self._prompts.length
        if used + tokens <= self._tokens.shape[1]:
            return
        columns = max(tokens, min(self._end, self._limit - self._end))  # doubling: a logarithmic number of copies
        self._tokens = F.pad(self._tokens, (0, columns))
        if self._padding_mask is not None:
            self._padding_mask = F.pad(self._padding_mask, (0, columns), value=True)
            self._position_ids = (self._padding_mask.cumsum(1) - 1).clamp(min=0)


class SlotRows(BatchRows):
    """`BatchRows` in `Slots`, without padding.

    Prompts that are embeddings, or follow tokens of the caller's cache, are processed as by `BatchRows`, then copied.
    What the caller's cache lacks in the end is copied back.

    Args:
        model, prompts, max_new_tokens, options, cache: see `BatchRows`.
        slots: as many as rows, all empty.
    """

    def __init__(
        self,
        model: CausalModel,
        prompts: Prompts,
        max_new_tokens: int,
        options: CacheOptions,
        cache: KVCache | None,
        slots: Slots,
    ) -> None:
        super().__init__(model, prompts, max_new_tokens, options, cache)
        self._on_device = torch.cuda.device(self.device if self.device.type == "cuda" else -1)
        self._slots = slots

    def __enter__(self) -> SlotRows:
        self._on_device.__enter__()  # type: ignore[no-untyped-call]  # graphs run on the current device
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            super().__exit__(error, *_)
            cache = self._given_cache
            if error is None and cache is not None and (new := self._end - 1 - cache.length) > 0:
                self._slots.export(range(self.count), cache, new)
        finally:
            self._slots.close()
            self._on_device.__exit__(error, *_)

    def prefill(self) -> Tensor:
        new_tokens = self._limit - self._prompts.length
        columns = self._columns()
        cache, is_padded = self._given_cache, self._padding_mask is not None
        if (cache is None or (cache.length == 0 and not is_padded)) and self.prompts.shape[1] > 0:
            if cache is not None:
                cache.make_writable()
            self._reserve()
            self._cached = self._end
            prompts = [ids[index] for ids, index in zip(self.prompts.cpu(), columns, strict=True)]
            return self._slots.admit(range(self.count), prompts, new_tokens)
        logits = super().prefill()
        assert self._cache is not None
        self._slots.adopt(range(self.count), self._cache, columns, new_tokens)
        return logits

    def decode(self) -> Tensor:
        self._reserve()
        self._cached = self._end
        return self._slots.decode(self._newest)

    def room_for_drafts(self, tokens: int) -> int:
        tokens, longest = min(tokens, DECODE_TOKENS - 1), self._slots.max_length
        # Not limited by `max_new_tokens`: each number of tokens would have its own graph.
        return tokens if longest is None else max(0, min(tokens, longest - self._end))

    def release(self, rows: list[int]) -> None:
        if not self.keeps_cache:
            self._slots.release(rows)

    @property
    def pool(self) -> GraphPool | None:
        return self._slots.pool

    def _decode_all(self, tokens: Tensor) -> Tensor:
        self._cached = self._end
        return self._slots.decode(tokens).view(*tokens.shape, -1)

    def _remove_cached(self, tokens: int) -> None:
        for row in range(self.count):
            self._slots.remove_last(row, tokens)
        self._cached -= tokens

    def _columns(self) -> list[Tensor]:
        """Returns the columns of the tokens of each prompt, (T_i,) int64 on the CPU each."""
        if self._padding_mask is None:
            return [torch.arange(self._prompts.length)] * self.count
        return [mask.nonzero()[:, 0] for mask in self._padding_mask[:, : self._prompts.length].cpu()]


def check_rows(
    model: SupportsGenerate, prompts: Prompts, max_new_tokens: int, options: CacheOptions, *, use_cache: object
) -> None:
    """Raises LigerzooError unless the model can continue these prompts with these caches.

    That is, `use_cache` is not a bool or excludes a cache or its options, which exclude each other, the capacity of the
    cache is too small, the model lacks a method that these inputs need, or its exact caches have no padding.

    Args:
        model, prompts, max_new_tokens, options: see `BatchRows`.
        use_cache: whether to keep a KV cache.
    """
    check_option("use_cache", use_cache, FLAG)
    cache = prompts.cache
    require(bool(use_cache) or cache is None, "use_cache", "False with past_key_values", "True")
    options.check(model)
    for option, name, value in (("cache_dtype", "dtype", options.dtype), ("exact", "exact", options.exact)):
        if value:
            require(bool(use_cache), option, f"{value} with use_cache=False", "use_cache=True")
            remedy = f"Pass past_key_values=model.new_cache({name}={value})."
            require(cache is None, option, f"{value} with past_key_values", "one of the two", remedy)
    for option, method, is_needed in (
        ("inputs_embeds", "get_input_embeddings", prompts.inputs.is_floating_point()),
        ("num_return_sequences", "repeat_rows", prompts.copies > 1 and bool(prompts.model_inputs)),
    ):
        got = f"a {type(model).__name__} without {method}"
        expected = f"a model with the method {method}, like ligerzoo.models.CausalLM"
        require(not is_needed or hasattr(model, method), option, got, expected)
    if cache is not None:
        tokens = prompts.length + max_new_tokens - 1
        expected, remedy = (
            "the prompt and all new tokens but the last",
            "Pass model.new_cache() for a cache that grows.",
        )
        fits, got = cache.capacity is None or tokens <= cache.capacity, f"a cache of capacity {cache.capacity}"
        require(fits, "past_key_values", got, f"at least {tokens}, {expected}", remedy)
    if options.exact and prompts.padding_mask is not None and _slots(model, prompts, max_new_tokens, options) is None:
        got = "prompts of several lengths, by a model whose decode steps are not captured"
        raise invalid("exact", got, "prompts of one length", "Call generate for each prompt.")


def choose_rows(
    model: SupportsGenerate,
    prompts: Prompts,
    max_new_tokens: int,
    options: CacheOptions | None = DEFAULT_CACHE,
    *,
    is_rewindable: bool = False,
) -> BatchRows:
    """Returns `SlotRows` where decode steps can be captured, else `BatchRows`. `check_rows` has passed.

    Args:
        model, prompts, max_new_tokens, options: see `BatchRows`.
        is_rewindable: whether any number of tokens can be removed later: the cache of the prompts, which is empty if it
            drops tokens, or a new one keeps all of them from now on.
    """
    model, cache = cast(CausalModel, model), prompts.cache
    if is_rewindable and cache is not None and cache.drops_tokens:
        cache.keep_all_tokens()
    if options is not None and (slots := _slots(model, prompts, max_new_tokens, options)) is not None:
        return SlotRows(model, prompts, max_new_tokens, options, cache, slots)
    if is_rewindable and cache is None and options is not None:
        cache, options = options.new_cache(model), DEFAULT_CACHE
        cache.keep_all_tokens()
    return BatchRows(model, prompts, max_new_tokens, options, cache)


def _slots(model: SupportsGenerate, prompts: Prompts, max_new_tokens: int, options: CacheOptions) -> Slots | None:
    """Returns slots for the rows, free of padding; None where steps are not captured, or it does not pay."""
    has_tokens = prompts.cache is not None and prompts.cache.length > 0
    starts_at_once = not has_tokens and prompts.rows * prompts.length <= CAPTURED_TOKENS
    if not ((max_new_tokens > 2 or starts_at_once) and isinstance(model, nn.Module) and can_capture(model)):
        return None
    if (cache := prompts.cache) is not None:
        options = CacheOptions(cache.dtype, cache.exact)
    slots = Slots(model, prompts.rows * prompts.copies, options=options, graphs=model_graphs(model))
    is_short = slots.max_length is None or prompts.length + max_new_tokens <= slots.max_length
    return slots if is_short else None
