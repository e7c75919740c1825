"""Sampling options of one request, from JSON that a client or a user wrote."""

from __future__ import annotations

import random
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from ligerzoo.errors import LigerzooError, quote
from ligerzoo.generate.options import SMALLEST_DIVISOR

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 256, 32
MAX_NGRAM_SIZE = 64

_REPR = reprlib.Repr()
_REPR.maxstring = 200


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Sampling options of one request.

    Args:
        max_new_tokens: largest number of new tokens, 1 or more. None leaves it to the caller.
        do_sample: whether to sample if temperature, top_k, top_p and min_p are None.
        temperature, top_k, top_p, min_p: see `ligerzoo.generate.generate`. If one is given, tokens are sampled. But a
            temperature of 0 chooses the most likely token.
        repetition_penalty, min_new_tokens, no_repeat_ngram_size, bad_words_ids: see
            `ligerzoo.generate.SamplingOptions`.
        seed: seed of the random numbers. None draws one from torch's default generator.
        stop: the continuation ends with the first of these strings.

    What is None follows the model's generation_config.json.
    """

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], names: Mapping[str, str]) -> Self:
        """Reads the options from a JSON object; the fields without an option are not looked at.

        Args:
            fields: the object. A field that is None counts as absent.
            names: the option of each field that is one.

        Raises:
            LigerzooError: the value of a field is invalid.
        """
        options: dict[str, Any] = {}
        for field, name in names.items():
            if (value := fields.get(field)) is not None:
                is_valid, expected = _CHECKS[name]
                if not is_valid(value):
                    raise LigerzooError("invalid value", where=field, got=show(value), expected=expected)
                options[name] = value
        if "stop" in options:
            options["stop"] = (options["stop"],) if isinstance(options["stop"], str) else tuple(options["stop"])
        return cls(**options)

    def for_scheduler(self, device: torch.device | str, choice: int = 0) -> dict[str, Any]:
        """Returns the keyword arguments of `Scheduler.add`, except for `stop`, which `Continuation` looks for.

        Args:
            device: the model's device.
            choice: index among several continuations of the prompt, each of which has another seed.
        """
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.do_sample,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_new_tokens,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            "bad_words_ids": self.bad_words_ids,
        }
        filters = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        given = {name: value for name, value in filters.items() if value is not None}
        if self.temperature == 0:
            return {**options, "do_sample": False}
        if given:
            options |= {"do_sample": True, **given}
        if self.seed is not None:
            seed = self.seed if choice == 0 else derived_seed(self.seed, choice)
            options["generator"] = torch.Generator(device).manual_seed(seed)
        return options


def show(value: object) -> str:
    """Returns a JSON value, shortened, for a message."""
    return quote(_REPR.repr(value))


def derived_seed(seed: int, index: int) -> int:
    """Returns one of many independent seeds, in [0, 2^63)."""
    return random.Random(f"{seed}/{index}").getrandbits(63)


def is_integer(value: object, low: int, high: int) -> bool:
    """Returns whether a JSON value is an integer from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_stop(value: object) -> bool:
    strings = [value] if isinstance(value, str) else value
    return (
        isinstance(strings, list)
        and len(strings) <= MAX_STOPS
        and all(isinstance(string, str) and 0 < len(string) <= MAX_STOP_LENGTH for string in strings)
    )


def _are_bad_words(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_BAD_WORDS
        and all(isinstance(word, list) and 0 < len(word) <= MAX_BAD_WORD_LENGTH for word in value)
        and all(is_integer(token, 0, 2**31 - 1) for word in value for token in word)
    )


_CHECKS: dict[str, tuple[Any, str]] = {
    "max_new_tokens": (lambda value: is_integer(value, 1, 2**31 - 1), "an integer from 1 to 2**31 - 1"),
    "temperature": (
        lambda value: value == 0 or _is_number(value, SMALLEST_DIVISOR, 1000),
        f"0, or a number from {SMALLEST_DIVISOR} to 1000",
    ),
    "top_k": (lambda value: is_integer(value, 1, 2**31 - 1), "an integer from 1 to 2**31 - 1"),
    "top_p": (lambda value: _is_number(value, 0, 1) and value > 0, "a number greater than 0 and at most 1"),
    "min_p": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1"),
    "repetition_penalty": (lambda value: _is_number(value, 1e-3, 1000), "a number from 0.001 to 1000"),
    "min_new_tokens": (lambda value: is_integer(value, 0, 2**31 - 1), "an integer from 0 to 2**31 - 1"),
    "no_repeat_ngram_size": (
        lambda value: is_integer(value, 0, MAX_NGRAM_SIZE),
        f"an integer from 0 to {MAX_NGRAM_SIZE}; 0 allows all",
    ),
    "bad_words_ids": (
        _are_bad_words,
        f"up to {MAX_BAD_WORDS} lists, each with 1 to {MAX_BAD_WORD_LENGTH} token ids",
    ),
    "seed": (lambda value: is_integer(value, -(2**63), 2**63 - 1), "an integer of 64 bits"),
    "stop": (_is_stop, f"a string, or up to {MAX_STOPS} strings, each with 1 to {MAX_STOP_LENGTH} characters"),
}
"""Check of the JSON value of each option, and what it expects."""
