"""The text of one continuation while its tokens arrive, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ligerzoo.generate import Update
from ligerzoo.text.tokenizer import Tokenizer


class TokenText(NamedTuple):
    """One token of a continuation.

    Args:
        text: the text that the token completes: "" for special tokens and for all but the last token of a character.
        logp: its log-probability under the untempered distribution.
        offset: characters of the continuation before `text`.
    """

    text: str
    logp: float
    offset: int


class Piece(NamedTuple):
    """A part of a continuation; the texts of all parts concatenate to the text of the continuation.

    Args:
        text: the part's text, in whole characters.
        tokens: the tokens whose text is complete.
        finish_reason: None unless this is the last part: "stop" after a stop string or an end-of-sequence token,
            "length" after the largest number of tokens.
    """

    text: str
    tokens: list[TokenText]
    finish_reason: str | None


class Continuation:
    """Decodes the tokens of one continuation until the first stop string, without special tokens.

    Text that may be the beginning of a stop string is held back.

    Args:
        tokenizer: the model's tokenizer.
        stop: the stop strings. The name of a special token means this token.
        keeps_stop: whether the text includes the stop string.

    Attributes:
        num_tokens: number of tokens so far, with the token that ended the continuation.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, keeps_stop: bool = False) -> None:
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._stop_ids = {special[text] for text in stop if text in special}
        self._stop = [text for text in stop if text not in special]
        self._keeps_stop = keeps_stop
        self._decoder = tokenizer.stream(skip_special_tokens=True)
        self._held = ""
        self._returned = 0  # characters
        self._tokens: list[TokenText] = []
        self.num_tokens = 0

    def push(self, update: Update) -> Piece:
        """Returns what the new tokens add. After a finish reason, nothing may be pushed."""
        ends_sequence = update.finish_reason == "stop"
        for number, (token, logp) in enumerate(zip(update.tokens, update.logps, strict=True), 1):
            self.num_tokens += 1
            if token in self._stop_ids or (ends_sequence and number == len(update.tokens)):
                return self._finish("stop")
            self._append(TokenText(self._decoder.push(token), logp, self._returned + len(self._held)))
            if (end := self._end_at_stop()) is not None:
                return self._cut(end)
        if update.finish_reason is not None:
            return self._finish(update.finish_reason)
        return self._take(len(self._held) - self._length_of_partial_stop())

    def _append(self, token: TokenText) -> None:
        self._tokens.append(token)
        self._held += token.text

    def _end_at_stop(self) -> int | None:
        """Returns where the text ends because of the first stop string in the held text, or None."""
        found = [(start, text) for text in self._stop if (start := self._held.find(text)) >= 0]
        if not found:
            return None
        start, text = min(found, key=lambda match: (match[0], len(match[1])))
        return start + len(text) * self._keeps_stop

    def _length_of_partial_stop(self) -> int:
        """Returns the length of the longest end of the held text that begins a stop string."""
        lengths = (
            length
            for text in self._stop
            for length in range(min(len(text) - 1, len(self._held)), 0, -1)
            if self._held.endswith(text[:length])
        )
        return max(lengths, default=0)

    def _finish(self, reason: str) -> Piece:
        """Returns the rest, with the text that the decoder has held back."""
        if (rest := self._decoder.flush()) and self._tokens:
            last = self._tokens.pop()
            self._held = self._held[: len(self._held) - len(last.text)]
            self._append(last._replace(text=last.text + rest))
        else:
            self._held += rest
        end = self._end_at_stop()
        return self._take(len(self._held), reason) if end is None else self._cut(end)

    def _cut(self, end: int) -> Piece:
        """Returns the held text before `end`, and the tokens that begin there, of the last one its part of the text."""
        self._held, end_offset = self._held[:end], self._returned + end
        self._tokens = [
            token._replace(text=token.text[: end_offset - token.offset])
            for token in self._tokens
            if token.offset < end_offset
        ]
        return self._take(end, "stop")

    def _take(self, length: int, finish_reason: str | None = None) -> Piece:
        text, self._held = self._held[:length], self._held[length:]
        self._returned += length
        count = 0
        for token in self._tokens:
            # A token without text belongs to the next text: it may be a part of a character of a stop string.
            if finish_reason is None and token.offset + max(len(token.text), 1) > self._returned:
                break
            count += 1
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        return Piece(text, tokens, finish_reason)
