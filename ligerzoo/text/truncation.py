"""Truncation of encoded texts to a number of tokens."""

from typing import Literal

import tokenizers

from ligerzoo.errors import TokenizerError

Truncation = bool | Literal["longest_first", "only_first", "only_second", "do_not_truncate"]


def truncation_strategy(value: object) -> str | None:
    """Returns the strategy of a `Truncation`; None for no truncation.

    Raises:
        TokenizerError: the value is not a `Truncation`.
    """
    if value is False or value is None or value == "do_not_truncate":
        return None
    if value is True:
        return "longest_first"
    if isinstance(value, str) and value in ("longest_first", "only_first", "only_second"):
        return value
    expected = 'True, "longest_first", "only_first", "only_second", False or "do_not_truncate"'
    raise TokenizerError("unsupported value", where="truncation", got=repr(value), expected=expected)


def truncate(
    first: tokenizers.Encoding, second: tokenizers.Encoding | None, truncation: str, room: int, side: str
) -> None:
    """Truncates a text, or a pair of texts, in place.

    Args:
        first: the text.
        second: the second text of a pair; None for a single text.
        truncation: see `truncation_strategy`.
        room: largest number of tokens in total.
        side: the side that loses tokens, "left" or "right".

    Raises:
        TokenizerError: the strategy cannot remove enough tokens.
    """
    lengths = [len(first), 0 if second is None else len(second)]
    excess = sum(lengths) - max(room, 0)
    if excess <= 0:
        return
    shorter = 0 if lengths[0] <= lengths[1] else 1
    only = 1 if truncation == "only_second" else 0
    if room == 0:
        lengths = [0, 0]
    elif truncation == "longest_first" and second is not None:
        lengths[shorter] = min(lengths[shorter], room // 2)
        lengths[1 - shorter] = room - lengths[shorter]
    else:
        lengths[only] -= excess
    if room < 0 or (room > 0 and truncation != "longest_first" and lengths[only] < 1):
        what = f"cannot truncate the texts with truncation={truncation!r}"
        got, expected = f"{room} tokens without special tokens", "more tokens, or another truncation"
        raise TokenizerError(what, where="max_length", got=got, expected=expected)
    for encoding, length in zip((first, second), lengths, strict=True):
        if encoding is not None:
            encoding.truncate(length, direction=side)


def truncate_single(length: int, truncation: str | None, max_length: int | None, side: str) -> slice:
    """Returns the tokens of a text without special tokens that truncation keeps.

    Args:
        length: number of tokens.
        truncation: see `truncation_strategy`.
        max_length: largest number of tokens.
        side: the side that loses tokens, "left" or "right".

    Raises:
        TokenizerError: there is no `max_length`, or the strategy cannot truncate a single text.
    """
    if truncation is None:
        return slice(None)
    if max_length is None:
        raise without_length()
    excess = max(length - max(max_length, 0), 0)
    if excess and truncation == "only_second":
        raise TokenizerError("there is no second text", where="truncation", got=repr(truncation))
    return slice(excess, None) if side == "left" else slice(length - excess)


def without_length() -> TokenizerError:
    """Returns the error of a truncation without a length."""
    what, got = "truncation without a length", "None, and tokenizer_config.json has none"
    return TokenizerError(what, where="max_length", got=got, remedy="Pass max_length.")
