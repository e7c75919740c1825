"""Rendered conversations: their text, and which special tokens in it a message wrote."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

Span = tuple[int, int]
"""The (first, last + 1) characters of a part of a text."""


class Edit(NamedTuple):
    """A range of characters, (first, last + 1), and the text that replaces it."""

    first: int
    last: int
    text: str


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: the text.
        spans: its `{% generation %}` blocks; None if they were not requested, or the template has none.
        literal: the special tokens in it that are text, in order; None if all special tokens are control tokens.
    """

    text: str
    spans: list[Span] | None
    literal: list[Span] | None

    def find(self, special: str) -> list[Span]:
        """Returns where a special token, or several in a row, are control tokens."""
        found = (one.span() for one in re.finditer(re.escape(special), self.text))
        return [span for span in found if not overlaps(self.literal or [], span)]

    def edited(self, edits: Sequence[Edit]) -> Rendered:
        """Replaces ranges of the text, in order, none of which a span begins or ends within."""
        ends, moves, text, position = [], [0], "", 0
        for edit in edits:
            text += self.text[position : edit.first] + edit.text
            position = edit.last
            ends.append(edit.last)
            moves.append(len(text) - edit.last)
        text += self.text[position:]

        def moved(spans: list[Span] | None) -> list[Span] | None:
            def move(character: int) -> int:
                return character + moves[bisect_right(ends, character)]

            return None if spans is None else [(move(first), move(last)) for first, last in spans]

        return Rendered(text, moved(self.spans), moved(self.literal))


def overlaps(spans: Sequence[Span], span: Span) -> bool:
    """Returns whether a span has a character of one of some spans, or surrounds an empty one; they are in order."""
    before = bisect_left(spans, (span[1], 0)) - 1  # the last one that begins before the span ends
    return before >= 0 and spans[before][1] > span[0]
