"""Decoding as generation goes: text out of token ids that come one at a time."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable
from typing import SupportsIndex

from tokenizers.decoders import Decoder


class TextStream:
    """Text out of token ids that come one at a time, as they do in generation.

    The texts of all `push` calls and the last `flush` together are exactly what `decode` makes of all the ids. No piece
    ends inside a character. Held back are the bytes of an unfinished character; a whole run of byte tokens, for
    tokenizers that fall back to bytes, since what follows decides how the run reads; and everything, for decoders of
    other kinds than the usual ones, which may look at a text as a whole.

    Args:
        id_to_token: how the vocabulary spells an id; None for an id without a token, which is left out.
        decoder: makes text of all tokens at once; None joins them by spaces.
        hidden: ids to leave out.
    """

    def __init__(
        self, id_to_token: Callable[[SupportsIndex], str | None], decoder: Decoder | None, hidden: Iterable[int] = ()
    ) -> None:
        self._id_to_token = id_to_token
        self._hidden = frozenset(hidden)
        self._text = _incremental(decoder)

    def push(self, token_id: SupportsIndex) -> str:
        """The text that this id completes, often "" for a part of a character."""
        token = self._id_to_token(token_id)
        return "" if token is None or token_id.__index__() in self._hidden else self._text.push(token)

    def flush(self) -> str:
        """What was held back; the text ends here, and the next `push` begins another."""
        return self._text.flush()


class _ByteLevelText:
    """Each character of a token stands for a byte; the bytes of all tokens together are UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: str) -> str:
        try:
            return self._utf8.decode(bytes(_BYTE_OF_CHARACTER[character] for character in token))
        except KeyError:  # an added token, spelled as it is
            return self._utf8.decode(token.encode())

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PiecewiseText:
    """Each token stands for its own text, but for a beginning that is stripped and runs of byte tokens."""

    def __init__(self, join: Callable[[list[str]], str]) -> None:
        self._join = join
        self._earlier: list[str] = []
        self._pending: list[str] = []

    def push(self, token: str) -> str:
        self._pending.append(token)
        if token.startswith("<0x") and token.endswith(">"):
            return ""
        return self._take()

    def flush(self) -> str:
        text = self._take()
        self._earlier, self._pending = [], []
        return text

    def _take(self) -> str:
        text = self._join(self._earlier + self._pending)[len(self._earlier) :]
        if text:
            self._earlier = ["x"]  # from now on, one letter stands for all earlier text: what follows is no beginning
        if self._earlier:
            self._pending = []
        return text


class _WholeText:
    """Nothing is known about the decoder: all is held back until the end."""

    def __init__(self, join: Callable[[list[str]], str]) -> None:
        self._join = join
        self._pending: list[str] = []

    def push(self, token: str) -> str:
        self._pending.append(token)
        return ""

    def flush(self) -> str:
        text = self._join(self._pending)
        self._pending = []
        return text


_SENTENCEPIECE_STAGES = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _incremental(decoder: Decoder | None) -> _ByteLevelText | _PiecewiseText | _WholeText:
    if decoder is None:
        return _WholeText(" ".join)
    stage = json.loads(decoder.__getstate__())
    stages = stage["decoders"] if stage["type"] == "Sequence" else [stage]
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return _ByteLevelText()
    if kinds == ["Metaspace"] or stages in (_SENTENCEPIECE_STAGES, [*_SENTENCEPIECE_STAGES, _STRIP_FIRST_SPACE]):
        return _PiecewiseText(decoder.decode)
    return _WholeText(decoder.decode)


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters stand for themselves, U+0100 and on for other bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
