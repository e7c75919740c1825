"""Incremental decoding: text from token ids that arrive one at a time.

The pieces of text concatenate to exactly what `decode` returns for all ids. `tokenizers.decoders.DecodeStream` (0.23.3)
does not guarantee this:

- It has no flush. For the single id of `<0xA3>`, `decode` returns U+FFFD and the stream returns None. An unfinished
  character at the end of a byte-level text is lost too, and so is a U+FFFD at the end of the original text.
- It returns byte-fallback tokens too early. For `<0x41> <0xB4>` it returns "A", but `decode` gives two U+FFFD, because
  the decoder rejects a run of byte tokens as a whole. The next token then raises "Invalid prefix encountered".
"""

import codecs
import re
from collections.abc import Callable, Iterable
from typing import SupportsIndex

from tokenizers.decoders import Decoder

from ligerzoo.text.stages import stages_of_component


class IncrementalDecoder:
    """Decodes token ids that arrive one at a time, as in generation.

    The results of all `push` calls and the last `flush` concatenate to what `decode` returns for all ids. No piece ends
    inside a character. The decoder holds back

    - the bytes of an unfinished character;
    - runs of byte-fallback tokens, because the tokens after them decide how the run decodes;
    - everything until `flush`, for unusual decoder types, which may depend on the whole text.

    Args:
        id_to_token: returns the vocabulary's spelling of an id; None for an id without a token, which is skipped.
        decoder: decodes a list of tokens. None joins them with spaces.
        skipped_ids: ids to leave out.
        continues_text: whether the ids continue a text. Then a leading space that `decode` strips from a text is kept.
    """

    def __init__(
        self,
        id_to_token: Callable[[SupportsIndex], str | None],
        decoder: Decoder | None,
        skipped_ids: Iterable[int] = (),
        *,
        continues_text: bool = False,
    ) -> None:
        self._id_to_token = id_to_token
        self._skipped_ids = frozenset(skipped_ids)
        self._text = _text_decoder(decoder, continues_text=continues_text)

    def push(self, token_id: SupportsIndex) -> str:
        """Returns the text that this id completes; "" if it completes none."""
        token = self._id_to_token(token_id)
        return "" if token is None or token_id.__index__() in self._skipped_ids else self._text.push(token)

    def flush(self) -> str:
        """Ends the text and returns what was held back. The next `push` begins a new text."""
        return self._text.flush()


class _ByteLevelText:
    """Decodes byte-level tokens: each character is one byte, and the bytes of all tokens are UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: str) -> str:
        try:
            return self._utf8.decode(bytes(BYTE_OF_CHARACTER[character] for character in token))
        except KeyError:  # an added token contains its literal text
            return self._utf8.decode(token.encode())

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PiecewiseText:
    """Decodes tokens independently, except for runs of byte tokens and a leading space that is stripped."""

    def __init__(self, join: Callable[[list[str]], str], *, continues_text: bool) -> None:
        self._join = join
        # One letter replaces all earlier text, so that later spaces are not leading ones.
        self._earlier = ["x"] if continues_text else []
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
            self._earlier = ["x"]
        if self._earlier:
            self._pending = []
        return text


class _WholeText:
    """Decodes at the end, for decoders of which nothing is known."""

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


def _text_decoder(
    decoder: Decoder | None, *, continues_text: bool = False
) -> _ByteLevelText | _PiecewiseText | _WholeText:
    if decoder is None:
        return _WholeText(" ".join)
    stages = stages_of_component(decoder)
    types = [stage["type"] for stage in stages]
    if types == ["ByteLevel"]:
        return _ByteLevelText()
    if types == ["Metaspace"] or stages in (_SENTENCEPIECE_STAGES, [*_SENTENCEPIECE_STAGES, _STRIP_FIRST_SPACE]):
        return _PiecewiseText(decoder.decode, continues_text=continues_text)
    return _WholeText(decoder.decode)


def token_bytes(decoder: Decoder | None) -> Callable[[str], bytes]:
    """Returns a function that gives the bytes of UTF-8 which a token adds to a text that has begun.

    Args:
        decoder: see `IncrementalDecoder`.
    """
    text = _text_decoder(decoder)

    def of_byte_level(token: str) -> bytes:
        is_added = any(character not in BYTE_OF_CHARACTER for character in token)  # contains its literal text
        return token.encode() if is_added else bytes(map(BYTE_OF_CHARACTER.__getitem__, token))

    def of_others(token: str) -> bytes:
        if _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        join = " ".join if decoder is None else decoder.decode
        return join(["x", token])[1:].encode()

    return of_byte_level if isinstance(text, _ByteLevelText) else of_others


_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def _byte_of_character() -> dict[str, int]:
    """Returns the byte-level alphabet: printable Latin-1 characters mean themselves, U+0100 and up the other bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
