"""Text generation: prompts in, prompts and their continuations out.

    logits -> repetition penalty -> the likeliest token
                                 or temperature -> top-k -> top-p -> min-p -> a draw

Shapes: B prompts, T tokens of a prompt and its padding, V tokens of the vocabulary.
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
    """What `generate` asks of a model: to be called as `ligerzoo.models.CausalLM` is. If it has `check_inputs` and
    `inputs_per_token`, these are used, too."""

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


class Decodes(Protocol):
    """What `StopStrings` asks of a tokenizer."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


class Streams(Protocol):
    """What `TextStreamer` asks of a tokenizer."""

    def stream(self, *, skip_special_tokens: bool) -> TextStream: ...


class TextStream(Protocol):
    """Text out of token ids that come one at a time."""

    def push(self, token_id: int, /) -> str: ...
    def flush(self) -> str: ...


class Streamer(Protocol):
    """Gets tokens as they come."""

    def put(self, token_ids: Tensor) -> None:
        """First the prompts, (B, T), then each step's tokens, (B,); both on the CPU."""

    def end(self) -> None:
        """No more will come."""


@torch.no_grad()  # not inference_mode: what a forward keeps for later must remain fit for training
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
    tokenizer: Decodes | None = None,
    generator: torch.Generator | None = None,
    streamer: Streamer | None = None,
    use_cache: bool = True,
    **model_inputs: Any,
) -> Tensor:
    """Continues each prompt by up to `max_new_tokens` tokens.

    A row ends with the first end-of-sequence token or stop string, and shows padding while others go on; when all rows
    have ended, so does generation. Token ids that are not given come from the model's generation_config, else from its
    config; no other option does.

    Args:
        model: a causal language model. Whether it is in training mode is left as it is.
        input_ids: (B, T) token ids; no prompt is empty.
        attention_mask: (B, T), 1 for a token and 0 for padding, which may stand anywhere: a row is continued as it
            would be alone (but for rotary positions of the types longrope and dynamic, which the longest row decides).
        max_new_tokens: the most tokens to add; 0 adds none. CrossAttentionInputs grows with the tokens that are made.
        do_sample: draw each token. Otherwise it is the likeliest, and the next four options have no effect.
        temperature: see `apply_temperature`.
        top_k: see `keep_top_k`.
        top_p: see `keep_top_p`.
        min_p: see `keep_min_p`.
        repetition_penalty: see `penalize_repetition`; for the tokens of the prompt and its continuation.
        eos_token_id: the token or tokens that end a row; an empty list for none.
        pad_token_id: what a row shows when it has ended; the first end-of-sequence token where a model has no padding.
        stop_strings: a row ends when its continuation's text has one of them in it; its tokens stay as they are.
        tokenizer: makes the text in which `stop_strings` are looked for.
        generator: of the random numbers, on the model's device; None for torch's own.
        streamer: gets the prompts, then each step's tokens.
        use_cache: keep keys and values. Without, all is computed again for each token: slow, with the same result
            (but for rotary positions of type dynamic, and longrope outside Phi-3, whose keys a cache keeps as they
            were first rotated, as transformers' does).
        model_inputs: what else the model reads with the prompts, such as the `pixel_values` of their images. What tells
            of each token, (B, T, ...), stands as they do.

    Returns:
        (B, T + new) int64: each prompt as it was given, padding included, and then its continuation.

    Raises:
        LigerzooError: a ValueError. Before anything is computed: an option's value is not possible, the mask does not
            fit, a prompt is empty, or what `CausalLM.check_inputs` refuses. Later: logits that no token can be chosen
            from, see `_check_logits`.
    """
    is_count = type(max_new_tokens) is int and max_new_tokens >= 0
    _require(is_count, "max_new_tokens", max_new_tokens, "a whole number, 0 or more")
    is_positive = 0 < repetition_penalty < math.inf
    _require(is_positive, "repetition_penalty", repetition_penalty, "a positive number; 1 is neutral")
    if do_sample:
        _check_sampling(temperature, top_k, top_p, min_p)
        if generator is not None:
            is_near = generator.device.type == input_ids.device.type
            _require(is_near, "generator", f"one on {generator.device}", f"one on {input_ids.device}, as input_ids")
    stops = StopStrings(stop_strings, tokenizer) if stop_strings is not None else None
    eos_ids = _token_ids(model, "eos_token_id", eos_token_id)
    pad_ids = _token_ids(model, "pad_token_id", pad_token_id) or eos_ids
    can_end = bool(eos_ids or stops)
    _require(bool(pad_ids) or not can_end or len(input_ids) == 1, "pad_token_id", "none", "what ended rows should show")

    tokens, real = align_prompts(input_ids.long(), attention_mask)
    for name in getattr(model, "inputs_per_token", ()):
        if model_inputs.get(name) is not None:
            told = tuple(model_inputs[name].shape)
            _require(told[:2] == input_ids.shape, name, told, f"{tuple(input_ids.shape)} and more, as input_ids")
            model_inputs[name] = _aligned(model_inputs[name], attention_mask, tokens.shape[1])
    (rows, prompt), device = tokens.shape, tokens.device
    if hasattr(model, "check_inputs"):
        model.check_inputs(tokens, real, **model_inputs)
    seen = None
    if repetition_penalty != 1:
        # The last column is for tokens that are read and never written, such as an image's.
        seen = torch.zeros(rows, model.config.vocab_size + 1, dtype=torch.bool, device=device)
        seen.scatter_(1, tokens.clamp(max=model.config.vocab_size), True)
    eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
    padding = pad_ids[0] if pad_ids else 0
    running = torch.ones(rows, dtype=torch.bool, device=device)
    is_broken = torch.zeros((), dtype=torch.bool, device=device)
    lengths = torch.zeros(rows, 1, dtype=torch.long, device=device)  # of the continuations
    # All that was read, with room for more. A row that has ended goes on reading its own tokens, for padding may have
    # no embedding.
    text, end, limit = tokens, prompt, prompt + max_new_tokens
    cache, beside = None, model_inputs

    if streamer is not None:
        streamer.put(input_ids.cpu())
    while end < limit:
        if end == text.shape[1]:
            room = min(end, limit - end)
            text = F.pad(text, (0, room))
            if real is not None:
                real = F.pad(real, (0, room), value=True)
                positions = (real.cumsum(1) - 1).clamp(min=0)
        mask, position_ids = None, None
        if real is not None:
            mask, position_ids = real[:, :end], positions[:, end - tokens.shape[1] : end]
        output = model(
            tokens, mask, position_ids, past_key_values=cache, use_cache=use_cache, logits_to_keep=1, **beside
        )
        cache = output.past_key_values

        logits = output.logits[:, -1].float()
        if seen is not None:
            logits = penalize_repetition(logits, seen[:, :-1], repetition_penalty)
        if do_sample:
            logits = filter_logits(logits, temperature, top_k, top_p, min_p)
        token = draw(logits, generator) if do_sample else logits.argmax(-1, keepdim=True)
        is_broken |= ~logits.amax(-1).isfinite().all()
        if seen is not None:
            seen.scatter_(1, token, True)

        text[:, end : end + 1] = token
        lengths += running[:, None]
        end += 1
        shown = token[:, 0].where(running, padding)
        running &= (token != eos).all(1)
        if stops is not None:
            tails = text[:, max(prompt, end - stops.reach) : end].tolist()
            running &= torch.tensor([not stops.found_in(tail) for tail in tails], device=device)
        is_last = end == limit
        if can_end or is_last or streamer is not None:  # where the host waits for the GPU anyway
            goes_on, broke = torch.stack([running.any(), is_broken]).tolist()
            _check_logits(broke, end - prompt)
            is_last |= not goes_on
        if streamer is not None:
            streamer.put(shown.cpu())
        if is_last:
            break
        is_read_anew = not use_cache or (cache is not None and not cache.is_valid_for(1))
        tokens, cache, beside = (text[:, :end], None, model_inputs) if is_read_anew else (token, cache, {})
    if streamer is not None:
        streamer.end()
    new = text[:, prompt:end]
    return torch.cat([input_ids, new.where(torch.arange(end - prompt, device=device) < lengths, padding)], 1)


def _check_logits(is_broken: bool, steps: int) -> None:
    """Raises LigerzooError if the largest logit of some row was NaN or infinite: +inf is an overflow, and -inf means
    that no token is possible. Single logits of -inf are tokens that the model rules out."""
    if is_broken:
        raise LigerzooError(
            "no token can be chosen", where="logits", got=f"NaN, inf or nothing but -inf within {steps} new tokens",
            expected="finite numbers; -inf for some tokens only",
            remedy="Check the weights for NaN, use bfloat16 or float32 instead of float16, or a higher temperature.",
        )  # fmt: skip


def align_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The prompts with all their padding on the left, and no more of it than the longest prompt makes necessary.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), 1 for a token and 0 for padding; None for no padding.

    Returns:
        Token ids (B, L), where L is the longest prompt's length, and a boolean mask (B, L), or None if all prompts are
        that long. The prompt's last token stands in for padding, which may have no embedding.

    Raises:
        LigerzooError: the shapes are wrong or a prompt is empty.
    """
    shape = tuple(input_ids.shape)
    _require(len(shape) == 2 and 0 not in shape, "input_ids", shape, "(B, T), each row with a token to begin with")
    if attention_mask is None:
        return input_ids, None
    mask_shape = tuple(attention_mask.shape)
    _require(mask_shape == shape, "attention_mask", mask_shape, f"{shape}, as input_ids")
    real = attention_mask.to(device=input_ids.device, dtype=torch.bool)
    lengths = real.sum(1).tolist()
    _require(0 not in lengths, "attention_mask", "a row of padding only", "a token to begin with in each row")
    tokens, real = (_aligned(x, real, max(lengths)) for x in (input_ids, real))
    return (tokens, None) if min(lengths) == max(lengths) else (tokens.where(real, tokens[:, -1:]), real)


def _aligned(x: Tensor, attention_mask: Tensor | None, length: int) -> Tensor:
    """(B, T, ...) -> (B, length, ...): what tells of each token, that of padding first, then that of the tokens as they
    come, as far as there is so much room."""
    if attention_mask is None:
        return x
    order = attention_mask.to(x.device, torch.bool).argsort(stable=True, dim=1)[:, -length:]
    return x[torch.arange(len(x), device=x.device)[:, None], order]


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Makes tokens that occurred less likely: their logits are divided by `penalty` if positive, else multiplied by it.

    Args:
        logits: (B, V).
        seen: (B, V) bool, whether the token occurred.
        penalty: positive; 1 changes nothing, and less than 1 makes such tokens likelier (Keskar et al. 2019).
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(
    logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Tensor:
    """(..., V) -> (..., V): the temperature, then each filter that is not None, on what the one before it left."""
    logits = apply_temperature(logits, temperature)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    return logits


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divides by a positive number: below 1 the likely tokens get likelier still, above 1 all get more alike."""
    return logits / temperature


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """-inf for all but the `top_k` largest logits and those equal to the last of them (Fan et al. 2018)."""
    smallest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < smallest, -math.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """-inf for all but the likeliest tokens, the fewest with a probability of `top_p` together (Holtzman et al. 2019).

    Of equally likely tokens the lower id counts as the likelier. `top_p` is in (0, 1], and 1 keeps all.
    """
    if top_p == 1:
        return logits  # rounded probabilities may add up to 1 before the last token
    descending, order = logits.sort(descending=True, stable=True)
    probabilities = descending.softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, likelier >= top_p)
    return logits.masked_fill(dropped, -math.inf)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """-inf for tokens less than `min_p`, in [0, 1], times as likely as the likeliest (Nguyen et al. 2024)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -math.inf)


def draw(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """(B, V) -> (B, 1): a token of each row, with the probabilities of the softmax.

    Each token arrives after an exponential time, at a rate that is its probability, and the first wins.
    torch.multinomial does the same with the same random numbers, but makes the host wait for a GPU.
    """
    times = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.softmax(-1) / times).argmax(-1, keepdim=True)


class StopStrings:
    """Finds strings at the end of a text that is still tokens.

    Args:
        strings: one or several, none of them empty.
        tokenizer: makes the text; special tokens are part of it.

    Attributes:
        reach: how many of the last tokens to look at.

    Raises:
        LigerzooError: a string is empty, or there is no tokenizer.
    """

    # Text that is cut inside a character may read differently from there on; but of four neighbouring cuts one is
    # between characters. One token is to spare, for the first after a cut may lose a leading space.
    _CUTS = 4

    def __init__(self, strings: str | Sequence[str], tokenizer: Decodes | None) -> None:
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        _require(all(self.strings) and self.strings != [], "stop_strings", strings, "strings that are not empty")
        if tokenizer is None:
            raise LigerzooError("stop_strings need a tokenizer, to look for them in the text", where="tokenizer")
        self.tokenizer = tokenizer
        self.reach = max(len(string.encode()) for string in self.strings) + self._CUTS

    def found_in(self, tail: list[int]) -> bool:
        """Whether one of the strings is in the text of these tokens: a continuation's last `reach`, or all it has."""
        texts = (self.tokenizer.decode(tail[cut:], skip_special_tokens=False) for cut in range(self._CUTS))
        return any(string in text for text in texts for string in self.strings)


class TextStreamer:
    """A streamer that prints one prompt's continuation as it comes, never a part of a character.

    Args:
        tokenizer: a `ligerzoo.Tokenizer`.
        skip_prompt: print the continuation only.
        skip_special_tokens: leave out tokens such as the one that ends a sequence.
        file: where to print; standard output when None.
    """

    def __init__(
        self,
        tokenizer: Streams,
        *,
        skip_prompt: bool = True,
        skip_special_tokens: bool = True,
        file: TextIO | None = None,
    ) -> None:
        self.skip_prompt = skip_prompt
        self.file = file
        self._new_text: Callable[[], TextStream] = partial(tokenizer.stream, skip_special_tokens=skip_special_tokens)
        self._text = self._new_text()
        self._skip = 0  # characters of the prompt: it is decoded too, for the space that may follow it

    def put(self, token_ids: Tensor) -> None:
        """Prints the text that these tokens complete: (1, T) of the prompt, or (1,) of its continuation.

        Raises:
            LigerzooError: there are several prompts.
        """
        _require(len(token_ids) == 1, "TextStreamer", f"{len(token_ids)} prompts", "one, for it prints a single text")
        ids = token_ids.flatten().tolist()
        if token_ids.ndim == 2 and self.skip_prompt:
            alone = self._new_text()
            self._skip = len("".join(map(alone.push, ids)) + alone.flush())
        self._print("".join(map(self._text.push, ids)))

    def end(self) -> None:
        """Prints what was held back, and ends the line."""
        self._print(self._text.flush())
        self._skip = 0
        self._print("\n")

    def _print(self, text: str) -> None:
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        text = text[skipped:]
        print(text, end="", flush=True, file=self.file)


def _token_ids(model: LanguageModel, name: str, given: int | Sequence[int] | None) -> list[int]:
    """The token ids of this name from the first source that has any; negative ids, which mean none, are left out."""
    sources = (given, model.generation_config.get(name), getattr(model.config, name, None))
    value: Any = next((source for source in sources if source is not None), [])
    ids = value if isinstance(value, list | tuple) else [value]
    _require(all(type(i) is int for i in ids), name, value, "a token id or a list of them")
    return [i for i in ids if i >= 0]


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    _require(0 < temperature < math.inf, "temperature", temperature, "a positive number, or do_sample=False")
    is_count = top_k is None or (isinstance(top_k, int) and top_k > 0)
    _require(is_count, "top_k", top_k, "a positive whole number, or None")
    _require(top_p is None or 0 < top_p <= 1, "top_p", top_p, "a number above 0 and up to 1, or None")
    _require(min_p is None or 0 <= min_p <= 1, "min_p", min_p, "a number from 0 to 1, or None")


def _require(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        raise LigerzooError("not a possible value", where=name, got=got, expected=expected)
