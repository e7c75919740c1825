"""Options of generation_config.json, which `generate` follows as transformers does."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ligerzoo.errors import LigerzooError
from ligerzoo.generate.options import NEUTRAL_VALUES, warn
from ligerzoo.generate.sampling_options import SAMPLING_OPTIONS, SamplingOptions

_FILE = "generation_config.json"
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_TOP_K = 50  # transformers' default, which its files leave out
_FOLLOWED = (
    "do_sample", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "num_return_sequences", "stop_strings",
)  # fmt: skip
_LENGTHS = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))
_MISSING_FILTERS = ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
_MISSING = (
    "num_beams", "num_beam_groups", "penalty_alpha", "dola_layers", "constraints", "force_words_ids", "guidance_scale",
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "token_healing",
    "watermarking_config", "max_time",
)  # fmt: skip


class CallOptions(dict[str, Any]):
    """The options of a call: those of the caller, and those of generation_config.json that the caller leaves out.

    Options that change the tokens are followed, except for token ids, which `Stopping` looks up. Those that change how
    fast a call is or what it returns, such as `use_cache`, are not.

    Args:
        given: the options of the caller. None counts as left out.
        generation_config: the content of generation_config.json; empty to follow nothing.

    Warns:
        UserWarning: generation_config.json has an option that changes the tokens and is not implemented.
    """

    def __init__(self, given: Mapping[str, Any], generation_config: Mapping[str, Any]) -> None:
        super().__init__({name: value for name, value in given.items() if value is not None})
        file = {name: value for name, value in generation_config.items() if value is not None and name not in self}
        samples = self.get("do_sample", file.get("do_sample", False)) is not False
        if generation_config.get("do_sample") is True and "top_k" not in self:
            file.setdefault("top_k", _TOP_K)
        for name in _MISSING + (_MISSING_FILTERS if samples else ()):
            if name in file and not is_neutral(name, file[name]):
                warn(
                    f"{_FILE}: {name}={reprlib.repr(file[name])} is not implemented and has no effect. Remove it, or "
                    "use the generate method of transformers: "
                    "ligerzoo.integrations.transformers.wrap(model).generate(...)."
                )
        names = [*_FOLLOWED, *(_FILTERS if samples else ())]
        for pair in _LENGTHS:  # the first takes precedence, and one of the caller replaces both
            names += [name for name in pair if name in file and not self.keys() & set(pair)][:1]
        self._from_file = {name: file[name] for name in names if name in file}
        self.update(self._from_file)

    @property
    def sampling(self) -> SamplingOptions:
        """The options of sampling. Raises LigerzooError if one is invalid."""
        return SamplingOptions(**{name: value for name, value in self.items() if name in SAMPLING_OPTIONS})

    @contextmanager
    def naming_file(self) -> Iterator[None]:
        """Lets errors about options of the file name the file."""
        try:
            yield
        except LigerzooError as error:
            if error.where not in self._from_file:
                raise
            raise LigerzooError(
                error.what, where=f"{_FILE}, {error.where}", got=error.got, expected=error.expected,
                remedy=error.remedy or f"Pass {error.where} as an argument, or correct the file.",
            ) from None  # fmt: skip


def take_options(arguments: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Removes the options with these names from the arguments, and those of transformers that have no effect."""
    return {name: arguments.pop(name) for name in [*arguments] if name in names or is_neutral(name, arguments[name])}


def is_neutral(name: str, value: object) -> bool:
    """Returns whether an option of transformers that is not implemented has a value without an effect."""
    is_plain = value is None or isinstance(value, int | float)
    return is_plain and name in NEUTRAL_VALUES and (value is None or value in NEUTRAL_VALUES[name])


def limits_length(generation_config: Mapping[str, Any]) -> bool:
    """Returns whether generation_config.json has a largest number of tokens."""
    return any(generation_config.get(name) is not None for name in _LENGTHS[0])
