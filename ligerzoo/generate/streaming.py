"""The text of new tokens during generation: printed by a streamer, and searched for stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TextIO

from torch import Tensor

from ligerzoo.checks import FLAG, TEXT
from ligerzoo.errors import LigerzooError
from ligerzoo.generate.options import check_option, require, type_name


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


class TextStreamer:
    """A streamer that prints the continuation of one prompt during generation, in whole characters.

    Args:
        tokenizer: a `ligerzoo.Tokenizer`.
        skip_prompt: whether to print the continuation only.
        skip_special_tokens: whether to leave out special tokens, such as the end-of-sequence token.
        file: the file to print to. None prints to standard output.

    Raises:
        LigerzooError: an argument has a wrong type.
    """

    def __init__(
        self,
        tokenizer: SupportsStream,
        *,
        skip_prompt: bool = True,
        skip_special_tokens: bool = True,
        file: TextIO | None = None,
    ) -> None:
        is_tokenizer = hasattr(tokenizer, "stream")
        require(is_tokenizer, "tokenizer of TextStreamer", type_name(tokenizer), "a ligerzoo.Tokenizer")
        check_option("skip_prompt", skip_prompt, FLAG)
        check_option("skip_special_tokens", skip_special_tokens, FLAG)
        require(file is None or hasattr(file, "write"), "file", repr(file), "a text file that is open for writing")
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
        require(len(token_ids) == 1, "TextStreamer", f"{len(token_ids)} prompts", "one prompt")
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


def check_streamer(streamer: object) -> None:
    """Raises LigerzooError unless an object can receive tokens."""
    is_streamer = streamer is None or (hasattr(streamer, "put") and hasattr(streamer, "end"))
    expected = "an object with the methods put and end"
    require(is_streamer, "streamer", repr(streamer), expected, "Pass ligerzoo.generate.TextStreamer(tokenizer).")


class SupportsDecode(Protocol):
    """A tokenizer that `StopStrings` accepts."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


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
        several = strings if isinstance(strings, Iterable) else ()
        self.strings = [strings] if isinstance(strings, str) else list(several)
        is_valid = self.strings != [] and all(map(TEXT.accepts, self.strings))
        require(is_valid, "stop_strings", repr(strings), "one or more strings that are not empty")
        if tokenizer is None or not hasattr(tokenizer, "decode"):
            what, got, expected = "stop_strings need a tokenizer", type_name(tokenizer), "a ligerzoo.Tokenizer"
            remedy = "Pass tokenizer=... to generate."
            raise LigerzooError(what, where="tokenizer", got=got, expected=expected, remedy=remedy)
        self.tokenizer = tokenizer
        self.window = max(len(string.encode()) for string in self.strings) + self._CUTS

    def found_in(self, tail: list[int]) -> bool:
        """Returns whether the last `window` tokens of a continuation contain one of the strings."""
        texts = (self.tokenizer.decode(tail[cut:], skip_special_tokens=False) for cut in range(self._CUTS))
        return any(string in text for text in texts for string in self.strings)
