"""Text generation: prompts in, prompts with their continuations out.

    logits -> repetition penalty -> the most likely token (greedy)
                                 or temperature -> top-k -> top-p -> min-p -> sample

Shapes: B prompts, T tokens of the padded prompts, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.errors import LigerzooError


class LanguageModel(Protocol):
    """A model that `generate` accepts, called like `ligerzoo.models.CausalLM`.

    `generate` also uses `check_inputs` and `inputs_per_token` if the model has them.
    """

    @property
    def config(self) -> Any: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        *,
        past_key_values: Any,
        use_cache: bool,
        logits_to_keep: int,
        **model_inputs: Any,
    ) -> Any: ...


class SupportsDecode(Protocol):
    """A tokenizer that `StopStrings` accepts."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


class SupportsStream(Protocol):
    """A tokenizer that `TextStreamer` accepts."""

    def stream(self, *, skip_special_tokens: bool) -> SupportsPush: ...


class SupportsPush(Protocol):
    """A decoder of token ids that arrive one at a time, such as `ligerzoo.text.IncrementalDecoder`."""

    def push(self, token_id: int, /) -> str: ...
    def flush(self) -> str: ...


class Streamer(Protocol):
    """Receives tokens during generation."""

    def put(self, token_ids: Tensor) -> None:
        """Receives the prompts (B, T) first, then the new tokens (B,) of each step. All are on the CPU."""

    def end(self) -> None:
        """Marks the end of generation."""


@torch.no_grad()  # not inference_mode: tensors that the model caches in a forward must remain usable for training
def generate(
    model: LanguageModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: SupportsDecode | None = None,
    generator: torch.Generator | None = None,
    streamer: Streamer | None = None,
    use_cache: bool = True,
    **model_inputs: Any,
) -> Tensor:
    """Continues each prompt by up to `max_new_tokens` tokens.

    A row finishes with its first end-of-sequence token or stop string and is padded from then on. Generation stops when
    all rows have finished. `eos_token_id` and `pad_token_id` default to those of the model's generation_config, else of
    its config. No other option has a default there.

    Args:
        model: a causal language model. Its training mode is not changed.
        input_ids: (B, T) token ids. No prompt may be empty.
        attention_mask: (B, T), 1 for a token and 0 for padding. Padding may be anywhere: each row is continued as if it
            were alone, except with rotary position types longrope and dynamic, which depend on the longest row.
        max_new_tokens: largest number of new tokens. Memory grows with the tokens generated, not with this limit.
        do_sample: whether to sample each token. Otherwise the most likely token is chosen, and `temperature`, `top_k`,
            `top_p` and `min_p` have no effect.
        temperature: see `apply_temperature`.
        top_k: see `keep_top_k`.
        top_p: see `keep_top_p`.
        min_p: see `keep_min_p`.
        repetition_penalty: see `penalize_repetition`. It applies to the tokens of the prompt and of the continuation.
        eos_token_id: the token or tokens that finish a row. An empty list means none.
        pad_token_id: fills finished rows. Defaults to the first `eos_token_id` if the model defines no padding token.
        stop_strings: a row finishes when the text of its continuation contains one of these strings.
        tokenizer: decodes the text that is searched for `stop_strings`.
        generator: random number generator on the model's device. None uses torch's default.
        streamer: receives the prompts, then the tokens of each step.
        use_cache: whether to keep keys and values in a KV cache. Without it, each step recomputes all tokens: slower,
            same result. The result differs only for rotary position types dynamic, and longrope outside Phi-3: as in
            transformers, a cache keeps the keys as they were first rotated.
        model_inputs: further model inputs for the prompts, such as `pixel_values`. Per-token inputs (B, T, ...) are
            padded and sliced like `input_ids`.

    Returns:
        (B, T + new tokens) int64: each prompt unchanged, padding included, followed by its continuation.

    Raises:
        LigerzooError: a ValueError. Before the model runs: an option is invalid, the mask has another shape, a prompt
            is empty, or `CausalLM.check_inputs` refuses the inputs. Later: the logits are NaN or infinite.
    """
    is_count = type(max_new_tokens) is int and max_new_tokens >= 0
    _require(is_count, "max_new_tokens", max_new_tokens, "an integer, 0 or more")
    sequences = _Sequences(model, input_ids, attention_mask, model_inputs, max_new_tokens, use_cache)
    sampler = _Sampler(
        model,
        sequences.prompts,
        filters={"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p} if do_sample else None,
        repetition_penalty=repetition_penalty,
        generator=generator,
    )
    stopping = _Stopping(model, sequences.prompts, eos_token_id, pad_token_id, stop_strings, tokenizer)

    if streamer is not None:
        streamer.put(input_ids.cpu())
    for step in range(max_new_tokens):
        logits = sequences.prefill() if step == 0 else sequences.decode()
        tokens = sampler.choose(logits)
        sequences.append(tokens)
        shown = stopping.update(tokens, sequences.continuations)
        is_last = step + 1 == max_new_tokens
        if stopping.is_possible or is_last or streamer is not None:  # the host waits for the GPU in these cases only
            is_running, is_broken = torch.stack([stopping.running.any(), sampler.is_broken]).tolist()
            _check_logits(is_broken, step + 1)
            is_last |= not is_running
        if streamer is not None:
            streamer.put(shown.cpu())
        if is_last:
            break
    if streamer is not None:
        streamer.end()
    return torch.cat([input_ids, stopping.pad(sequences.continuations)], 1)


class _Sequences:
    """The tokens of a batch, and the model's KV cache for them.

    Args:
        model: the model.
        input_ids: (B, T) prompts.
        attention_mask: (B, T), or None for no padding.
        model_inputs: further model inputs for the prompts.
        max_new_tokens: largest number of new tokens.
        use_cache: whether to keep a KV cache.

    Attributes:
        prompts: (B, L) prompts, padded on the left to the longest of them.

    Raises:
        LigerzooError: the shapes are wrong, a prompt is empty, or the model refuses the inputs.
    """

    def __init__(
        self,
        model: LanguageModel,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        model_inputs: dict[str, Any],
        max_new_tokens: int,
        use_cache: bool,
    ) -> None:
        self.prompts, self._padding_mask = align_prompts(input_ids.long(), attention_mask)
        for name in getattr(model, "inputs_per_token", ()):
            if (value := model_inputs.get(name)) is not None:
                shape, expected = tuple(value.shape), tuple(input_ids.shape)
                _require(shape[:2] == expected, name, shape, f"(B, T, ...) with the shape {expected} of input_ids")
                model_inputs[name] = _align(value, attention_mask, self.prompts.shape[1])
        if hasattr(model, "check_inputs"):
            model.check_inputs(self.prompts, self._padding_mask, **model_inputs)
        self._model, self._inputs, self._use_cache = model, model_inputs, use_cache
        self._cache: Any = None
        self._newest = self.prompts
        self._position_ids: Tensor | None = None
        # All tokens, with spare columns. A finished row keeps reading its own tokens: padding may have no embedding.
        self._tokens = self.prompts
        self._end = self.prompts.shape[1]
        self._limit = self._end + max_new_tokens

    @property
    def continuations(self) -> Tensor:
        """The tokens after the prompts, (B, new tokens)."""
        return self._tokens[:, self.prompts.shape[1] : self._end]

    def prefill(self) -> Tensor:
        """Runs the model on the prompts and returns the logits (B, V) of the next tokens."""
        return self._forward(self.prompts, self._inputs)

    def decode(self) -> Tensor:
        """Runs the model on the newest tokens and returns the logits (B, V) of the next ones.

        Recomputes all tokens without a cache, or if the cache cannot serve another token.
        """
        if not self._use_cache or (self._cache is not None and not self._cache.is_valid_for(1)):
            self._cache = None
            return self._forward(self._tokens[:, : self._end], self._inputs)
        return self._forward(self._newest, {})

    def append(self, tokens: Tensor) -> None:
        """Appends one token to each row, (B, 1)."""
        self._tokens[:, self._end : self._end + 1] = tokens
        self._newest = tokens
        self._end += 1

    def _forward(self, tokens: Tensor, inputs: dict[str, Any]) -> Tensor:
        if self._end == self._tokens.shape[1]:  # doubling keeps the number of copies logarithmic
            self._reserve(min(self._end, self._limit - self._end))
        mask, position_ids = None, None
        if self._padding_mask is not None and self._position_ids is not None:
            mask = self._padding_mask[:, : self._end]
            position_ids = self._position_ids[:, self._end - tokens.shape[1] : self._end]
        output = self._model(
            tokens,
            mask,
            position_ids,
            past_key_values=self._cache,
            use_cache=self._use_cache,
            logits_to_keep=1,
            **inputs,
        )
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _reserve(self, columns: int) -> None:
        """Adds spare columns and computes their position ids."""
        self._tokens = F.pad(self._tokens, (0, columns))
        if self._padding_mask is not None:
            self._padding_mask = F.pad(self._padding_mask, (0, columns), value=True)
            self._position_ids = (self._padding_mask.cumsum(1) - 1).clamp(min=0)


class _Sampler:
    """Chooses the next token of each row.

    Args:
        model: the model, whose config gives the size of the vocabulary.
        prompts: (B, L) token ids.
        filters: arguments of `filter_logits` for sampling; None chooses the most likely token.
        repetition_penalty, generator: see `generate`.

    Attributes:
        is_broken: 0-d bool, whether the largest logit of some row has been NaN or infinite.

    Raises:
        LigerzooError: an option is invalid.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Tensor,
        *,
        filters: Mapping[str, Any] | None,
        repetition_penalty: float,
        generator: torch.Generator | None,
    ) -> None:
        is_positive = _is_number(repetition_penalty) and 0 < repetition_penalty < math.inf
        _require(is_positive, "repetition_penalty", repetition_penalty, "a positive number; 1 has no effect")
        if filters is not None:
            _check_filters(**filters)
            if generator is not None:
                device = prompts.device
                is_same = generator.device.type == device.type
                _require(is_same, "generator", f"one on {generator.device}", f"one on {device}, like input_ids")
        self._filters, self._generator, self._penalty = filters, generator, repetition_penalty
        self.is_broken = torch.zeros((), dtype=torch.bool, device=prompts.device)
        self._occurred: Tensor | None = None
        if repetition_penalty != 1:
            # The last column is for ids outside the vocabulary, such as image tokens. They are never generated.
            vocab_size = model.config.vocab_size
            self._occurred = torch.zeros(len(prompts), vocab_size + 1, dtype=torch.bool, device=prompts.device)
            self._occurred.scatter_(1, prompts.clamp(max=vocab_size), True)

    def choose(self, logits: Tensor) -> Tensor:
        """Chooses a token (B, 1) for each row of logits (B, V)."""
        if self._occurred is not None:
            logits = penalize_repetition(logits, self._occurred[:, :-1], self._penalty)
        if self._filters is not None:
            logits = filter_logits(logits, **self._filters)
            tokens = sample(logits, self._generator)
        else:
            tokens = logits.argmax(-1, keepdim=True)
        self.is_broken |= ~logits.amax(-1).isfinite().all()
        if self._occurred is not None:
            self._occurred.scatter_(1, tokens, True)
        return tokens


class _Stopping:
    """Decides when rows are finished, and pads them from then on.

    Args:
        model: the model, whose configs give the default token ids.
        prompts: (B, L) token ids.
        eos_token_id, pad_token_id, stop_strings, tokenizer: see `generate`.

    Attributes:
        is_possible: whether a row can finish before `max_new_tokens`.
        running: (B,) bool, False for finished rows.

    Raises:
        LigerzooError: an option is invalid, or several rows can finish and there is no padding token.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Tensor,
        eos_token_id: int | Sequence[int] | None,
        pad_token_id: int | None,
        stop_strings: str | Sequence[str] | None,
        tokenizer: SupportsDecode | None,
    ) -> None:
        self._stop_strings = StopStrings(stop_strings, tokenizer) if stop_strings is not None else None
        eos_ids = _token_ids(model, "eos_token_id", eos_token_id)
        pad_ids = _token_ids(model, "pad_token_id", pad_token_id) or eos_ids
        rows, device = len(prompts), prompts.device
        self.is_possible = bool(eos_ids or self._stop_strings)
        needs_padding = self.is_possible and rows != 1
        _require(bool(pad_ids) or not needs_padding, "pad_token_id", "none", "a token id that fills finished rows")
        self._pad_id = pad_ids[0] if pad_ids else 0
        self._eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self.running = torch.ones(rows, dtype=torch.bool, device=device)
        self._lengths = torch.zeros(rows, 1, dtype=torch.long, device=device)  # tokens until a row finished

    def update(self, tokens: Tensor, continuations: Tensor) -> Tensor:
        """Updates `running` after a step.

        Args:
            tokens: (B, 1) new tokens.
            continuations: (B, new tokens), which end with `tokens`.

        Returns:
            (B,): the new tokens, with padding in rows that had finished before.
        """
        self._lengths += self.running[:, None]
        shown = tokens[:, 0].where(self.running, self._pad_id)
        self.running &= (tokens != self._eos).all(1)
        if self._stop_strings is not None:
            tails = continuations[:, -self._stop_strings.window :].tolist()
            is_running = [not self._stop_strings.found_in(tail) for tail in tails]
            self.running &= torch.tensor(is_running, device=tokens.device)
        return shown

    def pad(self, continuations: Tensor) -> Tensor:
        """Returns the continuations, (B, new tokens), with padding after the end of each row."""
        columns = torch.arange(continuations.shape[1], device=continuations.device)
        return continuations.where(columns < self._lengths, self._pad_id)


def _check_logits(is_broken: bool, steps: int) -> None:
    """Raises LigerzooError if the largest logit of some row was NaN or infinite.

    An infinite one is an overflow, or -inf, which leaves no token to choose. Other logits may be -inf.
    """
    if is_broken:
        raise LigerzooError(
            "no token can be chosen",
            where="logits",
            got=f"NaN, inf or only -inf within {steps} new tokens",
            expected="finite logits; -inf for some tokens only",
            remedy="Check the weights for NaN, use bfloat16 or float32 instead of float16, or a higher temperature.",
        )


def align_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Moves all padding to the left, and removes the columns that only contain padding.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), 1 for a token and 0 for padding; None for no padding.

    Returns:
        Token ids (B, L), where L is the length of the longest prompt, and a boolean padding mask (B, L), or None if all
        prompts have length L. Each padding id is replaced by the prompt's last token: padding may have no embedding.

    Raises:
        LigerzooError: a shape is wrong or a prompt is empty.
    """
    shape = tuple(input_ids.shape)
    _require(len(shape) == 2 and 0 not in shape, "input_ids", shape, "(B, T) with at least one token in each row")
    if attention_mask is None:
        return input_ids, None
    mask_shape = tuple(attention_mask.shape)
    _require(mask_shape == shape, "attention_mask", mask_shape, f"{shape}, the shape of input_ids")
    mask = attention_mask.to(device=input_ids.device, dtype=torch.bool)
    lengths = mask.sum(1).tolist()
    _require(0 not in lengths, "attention_mask", "a row of padding only", "at least one token in each row")
    tokens, mask = (_align(x, mask, max(lengths)) for x in (input_ids, mask))
    return (tokens, None) if min(lengths) == max(lengths) else (tokens.where(mask, tokens[:, -1:]), mask)


def _align(x: Tensor, attention_mask: Tensor | None, length: int) -> Tensor:
    """Moves the padding of (B, T, ...) to the left and returns the last columns, (B, length, ...)."""
    if attention_mask is None:
        return x
    order = attention_mask.to(x.device, torch.bool).argsort(stable=True, dim=1)[:, -length:]
    return x[torch.arange(len(x), device=x.device)[:, None], order]


def penalize_repetition(logits: Tensor, occurred: Tensor, penalty: float) -> Tensor:
    """Makes tokens that have occurred less likely: divides positive logits by `penalty` and multiplies negative ones.

    Args:
        logits: (B, V).
        occurred: (B, V) bool, whether the token has occurred.
        penalty: a positive number. 1 has no effect; less than 1 makes these tokens more likely (Keskar et al. 2019).
    """
    return torch.where(occurred, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(
    logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Tensor:
    """Applies the temperature, then each filter that is not None, to logits (..., V)."""
    logits = apply_temperature(logits, temperature)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    return logits


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divides logits by a positive temperature: below 1 sharpens the distribution, above 1 flattens it."""
    return logits / temperature


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Sets all logits to -inf but the `top_k` largest and those equal to the smallest of these (Fan et al. 2018)."""
    smallest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < smallest, -math.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest most likely tokens whose total probability reaches `top_p`; sets the other logits to -inf.

    Ties are broken in favour of the lower token id. `top_p` is in (0, 1]; 1 keeps all tokens (Holtzman et al. 2019).
    """
    if top_p == 1:
        return logits  # rounded probabilities may sum to 1 before the last token
    descending, order = logits.sort(descending=True, stable=True)
    probabilities = descending.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    dropped_in_order = mass_before >= top_p
    dropped_in_order[..., 0] = False  # a tiny top_p may round to 0
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, dropped_in_order)
    return logits.masked_fill(dropped, -math.inf)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Sets the logits of tokens to -inf whose probability is below `min_p` times the largest (Nguyen et al. 2024).

    `min_p` is in [0, 1].
    """
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -math.inf)


def sample(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Samples a token of each row from the softmax of the logits: (B, V) -> (B, 1).

    It draws an exponential variable with the probability as rate for each token, and returns the token of the smallest.
    torch.multinomial does the same with the same random numbers, but it is a host sync.
    """
    times = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.softmax(-1) / times).argmax(-1, keepdim=True)


class StopStrings:
    """Finds strings at the end of a sequence of tokens.

    Args:
        strings: one string or several, none of them empty.
        tokenizer: decodes the tokens, special tokens included.

    Attributes:
        window: number of last tokens to search.

    Raises:
        LigerzooError: a string is empty, or there is no tokenizer.
    """

    # Tokens cut inside a character may decode to other text. A character has at most four bytes, so one of four
    # consecutive cuts is between characters. One more token is needed because a cut may remove a leading space.
    _CUTS = 4

    def __init__(self, strings: str | Sequence[str], tokenizer: SupportsDecode | None) -> None:
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        _require(
            all(self.strings) and self.strings != [], "stop_strings", strings, "one or more strings that are not empty"
        )
        if tokenizer is None:
            raise LigerzooError(
                "stop_strings need a tokenizer", where="tokenizer", got=None, remedy="Pass tokenizer=... to generate."
            )
        self.tokenizer = tokenizer
        self.window = max(len(string.encode()) for string in self.strings) + self._CUTS

    def found_in(self, tail: list[int]) -> bool:
        """Returns whether the last `window` tokens of a continuation contain one of the strings."""
        texts = (self.tokenizer.decode(tail[cut:], skip_special_tokens=False) for cut in range(self._CUTS))
        return any(string in text for text in texts for string in self.strings)


class TextStreamer:
    """A streamer that prints the continuation of one prompt during generation, in whole characters.

    Args:
        tokenizer: a `ligerzoo.Tokenizer`.
        skip_prompt: whether to print the continuation only.
        skip_special_tokens: whether to leave out special tokens, such as the end-of-sequence token.
        file: the file to print to. None prints to standard output.
    """

    def __init__(
        self,
        tokenizer: SupportsStream,
        *,
        skip_prompt: bool = True,
        skip_special_tokens: bool = True,
        file: TextIO | None = None,
    ) -> None:
        self.skip_prompt = skip_prompt
        self.file = file
        self._new_decoder: Callable[[], SupportsPush] = partial(
            tokenizer.stream, skip_special_tokens=skip_special_tokens
        )
        self._decoder = self._new_decoder()
        self._skip = 0  # characters of the prompt; decoding it keeps the leading space of the continuation

    def put(self, token_ids: Tensor) -> None:
        """Prints the text that these tokens complete.

        Args:
            token_ids: (1, T) of the prompt, or (1,) of its continuation.

        Raises:
            LigerzooError: there are several prompts.
        """
        _require(len(token_ids) == 1, "TextStreamer", f"{len(token_ids)} prompts", "one prompt")
        ids = token_ids.flatten().tolist()
        if token_ids.ndim == 2 and self.skip_prompt:
            decoder = self._new_decoder()
            self._skip = len("".join(map(decoder.push, ids)) + decoder.flush())
        self._print("".join(map(self._decoder.push, ids)))

    def end(self) -> None:
        """Prints the rest of the text and a newline."""
        self._print(self._decoder.flush())
        self._skip = 0
        self._print("\n")

    def _print(self, text: str) -> None:
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        text = text[skipped:]
        print(text, end="", flush=True, file=self.file)


def _token_ids(model: LanguageModel, name: str, argument: int | Sequence[int] | None) -> list[int]:
    """Returns the token ids from the argument, else generation_config, else config. Negative ids mean none."""
    sources = (argument, model.generation_config.get(name), getattr(model.config, name, None))
    value: Any = next((source for source in sources if source is not None), [])
    ids = value if isinstance(value, list | tuple) else [value]
    valid = all(type(i) is int and abs(i) < 2**31 for i in ids)
    _require(valid, name, value, "a token id below 2^31, or a list of them")
    return [i for i in ids if i >= 0]


def _check_filters(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    is_positive = _is_number(temperature) and 0 < temperature < math.inf
    _require(is_positive, "temperature", temperature, "a positive number, or do_sample=False")
    is_count = top_k is None or (isinstance(top_k, int) and not isinstance(top_k, bool) and top_k > 0)
    _require(is_count, "top_k", top_k, "a positive integer, or None")
    is_share = top_p is None or (_is_number(top_p) and 0 < top_p <= 1)
    _require(is_share, "top_p", top_p, "a number greater than 0 and at most 1, or None")
    is_share = min_p is None or (_is_number(min_p) and 0 <= min_p <= 1)
    _require(is_share, "min_p", min_p, "a number between 0 and 1, or None")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        raise LigerzooError("invalid value", where=name, got=got, expected=expected)
