"""The boundary to the tokenizers library: limits on lengths, and its errors as TokenizerError."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import tokenizers
import torch
from tokenizers import AddedToken

from ligerzoo.checks import is_list, is_text
from ligerzoo.errors import TokenizerError
from ligerzoo.text.token_bound import TokenBound
from ligerzoo.text.tokenizer_files import TokenizerFiles, reporting
from ligerzoo.text.tokenizer_limits import MAX_GROWTH
from ligerzoo.text.truncation import Truncation


class Backend:
    """The vocabulary and the rules of a tokenizer.json.

    Args:
        files: the tokenizer's files.

    Attributes:
        where: the directory or hub id of the files, for error messages.
        library: the tokenizer of the tokenizers library. It has no limits.

    Raises:
        TokenizerError: tokenizer.json is missing or malformed, or exceeds a limit.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.where = files.where
        self.library, self._limits = files.backend()
        self._bound: TokenBound | None = None

    # Tokens

    def id_to_token(self, token_id: SupportsIndex) -> str | None:
        """Returns the vocabulary's spelling of an id, or None if there is no such token."""
        with reporting("cannot look up this id", self.where, token_id):
            return self.library.id_to_token(token_id.__index__())

    def added_tokens(self) -> dict[int, AddedToken]:
        """Returns the added tokens by id, in ascending order."""
        return dict(sorted(self.library.get_added_tokens_decoder().items()))

    def add(self, tokens: Sequence[str | AddedToken], *, special: bool = False, where: str | None = None) -> int:
        """Adds tokens at the next free ids, or changes their flags.

        Args:
            tokens: the tokens.
            special: whether they are special tokens, whatever their flags say.
            where: the file that lists them, for error messages.

        Returns:
            The number of tokens that are new.

        Raises:
            TokenizerError: a token is not a string or an `AddedToken`, or is too long.
        """
        where = where or self.where
        for token in tokens:
            if not (isinstance(token, str | AddedToken) and str(token)):
                got, expected = reprlib.repr(token), "a non-empty string or AddedToken"
                raise TokenizerError("not a token", where=where, got=got, expected=expected)
        present = [token.content for token in self.added_tokens().values()]
        self._limits.check_added({*present, *map(str, tokens)})
        self._bound = None
        with reporting("cannot add these tokens", where, tokens):
            if not special:
                return self.library.add_tokens(list(tokens))
            flags = {"normalized": False, "special": True}
            marked = [token if isinstance(token, AddedToken) else AddedToken(token, **flags) for token in tokens]
            return self.library.add_special_tokens(marked)

    # Texts to ids

    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        add_special_tokens: bool,
        truncation: Truncation | None = None,
        offsets: bool = False,
    ) -> list[tokenizers.Encoding]:
        """Encodes texts or pairs of texts, while other threads run.

        Args:
            texts: the texts.
            pairs: a second text for each.
            add_special_tokens: whether to add the special tokens that tokenizer.json puts around a text.
            truncation: how texts that are too long lose tokens; None for texts of any length.
            offsets: whether to compute the characters of each token.

        Raises:
            TokenizerError: a text is not a string, contains half of a surrogate pair, or is too long.
        """
        if pairs is not None and len(pairs) != len(texts):
            what, expected = "not one second text for each", f"{len(texts)} texts"
            raise TokenizerError(what, where="text_pair", got=len(pairs), expected=expected)
        encode = self.library.encode_batch if offsets else self.library.encode_batch_fast
        with reporting("cannot encode these texts", self.where, texts):
            for one in [*texts, *(pairs or [])]:
                self._check_text(one)
            if pairs is None and truncation is None:
                return encode(texts, add_special_tokens=add_special_tokens)
            first = encode(texts, add_special_tokens=False)
            second = None if pairs is None else encode(pairs, add_special_tokens=False)
        if second is not None:
            self._check_pair_template()
        rows = [(one, None) for one in first] if second is None else list(zip(first, second, strict=True))
        if truncation is not None:
            special = self.library.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            for row in rows:
                given = [encoding for encoding in row if encoding is not None]
                for encoding, kept in zip(given, truncation.kept(list(map(len, given)), special), strict=True):
                    encoding.truncate(kept, direction=truncation.side)
        return [self.library.post_process(one, other, add_special_tokens) for one, other in rows]

    def min_tokens(self, text: str) -> int:
        """Returns a number of tokens that a text has at least; see `TokenBound`."""
        if self._bound is None:
            self._bound = TokenBound(self.library)
        return self._bound(text)

    def _check_text(self, text: object) -> None:
        if not is_text(text):
            what, got = "cannot encode this text: it is not a string", reprlib.repr(text)
            remedy = "Call tokenizer([...]) for several texts." if is_list(text) else None
            raise TokenizerError(what, where=self.where, got=got, remedy=remedy)
        self._limits.check_text(text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = "cannot encode this text: it contains half of a surrogate pair"
            got = f"{error.object[error.start]!r} as character {error.start}"
            remedy = 'Decode the original bytes as UTF-8, with errors="replace" if they are invalid.'
            raise TokenizerError(what, where=self.where, got=got, remedy=remedy) from error

    def _check_pair_template(self) -> None:
        """Raises TokenizerError if the post-processor repeats the texts of a pair many times."""
        with reporting("cannot join two texts", self.where):
            first, second = (self.library.encode("a", add_special_tokens=False) for _ in range(2))
            length, joined = len(first) + len(second), len(self.library.post_process(first, second, True))
        if joined > MAX_GROWTH * max(1, length):
            what, where = "the post-processor for two texts exceeds the limit", f"{self.where}/tokenizer.json"
            got, expected = f"{joined} tokens from {length}", f"at most {MAX_GROWTH} times as many"
            raise TokenizerError(what, where=where, got=got, expected=expected)

    # Ids to text

    def decode(self, ids: object, skip_special_tokens: bool) -> str:
        """Decodes a list or a 1-D tensor of token ids. Ids without a token are skipped.

        Raises:
            TokenizerError: they are not a sequence of non-negative integers, or the text is too long.
        """
        row = as_lists(ids)
        if not (is_list(row) and all(map(_is_integer, row[:1]))):
            got, expected = reprlib.repr(ids), "a list or a 1-D tensor of integers"
            what, remedy = "cannot decode these ids", "decode takes one row of ids, batch_decode takes several."
            raise TokenizerError(what, where=self.where, got=got, expected=expected, remedy=remedy)
        with reporting("cannot decode these ids", self.where, ids):
            self._limits.check_tokens(map(self.library.id_to_token, row), len(row))
            return self.library.decode(row, skip_special_tokens=skip_special_tokens)


def as_lists(value: Any) -> Any:
    """Returns the elements of a tensor or the items of another iterable as lists; other values unchanged."""
    match value:
        case torch.Tensor():
            return value.tolist()
        case str() | Mapping():
            return value
        case Iterable():
            return list(value)
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not getattr(value, "ndim", 0)
