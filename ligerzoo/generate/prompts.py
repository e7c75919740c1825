"""The prompts of `generate`: token ids or embeddings, aligned for the model; requests: prompts with their options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ligerzoo.checks import FLAG, instances, integer, is_integer, is_list, or_none
from ligerzoo.errors import LigerzooError
from ligerzoo.generate.options import (
    CausalModel,
    SupportsGenerate,
    check_devices,
    check_option,
    count_new_tokens,
    invalid,
    no_such_option,
    parse_call,
    require,
    token_ids,
    type_name,
)
from ligerzoo.generate.sampling import check_generator
from ligerzoo.generate.streaming import StopStrings, SupportsDecode
from ligerzoo.layers import KVCache
from ligerzoo.sampling_options import SAMPLING_OPTIONS
from ligerzoo.tensor_checks import kind_of

MAX_TOP_LOGPS = 20
"""Number of the most likely tokens that the device finds for each token, if any are asked for."""

MAX_LOGP_TOKENS = 128
"""Number of tokens that a request may name, see `RequestOptions`."""

_LOGP_TOKENS = instances(
    f"a list of 1 to {MAX_LOGP_TOKENS} token ids",
    lambda value: (
        is_list(value) and 0 < len(value) <= MAX_LOGP_TOKENS and all(map(integer(0, 2**31 - 1).accepts, value))
    ),
)


class Prompts:
    """The prompts of a call of `generate`.

    Args:
        model: the model.
        input_ids: (B, T) token ids; may be None if there are embeddings.
        attention_mask: (B, T), 1 for a token and 0 for padding; None for no padding.
        inputs_embeds: (B, T, H) embeddings that the model reads instead of the token ids, or None.
        cache: KV cache that holds the first tokens of the prompts, or None.
        model_inputs: further model inputs for the tokens that are not in the cache.
        copies: sequences per prompt: rows a, b become a, a, b, b.

    Attributes:
        rows, tokens: B and T.
        copies, cache: as given.
        given: (B, T) int64 token ids as they were passed; (B, 0) if there are embeddings only.
        ids: (B, L) token ids for the model, padded on the left to the longest prompt; (B, 0) if there are embeddings
            only. Each padding id is replaced by the last token of its row: padding may have no embedding.
        inputs: what the model reads: `ids`, or (B, L, H) embeddings.
        padding_mask: (B, L) bool, False for padding; None for no padding.
        model_inputs: further model inputs. Those per token have the columns of `inputs` that are not in the cache.

    Raises:
        LigerzooError: a shape or type is wrong, a prompt is empty, the cache does not fit, or the model refuses the
            inputs.
    """

    def __init__(
        self,
        model: SupportsGenerate,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        cache: KVCache | None,
        model_inputs: Mapping[str, object],
        copies: int = 1,
    ) -> None:
        self.copies, self.cache = copies, cache
        name = "input_ids" if inputs_embeds is None else "inputs_embeds"
        whole = _checked_inputs(input_ids, inputs_embeds)
        self.rows, self.tokens = rows, tokens = tuple(whole.shape[:2])
        self.device = whole.device
        check_devices(model, name, whole)
        mask = _checked_mask(attention_mask, rows, tokens, name, self.device)
        cached = 0 if cache is None else _checked_cache(model, cache, rows, tokens).length
        columns = None
        if mask is not None and cache is None:
            columns = _columns_of_tokens(mask)
            mask = _take(mask, columns)
        elif mask is not None:
            _check_mask_of_cached(model, mask)
        self.padding_mask = None if mask is None or bool(mask.all()) else mask

        self.given = self.ids = torch.empty(rows, 0, dtype=torch.int64, device=self.device)
        if input_ids is not None:
            self.given = input_ids.long()
            self.ids = _without_padding_ids(_take(self.given, columns), self.padding_mask)
        self.inputs = self.ids if inputs_embeds is None else _take(inputs_embeds, columns)
        self.model_inputs = dict(model_inputs)
        for input_name in getattr(model, "inputs_per_token", ()):
            if (value := self.model_inputs.get(input_name)) is not None:
                if not isinstance(value, Tensor) or value.shape[:2] != (rows, tokens):
                    got = tuple(value.shape) if isinstance(value, Tensor) else type_name(value)
                    raise invalid(input_name, got, f"(B, T, ...) with the shape {(rows, tokens)} of {name}")
                self.model_inputs[input_name] = _take(value, columns)[:, cached:]
        if hasattr(model, "check_inputs") and inputs_embeds is None:
            new_mask = None if self.padding_mask is None else self.padding_mask[:, cached:]
            model.check_inputs(self.ids[:, cached:], new_mask, cache, **self.model_inputs)

    @property
    def length(self) -> int:
        """L, the number of columns that the model reads."""
        return self.inputs.shape[1]


def _columns_of_tokens(mask: Tensor) -> Tensor:
    """Returns the columns (B, L) of the longest prompt's length, where those of padding come first."""
    return mask.argsort(stable=True, dim=1)[:, -int(mask.sum(1).amax()) :]


def _take(x: Tensor, columns: Tensor | None) -> Tensor:
    """Returns these columns of x: (B, T, ...) and (B, L) -> (B, L, ...); x itself for None."""
    if columns is None:
        return x
    return x[torch.arange(len(x), device=x.device)[:, None], columns.to(x.device)]


def _without_padding_ids(ids: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Replaces padding ids, which may have no embedding, by the last token of the row."""
    return ids if padding_mask is None else ids.where(padding_mask, ids[:, -1:])


def _checked_inputs(input_ids: object, inputs_embeds: object) -> Tensor:
    """Returns what the model reads: the embeddings if there are any.

    Raises:
        LigerzooError: a shape or type is wrong, or both are missing.
    """
    if input_ids is None and inputs_embeds is not None:
        return _checked_tensor("inputs_embeds", inputs_embeds, "floating-point", "embeddings", "B, T, H")
    match input_ids:
        case str():
            remedy = "Encode text first: generate(**tokenizer([text], return_tensors='pt'))."
        case Mapping():
            remedy = "Pass the output of a tokenizer as generate(**inputs)."
        case None:
            remedy = "Pass input_ids or inputs_embeds."
        case _:
            remedy = "Use torch.as_tensor(input_ids)."
    ids = _checked_tensor("input_ids", input_ids, "integer", "integers", "B, T", remedy)
    if inputs_embeds is None:
        return ids
    embeddings = _checked_tensor("inputs_embeds", inputs_embeds, "floating-point", "embeddings", "B, T, H")
    expected = tuple(embeddings.shape[:2])
    require(ids.shape == expected, "input_ids", tuple(ids.shape), f"{expected}, like inputs_embeds")
    return embeddings


def _checked_tensor(name: str, value: object, kind: str, content: str, dims: str, remedy: str | None = None) -> Tensor:
    """Returns a tensor of this kind that is not empty; raises LigerzooError for others. The remedy is for types."""
    expected = f"a ({dims}) tensor of {content}"
    if not isinstance(value, Tensor):
        raise invalid(name, type_name(value), expected, remedy)
    require(kind_of(value) == kind, name, value.dtype, expected)
    shape = tuple(value.shape)
    single = f"Use {name}[None] for a single prompt." if len(shape) == dims.count(",") else None
    is_valid = len(shape) == len(dims.split(",")) and 0 not in shape
    require(is_valid, name, shape, f"({dims}) with at least one token in each row", single)
    return value


def _checked_mask(mask: object, rows: int, tokens: int, name: str, device: torch.device) -> Tensor | None:
    """Returns the mask as a (B, T) bool tensor; raises LigerzooError if it is invalid or a row is empty."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise invalid("attention_mask", type_name(mask), "a (B, T) tensor, or None for no padding")
    shape, expected = tuple(mask.shape), (rows, tokens)
    require(shape == expected, "attention_mask", shape, f"{expected}, the shape of {name}")
    mask = mask.to(device)
    is_token = mask.bool()
    is_valid = mask.dtype == torch.bool or bool((mask == is_token).all())
    require(is_valid, "attention_mask", "other values", "1 for a token and 0 for padding")
    has_tokens = bool(is_token.any(1).all())
    require(has_tokens, "attention_mask", "a row of padding only", "at least one token in each row")
    return is_token


def _check_mask_of_cached(model: SupportsGenerate, mask: Tensor) -> None:
    """Raises LigerzooError if rows with a cache cannot be continued: their columns stay where the cache has them."""
    is_last = bool(mask[:, -1].all())
    remedy = "Pad on the left."
    require(is_last, "attention_mask", "padding in the last column", "tokens, with past_key_values", remedy)
    cache = model.new_cache() if hasattr(model, "new_cache") else KVCache([])
    if cache.is_recurrent or cache.drops_tokens:
        is_left = bool((mask[:, 1:] >= mask[:, :-1]).all())
        cause = (
            "recurrent layers, whose states include it" if cache.is_recurrent else "a sliding window, which counts it"
        )
        expected = f"padding on the left only, with past_key_values and {cause}"
        remedy = "Leave out past_key_values."
        require(is_left, "attention_mask", "padding between tokens", expected, remedy)


def _checked_cache(model: SupportsGenerate, cache: object, rows: int, tokens: int) -> KVCache:
    """Returns the cache; raises LigerzooError unless it can hold the first tokens of these prompts."""
    if not isinstance(cache, KVCache):
        remedy = "Pass model.new_cache() in the first call, and the same cache later."
        raise invalid("past_key_values", type_name(cache), "a ligerzoo.layers.KVCache", remedy)
    if hasattr(model, "new_cache"):
        layers = len(model.new_cache().layers)
        got = f"a cache of {len(cache.layers)} layers"
        require(len(cache.layers) == layers, "past_key_values", got, f"{layers} layers, like the model")
    got = f"a cache of {cache.rows} rows"
    remedy = "Pass one prompt for each row, or use cache.select_rows(indices)."
    require(cache.rows in (None, rows), "past_key_values", got, f"{rows} rows, one for each prompt", remedy)
    expected = f"fewer than {tokens}, since the prompts contain the cached tokens and at least one more"
    remedy = "Pass the whole history as input_ids, or use cache.crop(length)."
    require(cache.length < tokens, "past_key_values", f"a cache of {cache.length} tokens", expected, remedy)
    return cache


def as_prompt(prompt: object, model: CausalModel, name: str) -> Tensor:
    """Returns a prompt as a (T,) int64 tensor on the CPU.

    Args:
        prompt: token ids, a sequence of integers, or a 1-D tensor or NumPy array.
        model: the model, whose vocabulary must have them.
        name: of the prompt, for messages.

    Raises:
        LigerzooError: it is something else, empty, or contains a token id without embedding.
    """
    expected = "token ids, a list or 1-D tensor of integers"
    if isinstance(prompt, Tensor):
        is_valid = prompt.ndim == 1 and kind_of(prompt) == "integer"
        require(is_valid, name, f"{tuple(prompt.shape)} {prompt.dtype}", expected)
        ids = prompt.detach().to("cpu", torch.int64).contiguous()
    else:
        match prompt.tolist() if hasattr(prompt, "tolist") else prompt:  # a NumPy array
            case str() | bytes():
                raise invalid(name, type_name(prompt), expected, "Encode text first: tokenizer.encode(text).")
            case Sequence() as values:
                other = next((value for value in values if not _is_token_id(value)), None)
                require(other is None, name, f"a list with {other!r}", expected)
                ids = torch.tensor(list(values), dtype=torch.int64)
            case _:
                remedy = "Pass a list of prompts, even if there is one." if is_integer(prompt) else None
                raise invalid(name, type_name(prompt), expected, remedy)
    require(len(ids) > 0, name, "no tokens", "at least one token")
    try:
        model.check_inputs(ids[None])
    except LigerzooError as error:
        raise error.moved_to(name) from None
    return ids


def _is_token_id(value: object) -> bool:
    """Whether a value is an int64 integer, of any type."""
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 2**63


_REMEDIES = {
    "attention_mask": "Leave out the padding: each prompt is a list of tokens.",
    "cache_dtype": "Pass it to Scheduler: all requests share a KV cache.",
    "exact": "Pass it to Scheduler: all requests share a KV cache.",
    "input_ids": "Pass the prompts as the first argument.",
    "max_length": "Use max_new_tokens.",
    "num_return_sequences": "Pass the prompt several times.",
    "pad_token_id": "Leave it out: results contain no padding.",
    "streamer": "Call step() of a ligerzoo.generate.Scheduler, which returns the new tokens of each step.",
    "use_cache": "Leave it out: a KV cache is always kept.",
    **dict.fromkeys(
        ("inputs_embeds", "past_key_values", "return_dict_in_generate", "stopping_criteria"),
        "Use generate, which has this option.",
    ),
}


class RequestOptions:
    """The options of a request, validated.

    Args:
        model: the model, whose configs give the defaults.
        max_new_tokens: largest number of new tokens, at least 1, or 0 with `prompt_logps`.
        eos_token_id, stop_strings, tokenizer, generator, use_model_defaults: see `generate`.
        top_logps: number of the most likely tokens to return with each token, from 0 to MAX_TOP_LOGPS.
        logp_token_ids: tokens whose log-probabilities to return with each token, instead of those of the most likely.
        prompt_logps: whether to return the log-probabilities of the prompt.
        sampling: see `SamplingOptions`.

    Attributes:
        naming_file: see `CallOptions`.

    Raises:
        LigerzooError: an option is unknown or invalid.
    """

    def __init__(
        self,
        model: SupportsGenerate,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: SupportsDecode | None = None,
        generator: torch.Generator | None = None,
        use_model_defaults: bool = True,
        top_logps: int = 0,
        logp_token_ids: Sequence[int] | None = None,
        prompt_logps: bool = False,
        **sampling: Any,
    ) -> None:
        check_option("prompt_logps", prompt_logps, FLAG)
        check_option("top_logps", top_logps, integer(0, MAX_TOP_LOGPS))
        check_option("logp_token_ids", logp_token_ids, or_none(_LOGP_TOKENS))
        largest, size = max(logp_token_ids or (), default=0), model.config.vocab_size
        require(largest < size, "logp_token_ids", largest, f"token ids below {size}")
        self.logp_token_ids = list(dict.fromkeys(logp_token_ids or ()))
        self.top_logps, self.prompt_logps = 0 if self.logp_token_ids else top_logps, prompt_logps
        given = {"max_new_tokens": max_new_tokens, "stop_strings": stop_strings}
        call = parse_call(model, given, sampling, use_model_defaults=use_model_defaults)
        for name in call.others:
            raise no_such_option(name, "not an option of a request", _OPTIONS, ", ".join(_OPTIONS), others=_REMEDIES)
        self.naming_file = call.naming_file
        with call.naming_file():
            self.sampling = call.sampling
            self._max_new_tokens, self._max_length = call.get("max_new_tokens"), call.get("max_length")
            if self._max_new_tokens is not None:
                check_option("max_new_tokens", self._max_new_tokens, integer(0 if prompt_logps else 1))
            strings = call.get("stop_strings")
            self.stop_strings = StopStrings(strings, tokenizer) if strings is not None else None
        self.eos_token_ids = frozenset(token_ids(model, "eos_token_id", eos_token_id))
        if generator is not None:
            check_generator(generator, getattr(model, "device", torch.device("cpu")))
        self.generator = generator

    def require_limit(self) -> None:
        """Raises LigerzooError if there is no largest number of tokens."""
        if self._max_length is None:
            self.count_new_tokens(0)

    def count_new_tokens(self, prompt_length: int) -> int:
        """Returns the largest number of new tokens; raises LigerzooError if it is unknown, or none fits."""
        return count_new_tokens(self._max_new_tokens, self._max_length, prompt_length)


_OPTIONS = [name for name in inspect.signature(RequestOptions).parameters if name not in ("model", "sampling")]
_OPTIONS += SAMPLING_OPTIONS


class Request:
    """A prompt, its options, and its new tokens so far.

    Attributes:
        prompt: (T,) int64 token ids on the CPU.
        options: its options.
        max_new_tokens: see `RequestOptions`.
        started: number of new tokens that the device has been asked for; the host may not know all of them yet.
        tokens: the new tokens that the host knows.
        index: what `Scheduler.add` returned for it.
        seed: (1,) int64 on the device, see `Sampler.assign`; None if the request does not sample.
    """

    index: int
    seed: Tensor | None = None

    def __init__(self, prompt: Tensor, options: RequestOptions) -> None:
        self.prompt, self.options, self.max_new_tokens = prompt, options, options.count_new_tokens(len(prompt))
        self.started = 0
        self.tokens: list[int] = []
        self._scored = 0  # tokens of the prompt whose log-probabilities the host knows

    @property
    def length(self) -> int:
        """Number of tokens of the prompt, and of those that the device has been asked for."""
        return len(self.prompt) + self.started

    @property
    def max_length(self) -> int:
        """Largest number of tokens, with those of the prompt."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def context(self) -> Tensor:
        """The prompt and the new tokens that the host knows, (T,) int64 on the CPU."""
        return torch.cat([self.prompt, torch.tensor(self.tokens, dtype=torch.int64)])

    @property
    def needs_prompt_logps(self) -> bool:
        """Whether the prompt must be scored, before the first new token."""
        return self.options.prompt_logps and self.started == 0

    def append(self, token: int) -> str | None:
        """Appends a new token, and returns why the request is finished; None if it is not."""
        self.tokens.append(token)
        stop = self.options.stop_strings
        if token in self.options.eos_token_ids or (stop is not None and stop.found_in(self.tokens[-stop.window :])):
            return "stop"
        return "length" if len(self.tokens) == self.max_new_tokens else None

    def count_scored(self, tokens: int) -> str | None:
        """Counts tokens of the prompt that are scored, and returns why the request is finished; None if it is not."""
        self._scored += tokens
        return "length" if self.max_new_tokens == 0 and self._scored == len(self.prompt) - 1 else None
