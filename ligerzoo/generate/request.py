"""A prompt with its options, for the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError, did_you_mean
from ligerzoo.generate.model import SupportsGenerate
from ligerzoo.generate.options import REMEDIES, invalid, is_integer, require, type_name
from ligerzoo.generate.sampling import check_generator
from ligerzoo.generate.sampling_options import SamplingOptions
from ligerzoo.generate.stopping import StopStrings, SupportsDecode, token_ids

_REMEDIES = {
    **REMEDIES,
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
        model: the model, whose configs give the default of `eos_token_id`.
        max_new_tokens: largest number of new tokens, at least 1. None is refused by `Request`.
        eos_token_id, stop_strings, tokenizer, generator: see `generate`.
        sampling: see `SamplingOptions`.

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
        **sampling: Any,
    ) -> None:
        _refuse_unknown(sampling)
        self.sampling = SamplingOptions(**sampling)
        is_count = max_new_tokens is None or (is_integer(max_new_tokens) and max_new_tokens > 0)
        require(is_count, "max_new_tokens", repr(max_new_tokens), "an integer, 1 or more")
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = frozenset(token_ids(model, "eos_token_id", eos_token_id))
        self.stop_strings = StopStrings(stop_strings, tokenizer) if stop_strings is not None else None
        if generator is not None:
            check_generator(generator, getattr(model, "device", torch.device("cpu")))
        self.generator = generator

    def require_max_new_tokens(self) -> int:
        """Returns `max_new_tokens`; raises LigerzooError if it is None."""
        if self.max_new_tokens is None:
            raise invalid("max_new_tokens", "None", "an integer, 1 or more", "Pass max_new_tokens=20, for example.")
        return self.max_new_tokens


class Request:
    """A prompt, its options, and its new tokens so far.

    Args:
        prompt: (T,) int64 token ids on the CPU.
        options: its options, with `max_new_tokens`.

    Attributes:
        prompt, options: as given.
        max_new_tokens: see `RequestOptions`.
        started: number of new tokens that the device has been asked for; the host may not know all of them yet.
        tokens: the new tokens that the host knows.
        seed: (1,) int64 on the device, see `Sampler.assign`; None if the request does not sample.
    """

    seed: Tensor | None = None

    def __init__(self, prompt: Tensor, options: RequestOptions) -> None:
        self.prompt, self.options, self.max_new_tokens = prompt, options, options.require_max_new_tokens()
        self.started = 0
        self.tokens: list[int] = []

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

    def append(self, token: int) -> str | None:
        """Appends a token, and returns why the request is finished; None if it is not."""
        self.tokens.append(token)
        stop = self.options.stop_strings
        if token in self.options.eos_token_ids or (stop is not None and stop.found_in(self.tokens[-stop.window :])):
            return "stop"
        return "length" if len(self.tokens) == self.max_new_tokens else None


def as_prompt(prompt: object, model: Any, name: str) -> Tensor:
    """Returns a prompt as a (T,) int64 tensor on the CPU.

    Args:
        prompt: token ids, a sequence of integers, or a 1-D tensor or NumPy array.
        model: the model, whose vocabulary must have them.
        name: of the prompt, for messages.

    Raises:
        LigerzooError: it is something else, empty, or contains a token id without embedding.
    """
    expected, remedy = "token ids, a list or 1-D tensor of integers", None
    if isinstance(prompt, str | bytes):
        remedy = "Encode text first: tokenizer.encode(text)."
    elif is_integer(prompt):
        remedy = "Pass a list of prompts, even if there is one."
    if isinstance(prompt, Tensor):
        is_valid = prompt.ndim == 1 and not (prompt.is_floating_point() or prompt.is_complex())
        require(is_valid and prompt.dtype != torch.bool, name, f"{tuple(prompt.shape)} {prompt.dtype}", expected)
        ids = prompt.detach().to("cpu", torch.int64).contiguous()
    else:
        values: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # a NumPy array
        is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
        require(is_list, name, type_name(prompt), expected, remedy)
        other = next((value for value in values if not _is_token_id(value)), None)
        require(other is None, name, f"a list with {other!r}", expected)
        ids = torch.tensor(list(values), dtype=torch.int64)
    require(len(ids) > 0, name, "no tokens", "at least one token")
    try:
        model.check_inputs(ids[None])
    except LigerzooError as error:
        raise LigerzooError(
            error.what, where=name, got=error.got, expected=error.expected, remedy=error.remedy
        ) from None
    return ids


def _is_token_id(value: object) -> bool:
    """Whether a value is an int64 integer, of any type."""
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 2**63


def _refuse_unknown(sampling: Mapping[str, Any]) -> None:
    """Raises LigerzooError unless all names are options of sampling."""
    names = [field.name for field in dataclasses.fields(SamplingOptions)]
    options = ["max_new_tokens", "eos_token_id", "stop_strings", "tokenizer", "generator", *names]
    for name in sampling:
        if name not in names:
            remedy = _REMEDIES.get(name) or did_you_mean(name, options)
            expected = None if remedy else ", ".join(options)
            raise LigerzooError("not an option of a request", where=name, expected=expected, remedy=remedy)
