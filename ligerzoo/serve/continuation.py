"""The text of one continuation while its tokens arrive, up to a stop string, and of its prompt if it is echoed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from ligerzoo.generate import Update
from ligerzoo.text.tokenizer import Tokenizer


class TokenTexts:
    """Texts and bytes of tokens within a text.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes()
        self._texts: dict[int, tuple[str, bytes]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        """Returns the text and the bytes of UTF-8 of a token.

        The text of a special token is its name. Bytes that are a part of a character are written as `\\xf0`, so that
        tokens with different bytes have different texts.
        """
        if token_id not in self._texts:
            content = self._bytes_of(token_id)
            self._texts[token_id] = content.decode(errors="backslashreplace"), content
        return self._texts[token_id]


class TokenText(NamedTuple):
    """One token of a continuation, or of its prompt.

    Args:
        text: the text that the token completes: "" for special tokens, for all but the last token of a character, and
            after the end of the text.
        id: the token id; None for the first token of a prompt.
        logp: its log-probability under the untempered distribution; None for the first token of a prompt.
        top_logps: the most likely token ids at its position and their log-probabilities, the most likely first.
        offset: characters of the prompt, if it is echoed, and of the continuation before `text`.
    """

    text: str
    id: int | None
    logp: float | None
    top_logps: Mapping[int, float]
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
        echoed: the texts of the prompt's tokens, which precede the text; None if it is not echoed. The updates must
            begin with those of the prompt.
        continues_text: whether the prompt is a text to continue: the space that it may begin with is kept.
        shown: special tokens that are part of the text, and their names.

    Attributes:
        num_tokens: number of tokens so far, with the token that ended the continuation.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        keeps_stop: bool = False,
        echoed: Sequence[str] | None = None,
        continues_text: bool = False,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self._shown = shown or {}
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._stop_ids = {special[text] for text in stop if text in special}
        self._stop = [text for text in stop if text not in special]
        self._keeps_stop = keeps_stop
        self._decoder = tokenizer.stream(skip_special_tokens=True, continues_text=continues_text)
        self._echoed = echoed
        self._num_echoed = 0  # tokens
        self._held = ""
        self._returned = 0  # characters
        self._tokens: list[TokenText] = []
        self.num_tokens = 0

    def push(self, update: Update) -> Piece:
        """Returns what the new tokens add. After a finish reason, nothing may be pushed."""
        if update.is_prompt:
            return self._echo(update)
        ends_sequence = update.finish_reason == "stop"
        for number, (token, logp, top_logps) in enumerate(_scored(update), 1):
            self.num_tokens += 1
            if token in self._stop_ids or (ends_sequence and number == len(update.tokens)):
                self._flush()
                self._append("", token, logp, top_logps)
                return self._finish("stop")
            text = self._decoder.push(token)
            if token in self._shown:
                text += self._decoder.flush() + self._shown[token]
            self._append(text, token, logp, top_logps)
            if (end := self._end_at_stop()) is not None:
                return self._cut(end)
        if update.finish_reason is not None:
            self._flush()
            return self._finish(update.finish_reason)
        return self._take(len(self._held) - self._length_of_partial_stop())

    def _echo(self, update: Update) -> Piece:
        """Returns the next part of the prompt. The first one has the first token, which no update has."""
        assert self._echoed is not None
        scored: list[tuple[int | None, float | None, Mapping[int, float]]] = list(_scored(update))
        if self._num_echoed == 0:
            scored.insert(0, (None, None, {}))
        texts = self._echoed[self._num_echoed : self._num_echoed + len(scored)]
        for text, (token, logp, top_logps) in zip(texts, scored, strict=True):
            self._append(text, token, logp, top_logps)
        self._num_echoed += len(scored)
        return self._take(len(self._held), update.finish_reason, is_whole=True)

    def _append(self, text: str, token: int | None, logp: float | None, top_logps: Mapping[int, float]) -> None:
        self._tokens.append(TokenText(text, token, logp, top_logps, self._returned + len(self._held)))
        self._held += text

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

    def _flush(self) -> None:
        """Appends the text that the decoder has held back, which belongs to the last token."""
        if (rest := self._decoder.flush()) and self._tokens:
            self._tokens[-1] = self._tokens[-1]._replace(text=self._tokens[-1].text + rest)
        self._held += rest

    def _finish(self, reason: str) -> Piece:
        """Returns the rest."""
        end = self._end_at_stop()
        return self._take(len(self._held), reason, is_whole=True) if end is None else self._cut(end)

    def _cut(self, end: int) -> Piece:
        """Returns the held text before `end`, and all tokens, each with its part of this text."""
        self._held, end_offset = self._held[:end], self._returned + end
        self._tokens = [
            token._replace(text=token.text[: max(0, end_offset - token.offset)], offset=min(token.offset, end_offset))
            for token in self._tokens
        ]
        return self._take(end, "stop", is_whole=True)

    def _take(self, length: int, finish_reason: str | None = None, *, is_whole: bool = False) -> Piece:
        """Returns the first part of the held text, and its tokens: all if it is whole."""
        text, self._held = self._held[:length], self._held[length:]
        self._returned += length
        count = 0
        for token in self._tokens:
            # A token without text belongs to the next text: it may be a part of a character of a stop string.
            if not is_whole and token.offset + max(len(token.text), 1) > self._returned:
                break
            count += 1
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        return Piece(text, tokens, finish_reason)


def _scored(update: Update) -> Iterator[tuple[int, float, Mapping[int, float]]]:
    """Yields (token id, log-probability, the most likely tokens) of each token."""
    return zip(update.tokens, update.logps, update.top_logps or repeat({}), strict=False)
