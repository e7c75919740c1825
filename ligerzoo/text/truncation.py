"""Truncation of encoded texts to a number of tokens."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ligerzoo.checks import is_text
from ligerzoo.errors import TokenizerError

TruncationStrategy = bool | Literal["longest_first", "only_first", "only_second", "do_not_truncate"]
"""Values of the option `truncation`; `Tokenizer.__call__` says what they mean."""


class Truncation(NamedTuple):
    """How a row, which is a text or a pair of texts, loses tokens.

    Attributes:
        strategy: "longest_first", "only_first" or "only_second".
        max_length: largest number of tokens of a row, special tokens included.
        side: the side of a text that loses tokens, "left" or "right".
    """

    strategy: str
    max_length: int
    side: str

    def kept(self, lengths: Sequence[int], special: int = 0) -> list[int]:
        """Returns how many tokens each text of a row keeps.

        Args:
            lengths: number of tokens of each text.
            special: number of special tokens that the row gets.

        Raises:
            TokenizerError: the strategy cannot remove enough tokens.
        """
        room, kept = self.max_length - special, list(lengths)
        excess = sum(lengths) - max(room, 0)
        if excess <= 0:
            return kept
        if room == 0:
            return [0] * len(kept)
        only = 1 if self.strategy == "only_second" else 0
        if room > 0 and self.strategy == "longest_first" and len(kept) == 2:
            shorter = 0 if kept[0] <= kept[1] else 1
            kept[shorter] = min(kept[shorter], room // 2)
            kept[1 - shorter] = room - kept[shorter]
        elif room > 0 and only < len(kept) and kept[only] > excess:
            kept[only] -= excess
        else:
            what = f"cannot truncate the texts with truncation={self.strategy!r}"
            got, expected = f"{room} tokens without special tokens", "more tokens, or another truncation"
            raise TokenizerError(what, where="max_length", got=got, expected=expected)
        return kept

    def slice(self, length: int) -> slice:
        """Returns the tokens that a single text of this length keeps, without special tokens."""
        (kept,) = self.kept([length])
        return slice(length - kept, None) if self.side == "left" else slice(kept)


def truncation_of(value: object, max_length: int | None, side: str) -> Truncation | None:
    """Returns the truncation that the options of `Tokenizer.__call__` describe; None for no truncation.

    Raises:
        TokenizerError: the value is not a `TruncationStrategy`, or there is no length.
    """
    if value is False or value is None or value == "do_not_truncate":
        return None
    strategy = "longest_first" if value is True else value
    if not is_text(strategy) or strategy not in ("longest_first", "only_first", "only_second"):
        expected = 'True, "longest_first", "only_first", "only_second", False or "do_not_truncate"'
        raise TokenizerError("unsupported value", where="truncation", got=repr(value), expected=expected)
    if max_length is None:
        what, got = "truncation without a length", "None, and tokenizer_config.json has none"
        raise TokenizerError(what, where="max_length", got=got, remedy="Pass max_length.")
    return Truncation(strategy, max_length, side)
