"""Grammars: the texts that a continuation may be, such as those of a JSON schema. llguidance finds the next tokens."""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ligerzoo.errors import LigerzooError
from ligerzoo.generate.endless_schemas import refuse_endless

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger("ligerzoo.generate")

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
"""How llguidance reads JSON schemas: blanks as json.dumps writes them, so that no model fills its answer with them."""


class SupportsTokenBytes(Protocol):
    """A tokenizer that `Grammar` accepts, such as `ligerzoo.Tokenizer`."""

    @property
    def all_special_ids(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def token_bytes(self) -> Callable[[int], bytes]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class Grammar:
    """A constraint: continuations are texts of a grammar, from their first token to their end.

        schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        grammar = Grammar.json_schema(schema, tokenizer)
        model.generate(input_ids, constraint=grammar, max_new_tokens=100)

    A continuation that ends by `max_new_tokens` is the beginning of a text. Special tokens are not text: only a grammar
    of Lark can name them. Needs llguidance, of the extra `ligerzoo[grammar]`.

    Args:
        source: a grammar of llguidance: its Lark syntax, or its JSON.
        tokenizer: the model's tokenizer.
        where: name of the source, for messages.

    Raises:
        LigerzooError: llguidance is not installed, or does not accept the grammar, or no text can begin.
    """

    def __init__(self, source: str, tokenizer: SupportsTokenBytes, *, where: str = "grammar") -> None:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            remedy = "Run `pip install ligerzoo[grammar]`."
            raise LigerzooError("needs the package llguidance", where=where, remedy=remedy) from error
        self._vocabulary, self._tokenizer = _compiled(tokenizer), tokenizer  # to which the vocabulary refers weakly
        self._matcher = LLMatcher(self._vocabulary, source, log_level=0)
        if self._matcher.is_error():
            raise LigerzooError("not a supported grammar", where=where, got=_summary(self._matcher))
        if not self._has_texts():
            raise LigerzooError("no text can begin", where=where, got="a definition that refers to itself without end")

    @classmethod
    def json_schema(cls, schema: Mapping[str, object], tokenizer: SupportsTokenBytes, *, where: str = "schema") -> Self:
        """Returns the grammar of JSON texts that match a schema; `{"type": "object"}` for all objects.

        Properties are written in the order of the schema. Keywords that cannot be enforced are refused, such as `not`;
        `oneOf` means `anyOf`. A definition that refers to itself without end is refused.

        Args:
            schema: the JSON schema.
            tokenizer, where: see `Grammar`.
        """
        refuse_endless(schema, where)
        return cls(json_grammar(schema), tokenizer, where=where)

    def _has_texts(self) -> bool:
        matcher, mask = self._matcher.deep_copy(), np.zeros(-(-self._vocabulary.vocab_size // 32) * 4, np.uint8)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.size)
        return not matcher.is_error() and bool(mask.any())

    def start(self, eos_token_ids: Sequence[int]) -> GrammarState:
        """Returns the state of one row before its first new token; see `ligerzoo.generate.Constraint`."""
        return GrammarState(self._matcher.deep_copy(), len(self._tokenizer), self._vocabulary.vocab_size, eos_token_ids)


def json_grammar(schema: Mapping[str, object]) -> str:
    """Returns the source of a `Grammar` of JSON texts that match a schema."""
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": JSON_OPTIONS}}]})


class GrammarState:
    """How far one row is within a text of a grammar.

    Args:
        matcher: belongs to the row.
        end: what the matcher calls the token at which a text ends.
        size: number of tokens of the matcher.
        eos_token_ids: those that end a text for the model.
    """

    def __init__(self, matcher: LLMatcher, end: int, size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher, self._end, self._eos = matcher, end, frozenset(eos_token_ids)
        self._mask = np.zeros(-(-size // 32) * 4, np.uint8)
        self._has_ended = False

    def append(self, token: int) -> None:
        """Receives the next token."""
        self._has_ended = self._has_ended or token in self._eos
        if not self._has_ended:
            self._matcher.consume_token(token)

    def fill(self, bits: NDArray[np.uint8]) -> None:
        """Writes which tokens may come next, none if the grammar became too complex; see `ConstraintState`."""
        bits.fill(0)
        may_end = self._has_ended
        if not may_end:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.size)
            if self._matcher.is_error():
                log.warning("a grammar failed: %s", _summary(self._matcher))
                return
            size = min(len(bits), len(self._mask))
            bits[:size] = self._mask[:size]
            may_end = _has_bit(self._mask, self._end)
            _set_bit(bits, self._end, on=False)
        for token in self._eos:
            _set_bit(bits, token, on=may_end)


def _has_bit(bits: NDArray[np.uint8], index: int) -> bool:
    return bool(bits[index // 8] >> index % 8 & 1)


def _set_bit(bits: NDArray[np.uint8], index: int, *, on: bool) -> None:
    if index < 8 * len(bits):
        bit = np.uint8(1 << index % 8)
        bits[index // 8] = bits[index // 8] | bit if on else bits[index // 8] & ~bit


def _summary(matcher: LLMatcher) -> str:
    """Returns what is wrong with a grammar, in one line."""
    return " ".join(matcher.get_error().partition("\n<")[0].split())[:300]


class _Vocabulary:
    """The tokenizer that llguidance asks for: the bytes of each token, and one more token, at which a text ends."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, tokenizer: SupportsTokenBytes) -> None:
        bytes_of, self.eos_token_id = tokenizer.token_bytes(), len(tokenizer)
        self.tokens = [*map(bytes_of, range(len(tokenizer))), b"<|end of the text|>"]
        self.special_token_ids = [*tokenizer.all_special_ids, len(tokenizer)]
        self._tokenizer = weakref.ref(tokenizer)  # whose life is that of the vocabulary in `_COMPILED`

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens that the model's tokenizer has for a text that has to follow."""
        content, tokenizer = text.encode(), self._tokenizer()
        assert tokenizer is not None, "a grammar keeps its tokenizer"
        for lead in ("", "\2"):  # some tokenizers begin a text with a space
            ids = tokenizer.encode(lead + text, add_special_tokens=False)
            sizes = np.cumsum([len(self.tokens[token]) for token in reversed(ids)])
            last = ids[len(ids) - int(np.searchsorted(sizes, len(content))) - 1 :]
            if b"".join(self.tokens[token] for token in last) == content:
                return last
        return self._longest_first(content)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = frozenset(self.special_token_ids)
        return {text: token for token, text in enumerate(self.tokens) if text and token not in special}

    def _longest_first(self, content: bytes) -> list[int]:
        """Returns tokens of a text that the tokenizer changes, such as one that has capitals."""
        ids: list[int] = []
        while content:
            sizes = range(min(len(content), 64), 0, -1)
            if (size := next((size for size in sizes if content[:size] in self._ids), None)) is None:
                break
            ids.append(self._ids[content[:size]])
            content = content[size:]
        return ids


_COMPILED: weakref.WeakKeyDictionary[SupportsTokenBytes, LLTokenizer] = weakref.WeakKeyDictionary()
_COMPILING = threading.Lock()


def _compiled(tokenizer: SupportsTokenBytes) -> LLTokenizer:
    """Returns the vocabulary of a tokenizer for llguidance, which takes about a second the first time."""
    from llguidance import LLTokenizer

    with _COMPILING:
        if tokenizer not in _COMPILED:
            _COMPILED[tokenizer] = LLTokenizer(_Vocabulary(tokenizer))
        return _COMPILED[tokenizer]
