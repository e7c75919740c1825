"""Special tokens that are written in messages, as text.

A user who writes `<|im_end|>` must not end the message. So these tokens get a mark on both sides before the template
renders the messages. After that, a special token between marks means its characters. A mark without its partner is
what a template leaves that cuts a text: no special token across it is a control token.
"""

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import tokenizers

from ligerzoo.errors import TokenizerError
from ligerzoo.text.rendered import Rendered, Span, overlaps

SpecialTokens = Literal["text", "control"]
"""What a special token means that is written in a text: its characters, or the special token."""

_START, _END = "\ufdd0", "\ufdd1"  # noncharacters, which no text contains
_MAX_SPELLINGS = 2**12  # kept; those of tokens with different spaces around them are many
_ESCAPED = r"\\ufdd[01]"  # as JSON in ASCII and Python's `repr` write them
_MARK = re.compile(f"[{_START}{_END}]")


class SpecialText:
    """Marks special tokens in messages, and encodes them as text.

    Args:
        backend: the tokenizer of the tokenizers library.
        contents: the special tokens by id.

    Attributes:
        pattern: matches the longest special token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, contents: Mapping[int, str]) -> None:
        self._contents = dict(contents)
        self.pattern = pattern_of([*self._contents.values()])
        self._pattern = re.compile(f"{self.pattern.pattern}|{_ESCAPED}")
        self._marked = re.compile(f"{_START}({self._pattern.pattern}){_END}")
        self._plain = tokenizers.Tokenizer(backend.model)  # shares the model, and has no added tokens
        for stage in ("normalizer", "pre_tokenizer"):
            if (value := getattr(backend, stage)) is not None:
                setattr(self._plain, stage, value)
        self._spellings: dict[str, list[int]] = {}

    def mark(self, value: Any) -> Any:
        """Returns messages, or other JSON, with marks around each special token.

        Raises:
            TokenizerError: a text contains a mark.
        """
        match value:
            case str():
                if found := _MARK.search(value):
                    raise TokenizerError(f"a text contains the noncharacter {found[0]!a}", where="messages")
                return self._pattern.sub(rf"{_START}\g<0>{_END}", value)
            case Mapping():
                return {self.mark(name): self.mark(item) for name, item in value.items()}
            case list() | tuple():
                return list(map(self.mark, value))
        return value

    def unmark(self, text: str, spans: Sequence[Span] | None) -> Rendered:
        """Removes the marks from a rendered conversation.

        Raises:
            TokenizerError: the template escapes the marks.
        """
        if re.search(_ESCAPED, self._marked.sub("", text)):
            raise TokenizerError("the template escapes text with a special token", where="chat_template")
        if not _MARK.search(text):
            return Rendered(text, None if spans is None else list(spans), [])
        marks = [found.start() for found in _MARK.finditer(text)]

        def moved(position: int) -> int:
            return position - bisect_left(marks, position)

        whole = [found.span(1) for found in self._marked.finditer(text)]
        paired = {mark for first, last in whole for mark in (first - 1, last)}
        literal = [*whole, *((mark, mark) for mark in marks if mark not in paired)]
        return Rendered(
            _MARK.sub("", text),
            None if spans is None else [(moved(first), moved(last)) for first, last in spans],
            sorted((moved(first), moved(last)) for first, last in literal),
        )

    def spell(
        self,
        text: str,
        ids: Sequence[int],
        offsets: Sequence[Span],
        literal: Sequence[Span],
        added: Sequence[int] | None = None,
    ) -> tuple[list[int], list[Span]]:
        """Replaces special tokens of an encoded text that are text by the tokens of their characters.

        Args:
            text: the text.
            ids: its tokens.
            offsets: the (first, last + 1) characters of each token.
            literal: see `Rendered`.
            added: 1 for each token that the post-processor added; it stays. None means no such token.
        """
        spelled_ids: list[int] = []
        spelled_offsets: list[Span] = []
        for token_id, span, is_added in zip(ids, offsets, added or [0] * len(ids), strict=True):
            pieces = [token_id]
            if (content := self._contents.get(token_id)) is not None and not is_added:
                written = text[slice(*span)]
                # A normalizer may also make the token of other characters, which only a user writes.
                if content not in written or overlaps(literal, span):
                    pieces = self.spelling(written or content)
            spelled_ids += pieces
            spelled_offsets += [span] * len(pieces)
        return spelled_ids, spelled_offsets

    def spelling(self, text: str) -> list[int]:
        """Returns the ids of a special token's characters."""
        if text not in self._spellings:
            if len(self._spellings) >= _MAX_SPELLINGS:
                self._spellings.clear()
            ids = encode_continuation(self._encode, text)
            if self._contents.keys() & {*ids}:  # the model knows the whole token
                ids = [one for letter in text for one in encode_continuation(self._encode, letter)]
            self._spellings[text] = ids
        return self._spellings[text]

    def _encode(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids


def pattern_of(texts: list[str]) -> re.Pattern[str]:
    """Returns a pattern that matches the longest of some texts, and nothing for an empty list."""
    try:
        return re.compile(_any_of(texts) if texts else "(?!)")
    except RecursionError:  # each of a thousand texts begins with the one before
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _any_of(texts: list[str]) -> str:
    """Returns a pattern of the longest of some texts. It tries their common beginnings once: they may be thousands."""
    first, last = min(texts), max(texts)  # what these two begin with, all do
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    rests = sorted({text[length:] for text in texts})
    groups = itertools.groupby(filter(None, rests), key=lambda rest: rest[0])
    branches = "|".join(_any_of([*group]) for _, group in groups)
    ending = f"(?:{branches}){'' if rests[0] else '?'}" if branches else ""
    return re.escape(first[:length]) + ending


def token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Returns 1 for each token with a character in a span, else 0.

    Args:
        offsets: the (first, last + 1) characters of each token.
        spans: the spans, in order.
    """
    mask, later = [], iter(spans)
    start, end = next(later, (0, 0))
    for first, last in offsets:
        while first >= end and (following := next(later, None)):
            start, end = following
        mask.append(int(last > start and first < end))
    return mask


def encode_continuation(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Encodes a text as it continues another one: without the space that some tokenizers put before a text.

    Args:
        encode: encodes a text without special tokens.
        text: the text.
    """
    for before in ("\n", "a", "."):
        first, both = encode(before), encode(before + text)
        if both[: len(first)] == first:
            return both[len(first) :]
    return encode(text)
