"""A lower bound on the number of tokens of a text, which takes a hundredth of the time of encoding it.

Let L(c) be the length of the longest token with the character c. A token of n characters contributes 1/L(c) <= 1/n for
each of them, so at most 1 in total. Thus a text has at least sum over its characters of 1/L(c) tokens. Characters are
bytes if the tokenizer encodes bytes.

The bound holds if no rule of the tokenizer drops a character. For other tokenizers it is 0.
"""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import tokenizers
from tokenizers.models import BPE

from ligerzoo.text.incremental_decoding import BYTE_OF_CHARACTER
from ligerzoo.text.stages import Stage, stages_of_component

_SPACE = "\u2581"  # the character for a space in the vocabularies of SentencePiece
_ASCII = 128
_FIRST_BYTE = 0xC0  # of the UTF-8 bytes of a character beyond ASCII


class TokenBound:
    """A lower bound on the number of tokens of a text.

    Args:
        backend: the tokenizer of the tokenizers library.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        normalizers, pre_tokenizers = map(stages_of_component, (backend.normalizer, backend.pre_tokenizer))
        added = list(backend.get_added_tokens_decoder().values())
        vocabulary = backend.get_vocab(with_added_tokens=False)
        self._weights = np.zeros(256)
        self._composes = any(stage["type"] == "NFC" for stage in normalizers)
        self._may_strip = any(token.lstrip or token.rstrip for token in added)
        encodes_bytes = any(stage["type"] == "ByteLevel" for stage in [*normalizers, *pre_tokenizers])
        if not all(map(_keeps_characters, [*normalizers, *pre_tokenizers])):
            return
        if not _has_all_bytes(backend, vocabulary, encodes_bytes):
            return
        added_contents = [token.content for token in added]
        if encodes_bytes:
            names = sorted(BYTE_OF_CHARACTER, key=BYTE_OF_CHARACTER.__getitem__)
            tokens = [*vocabulary, *("".join(map(names.__getitem__, text.encode())) for text in added_contents)]
            longest = _longest(tokens)
            self._weights = np.array([1 / longest.get(name, 1) for name in names])
        else:
            longest = _longest([*vocabulary, *added_contents])
            beyond_ascii = max((length for character, length in longest.items() if not character.isascii()), default=1)
            longest[" "] = max(longest.get(" ", 1), beyond_ascii)
            self._weights[:_ASCII] = [1 / longest.get(chr(code), 1) for code in range(_ASCII)]
            self._weights[_FIRST_BYTE:] = 1 / beyond_ascii

    def __call__(self, text: str) -> int:
        """Returns a number of tokens that the text has at least, without added special tokens."""
        if not self._weights.any():
            return 0
        if self._composes and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        if self._may_strip:
            text = "".join(text.split())
        codes = np.frombuffer(text.encode(errors="replace"), np.uint8)
        return int(np.bincount(codes, minlength=256) @ self._weights * (1 - 1e-9))  # not above it by rounding


def _longest(tokens: Iterable[str]) -> dict[str, int]:
    """Returns the length of the longest token with each character."""
    by_length: defaultdict[int, list[str]] = defaultdict(list)
    for token in tokens:
        by_length[len(token) + 1].append(token)  # a normalized added token may begin with a space more
    return {character: length for length in sorted(by_length) for character in {*"".join(by_length[length])}}


def _keeps_characters(stage: Stage) -> bool:
    """Returns whether each character of a text is a character of the result, but for NFC and the name of a space."""
    match stage:
        case {"type": "NFC" | "ByteLevel" | "Prepend" | "Digits" | "UnicodeScripts" | "FixedLength"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": str(new)} | {
            "type": "Metaspace",
            "replacement": str(new),
        }:
            return new == _SPACE
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
    return False


def _has_all_bytes(backend: tokenizers.Tokenizer, vocabulary: dict[str, int], encodes_bytes: bool) -> bool:
    """Returns whether no character is unknown: unknown characters are dropped, or many are one token."""
    model = backend.model
    if not isinstance(model, BPE) or not (encodes_bytes or model.byte_fallback):
        return False
    return vocabulary.keys() >= (BYTE_OF_CHARACTER.keys() if encodes_bytes else {f"<0x{i:02X}>" for i in range(256)})
