"""Encodes texts such that a prompt has the tokens that it has at inference.

Tokens may merge across the end of a prompt: "Answer: " + "yes" may become "Answer", ":", " yes", while the prompt
alone ends with the token " ". A model that continues the prompt never sees the merged token. So the prompt is encoded
alone, and the completion as its continuation, wherever the tokens of both together do not begin with the prompt's.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from ligerzoo.errors import TokenizerError
from ligerzoo.text.rendered import Rendered, Span
from ligerzoo.text.special_text import SpecialTokens, encode_continuation
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.samples import Source


@dataclass
class EncodedText:
    """Encoded text.

    Attributes:
        ids: token ids.
        offsets: the (first, last + 1) characters of each token.
    """

    ids: list[int]
    offsets: list[Span]


class RecordTextEncoder:
    """Encodes the texts of records.

    Args:
        tokenizer: the tokenizer.
        special_tokens: what a special token that is written in a text means: "text" encodes its characters like other
            text, so that data cannot end a message or a document; "control" encodes it as the special token.
        eos_token_id: the end-of-sequence token. None for that of the tokenizer.

    Raises:
        TokenizerError: there is no end-of-sequence token.
    """

    def __init__(
        self, tokenizer: Tokenizer, special_tokens: SpecialTokens = "text", eos_token_id: int | None = None
    ) -> None:
        self.tokenizer, self.special_tokens = tokenizer, special_tokens
        self._eos = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        self.special_ids = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        self.special_pattern = tokenizer.special_text.pattern
        self._has_warned, self._warning_lock = False, threading.Lock()
        marked, plain = self.tokenizer.encode("a"), self.encode("a").ids
        self.bos: list[int] = marked[: marked.index(plain[0])] if plain and plain[0] in marked else []

    @property
    def eos(self) -> int:
        """The end-of-sequence token.

        Raises:
            TokenizerError: the tokenizer has no end-of-sequence token.
        """
        if self._eos is None:
            raise TokenizerError(
                "the tokenizer has no end-of-sequence token", where="eos_token_id", got=None, expected="a token id",
                remedy="Pass eos_token_id.",
            )  # fmt: skip
        return self._eos

    def encode(self, text: str) -> EncodedText:
        """Encodes a text, special tokens in it included; adds no others."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encodes texts in parallel, see `encode`."""
        columns = self.tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
        )
        return [EncodedText(*row) for row in zip(columns["input_ids"], columns["offset_mapping"], strict=True)]

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts in parallel without offsets, which takes less time; see `encode`."""
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)[
            "input_ids"
        ]
        return ids

    def plain(self, ids: list[int], text: str, source: Source) -> list[int]:
        """Replaces the special tokens that are written in a text by their characters, unless they mean control tokens.

        Args:
            ids: the tokens of the text.
            text: the text.
            source: its record, for the warning.
        """
        if self.special_tokens == "control" or not (found := self.special_pattern.search(text)):
            return ids
        self.warn_special(found[0], source)
        return [
            one
            for token_id in ids
            for one in (self._spelling(token_id) if token_id in self.special_ids else (token_id,))
        ]

    def _spelling(self, token_id: int) -> list[int]:
        return self.tokenizer.special_text.spelling(self.tokenizer.id_to_token(token_id) or "")

    def warn_special(self, token: str, source: Source) -> None:
        """Warns once that a text contains a special token that is encoded as text."""
        with self._warning_lock:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            warnings.warn(
                f"{source}: the special token {token!r} in a text is encoded as text. If the data contains special "
                'tokens on purpose, pass special_tokens="control". Later records are not reported.',
                stacklevel=2,
            )

    def continuation(self, prompt: list[int], both: list[int], completion: str) -> list[int]:
        """Returns the tokens of a completion after the tokens of its prompt.

        Args:
            prompt: ids of the prompt.
            both: ids of prompt and completion together.
            completion: text of the completion.
        """
        if both[: len(prompt)] == prompt:
            return both[len(prompt) :]
        return encode_continuation(lambda text: self.encode_ids([text])[0], completion)

    def encode_conversation(self, rendered: Rendered) -> EncodedText:
        """Encodes a conversation such that the text before each answer, a span, has the tokens that it has alone.

        Returns:
            The tokens. Offsets never leave out characters and never overlap, except for characters of several tokens.
        """
        text = rendered.text
        tokens = self.encode(text)
        for start, _ in rendered.spans or []:
            tokens = self._split_at(text, tokens, start)
        if rendered.literal is not None:
            tokens = EncodedText(*self.tokenizer.special_text.spell(text, tokens.ids, tokens.offsets, rendered.literal))
        offsets: list[Span] = []
        end = 0
        for first, last in tokens.offsets:
            offsets.append((min(first, end), max(last, end)))  # a token of spaces has the offsets (last, last)
            end = offsets[-1][1]
        return EncodedText(tokens.ids, offsets)

    def _split_at(self, text: str, tokens: EncodedText, start: int) -> EncodedText:
        """Encodes again from the last special token before `start` to the next one, if a token crosses `start`."""
        first, first_character, last, last_character = 0, 0, len(tokens.ids), len(text)
        for index, (token_id, (begin, end)) in enumerate(zip(tokens.ids, tokens.offsets, strict=True)):
            if token_id in self.special_ids:
                if end <= start:
                    first, first_character = index, begin
                elif begin >= start:
                    last, last_character = index, begin
                    break
        prompt = self.encode(text[first_character:start])
        between = tokens.ids[first:last]
        if between[: len(prompt.ids)] == prompt.ids:
            return tokens
        rest = self.continuation(prompt.ids, between, text[start:last_character])
        offsets = [(a + first_character, b + first_character) for a, b in prompt.offsets]
        return EncodedText(
            tokens.ids[:first] + prompt.ids + rest + tokens.ids[last:],
            tokens.offsets[:first] + offsets + [(start, last_character)] * len(rest) + tokens.offsets[last:],
        )
