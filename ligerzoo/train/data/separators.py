"""Finds the separators of records in text: line ends, those outside the quotes of CSV, and the commas of a JSON array.

Text is scanned in pieces, in order. A state says what the last byte of a piece is part of, so that any piece can be
scanned alone once the states at the beginnings of all pieces are known. Lines need no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]

_NEWLINE, _RETURN, _QUOTE, _BACKSLASH, _COMMA = b'\n\r"\\,'


class Separators(ABC):
    """Where records of text end.

    The state at the beginning of a record is 0.

    Attributes:
        has_states: whether there are other states.
        byte: a separator is this byte. After one, the state is 0.
    """

    has_states = True
    byte = _NEWLINE

    @abstractmethod
    def scan(self, data: Bytes, state: int) -> tuple[Positions, int]:
        """Returns the indices of the separators in a piece, and the state after it."""

    def state_after(self, data: Bytes, state: int) -> int:
        """Returns the state after a piece alone."""
        return self.scan(data, state)[1]


class LineEnds(Separators):
    """The ends of lines."""

    has_states = False

    def scan(self, data: Bytes, state: int) -> tuple[Positions, int]:
        """Returns the indices of the line ends."""
        return np.flatnonzero(data == _NEWLINE), 0


_PLAIN, _QUOTED, _CLOSED, _FIELD = range(4)


class CsvRows(Separators):
    """The line ends of CSV outside of quotes.

    A quote opens a quoted field where a field begins, and is text within a field that began without one. In a quoted
    field, two quotes are one of the text. The states: a field begins, quoted text, after a quote that may be the first
    of two, in a field without quotes.

    Args:
        delimiter: between fields.
    """

    def __init__(self, delimiter: str) -> None:
        self._begins = np.zeros(256, bool)  # whether a field begins after a byte
        self._begins[[_NEWLINE, _RETURN, ord(delimiter)]] = True

    def scan(self, data: Bytes, state: int) -> tuple[Positions, int]:
        """Returns the indices of the line ends outside of quotes."""
        if not len(data):
            return np.array([], np.int64), state
        newlines = np.flatnonzero(data == _NEWLINE)
        quotes = np.flatnonzero(data == _QUOTE)
        was_quoted = state == _QUOTED
        opens = (np.arange(len(quotes)) + was_quoted) % 2 == 0  # if each quote begins or ends quoted text
        is_second = np.diff(quotes, prepend=-2) == 1  # of two, which are one of the text
        is_expected = ~opens | is_second | self._begins[data[quotes - 1]]
        if len(quotes) and quotes[0] == 0:
            is_expected[0] = state != _FIELD
        if not is_expected.all():
            quotes = self._boundaries(data, quotes, state)
        inside = (np.searchsorted(quotes, newlines) + was_quoted) % 2 == 1
        if (len(quotes) + was_quoted) % 2:
            return newlines[~inside], _QUOTED
        if len(quotes) and quotes[-1] == len(data) - 1:
            return newlines[~inside], _CLOSED
        return newlines[~inside], _PLAIN if self._begins[data[-1]] else _FIELD

    def _boundaries(self, data: Bytes, quotes: Positions, state: int) -> Positions:
        """Returns the quotes at which quoted text begins or ends, in a piece where fields without quotes have some."""
        is_quoted, closed = state == _QUOTED, -1 if state == _CLOSED else -2
        found = []
        for quote in quotes.tolist():
            begins = state == _PLAIN if quote == 0 else self._begins[data[quote - 1]]
            if is_quoted:
                is_quoted, closed = False, quote
                found.append(quote)
            elif begins or closed == quote - 1:
                is_quoted = True
                found.append(quote)
        return np.array(found, np.int64)


_IS_STRUCTURE = bytes(byte in b'"\\[]{},' for byte in range(256))
_STEPS = np.zeros(256, np.int8)
_STEPS[[*b"[{"]], _STEPS[[*b"]}"]] = 1, -1
_IN_STRING, _ESCAPED, _PER_LEVEL = 1, 2, 4
_NO_QUOTES_OR_BRACKETS = bytes(byte for byte in range(256) if byte not in b'"[]{}')


class ArrayItems(Separators):
    """The commas between the items of a JSON array, after its opening bracket.

    The state: whether the text is in a string, whether a backslash escapes the next byte, and 4 for each level.
    """

    byte = _COMMA

    def scan(self, data: Bytes, state: int) -> tuple[Positions, int]:
        """Returns the indices of the commas between items, and of a bracket that ends the array."""
        positions = np.flatnonzero(np.frombuffer(data.tobytes().translate(_IS_STRUCTURE), bool))
        if len(positions) == 0:
            return positions, state & ~_ESCAPED if len(data) else state
        kinds = data[positions]
        escapes, is_escaped = _escapes(positions, kinds == _BACKSLASH, bool(state & _ESCAPED))
        quotes = (kinds == _QUOTE) & ~is_escaped
        outside = (np.cumsum(quotes, dtype=np.int32) + (state & _IN_STRING)) % 2 == 0
        steps = np.where(outside, _STEPS[kinds], 0)
        levels = state // _PER_LEVEL + np.cumsum(steps, dtype=np.int32)
        ends = outside & (((kinds == _COMMA) & (levels == 0)) | ((steps == -1) & (levels == -1)))
        escapes_next = positions[-1] == len(data) - 1 and escapes[-1]
        after = _PER_LEVEL * int(levels[-1]) + _IN_STRING * (not outside[-1]) + _ESCAPED * bool(escapes_next)
        return positions[ends], after

    def state_after(self, data: Bytes, state: int) -> int:
        """Returns the state after a piece: from its quotes and brackets alone, which are few."""
        if not len(data):
            return state
        backslashes, is_escaped = np.flatnonzero(data == _BACKSLASH), bool(state & _ESCAPED)
        escaped = np.arange(int(is_escaped))
        if len(backslashes):
            escapes, _ = _escapes(backslashes, np.ones(len(backslashes), bool), is_escaped)
            escaped = np.append(escaped, backslashes[escapes] + 1)
        is_escaped = len(escaped) > 0 and bool(escaped[-1] == len(data))
        escaped = escaped[: len(escaped) - is_escaped]
        if len(quotes := escaped[data[escaped] == _QUOTE]):
            data = data.copy()
            data[quotes] = _COMMA
        kept = np.frombuffer(data.tobytes().translate(None, _NO_QUOTES_OR_BRACKETS), np.uint8)
        strings = (np.cumsum(kept == _QUOTE, dtype=np.uint8) + (state & _IN_STRING)) % 2  # 1 within strings
        level = state // _PER_LEVEL + int(_STEPS[kept[strings == 0]].sum(dtype=np.int64))
        in_string = int(strings[-1]) if len(kept) else state & _IN_STRING
        return _PER_LEVEL * level + in_string + _ESCAPED * is_escaped


Flags = NDArray[np.bool_]


def _escapes(positions: Positions, is_backslash: Flags, is_first_escaped: bool) -> tuple[Flags, Flags]:
    """Returns which bytes are backslashes that escape the next byte, and which are escaped.

    Args:
        positions: of bytes, all backslashes among them.
        is_first_escaped: whether the first byte of the piece is escaped.
    """
    is_escaped = np.zeros(len(positions), bool)
    is_escaped[0] = is_first_escaped and positions[0] == 0
    if not is_backslash.any():
        return is_backslash, is_escaped
    is_next = np.diff(positions) == 1
    index = np.arange(len(positions))
    begins = is_backslash.copy()
    begins[1:] &= ~(is_backslash[:-1] & is_next)  # the first of backslashes that follow each other
    first = np.maximum.accumulate(np.where(begins, index, 0))
    odd = (index - first) % 2 == 0  # the first, third, ... of them
    if is_escaped[0]:
        odd ^= first == 0
    escapes = is_backslash & odd
    is_escaped[1:] = escapes[:-1] & is_next
    return escapes, is_escaped
