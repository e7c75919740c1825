"""The texts of single tokens, such as those that a model could have chosen."""

from __future__ import annotations

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
