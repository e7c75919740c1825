"""The vocabulary of a tokenizer: tokens and their ids, special tokens and their names, added tokens."""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Self, SupportsIndex, TypeVar, overload

import torch
from tokenizers import AddedToken

from ligerzoo.checks import is_list, is_text
from ligerzoo.entries import is_object
from ligerzoo.errors import TokenizerError, unknown_names
from ligerzoo.text.backend import Backend
from ligerzoo.text.special_text import SpecialText
from ligerzoo.text.tokenizer_files import NAMED_TOKENS, TokenizerFiles

T = TypeVar("T")


class _Named(Generic[T]):
    """A special token by its name, as a text or as an id; None if the tokenizer has no such token."""

    def __init__(
        self,
        to_value: Callable[["Vocabulary", str], T | None],
        to_token: Callable[["Vocabulary", T], str | None],
    ) -> None:
        self._to_value, self._to_token = to_value, to_token

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute, self._name = name, name.removesuffix("_id")

    @overload
    def __get__(self, tokenizer: None, owner: type) -> Self: ...
    @overload
    def __get__(self, tokenizer: "Vocabulary", owner: type) -> T | None: ...
    def __get__(self, tokenizer: "Vocabulary | None", owner: type) -> Self | T | None:
        if tokenizer is None:
            return self
        token = tokenizer.special_tokens.get(self._name)
        return None if token is None else self._to_value(tokenizer, token)

    def __set__(self, tokenizer: "Vocabulary", value: T | None) -> None:
        token = None if value is None else self._to_token(tokenizer, value)
        if token is None and value is not None:
            raise TokenizerError("no token has this id", where=self._attribute, got=value)
        tokenizer.set_special_token(self._name, token)


def _special_token() -> _Named[str]:
    return _Named(lambda tokens, token: token, lambda tokens, token: token)


def _special_token_id() -> _Named[int]:
    return _Named(lambda tokens, token: tokens.token_to_id(token), lambda tokens, i: tokens.id_to_token(i))


class Vocabulary:
    """Tokens and their ids.

    Args:
        files: see `Tokenizer`.

    Attributes:
        backend: the rules of tokenizer.json, and its tokens.
        files: the files with the changes so far, as `Tokenizer.save_pretrained` writes them.
        special_tokens, additional_special_tokens: see `Tokenizer`.

    Raises:
        TokenizerError: tokenizer.json is missing, or a file is malformed.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.backend, self.files = Backend(files), files.without("config.json")
        self._special_text: SpecialText | None = None
        listed, named, extra = files.tokens()
        self._append_tokens(listed, [*named.values(), *extra])
        self.special_tokens = {name: token.content for name, token in named.items()}
        self.additional_special_tokens = [token.content for token in extra]

    bos_token = _special_token()  # `encode` adds it only if tokenizer.json says so
    eos_token = _special_token()  # generation_config.json may list more ids that end a sequence
    unk_token = _special_token()
    sep_token = _special_token()
    pad_token = _special_token()  # without one, padding uses `eos_token`
    cls_token = _special_token()
    mask_token = _special_token()

    bos_token_id = _special_token_id()
    eos_token_id = _special_token_id()
    unk_token_id = _special_token_id()
    sep_token_id = _special_token_id()
    pad_token_id = _special_token_id()
    cls_token_id = _special_token_id()
    mask_token_id = _special_token_id()

    @property
    def all_special_ids(self) -> list[int]:
        """The ids that `decode(..., skip_special_tokens=True)` leaves out, in ascending order."""
        return [token_id for token_id, token in self.backend.added_tokens().items() if token.special]

    @property
    def all_special_tokens(self) -> list[str]:
        """The tokens of `all_special_ids`, in the same order."""
        return [token.content for token in self.backend.added_tokens().values() if token.special]

    @property
    def special_text(self) -> SpecialText:
        """Encodes special tokens as text. The unknown token is left out: the model produces it for any text."""
        if self._special_text is None:
            added, unknown = self.backend.added_tokens(), self.special_tokens.get("unk_token")
            special = {token_id: token.content for token_id, token in added.items() if token.special}
            contents = {token_id: content for token_id, content in special.items() if content != unknown}
            self._special_text = SpecialText(self.backend.library, contents)
        return self._special_text

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the base vocabulary of tokenizer.json. `len` counts the added tokens too."""
        return self.backend.library.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend.library.get_vocab_size(with_added_tokens=True)

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token, or None if the vocabulary does not contain it."""
        return self.backend.library.token_to_id(token)

    def id_to_token(self, token_id: SupportsIndex) -> str | None:
        """Returns the vocabulary's spelling of an id, or None if there is no such token."""
        return self.backend.id_to_token(token_id)

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens, added ones included."""
        return self.backend.library.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Returns the id of a token, or the ids of several. Unknown tokens have `unk_token_id`, or else None."""
        if is_text(tokens):
            token_id = self.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: SupportsIndex | Iterable[SupportsIndex]) -> Any:
        """Returns the vocabulary's spelling of an id, or of several. Ids without a token have None."""
        if isinstance(ids, SupportsIndex) and not (isinstance(ids, torch.Tensor) and ids.ndim):
            return self.id_to_token(ids)
        return [self.id_to_token(token_id) for token_id in ids]

    def set_special_token(self, name: str, token: str | None) -> None:
        """Gives a token of the vocabulary a name, as `tokenizer.pad_token = "<pad>"` does.

        Args:
            name: "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token" or "mask_token".
            token: a token of the vocabulary. None removes the name.

        Raises:
            TokenizerError: the vocabulary does not contain the token.
        """
        if token is not None and self.token_to_id(token) is None:
            what, remedy = "the vocabulary does not contain this token", f"{{{name!r}: {token!r}}}"
            raise TokenizerError(what, where=name, got=repr(token), remedy=f"Call add_special_tokens({remedy}).")
        self.special_tokens = {other: named for other, named in self.special_tokens.items() if other != name}
        if token is not None:
            self.special_tokens[name] = token
        self._update_files()

    def add_special_tokens(
        self,
        special_tokens_dict: Mapping[str, Any] | Sequence[str | AddedToken],
        replace_extra_special_tokens: bool = True,
    ) -> int:
        """Adds special tokens, which are never split and which decoding may skip.

        Resize the embedding of the model to `len(tokenizer)` rows if it is smaller. The post-processor stays the same:
        a new BOS token is not added to texts.

        Args:
            special_tokens_dict: tokens by name, such as `{"pad_token": "<pad>"}`, and a list under
                "additional_special_tokens" or "extra_special_tokens"; or only such a list.
            replace_extra_special_tokens: whether the list replaces `additional_special_tokens`, or extends it by the
                tokens that it lacks. The others then keep their flags.

        Returns:
            The number of tokens that are new.

        Raises:
            TokenizerError: a name is unknown, or a token is not a string or an `AddedToken`.
        """
        if not is_object(special_tokens_dict):
            special_tokens_dict = {"extra_special_tokens": special_tokens_dict}
        lists = ("extra_special_tokens", "additional_special_tokens")
        where, names = "special_tokens_dict", (*NAMED_TOKENS, *lists)
        for name, nearest in unknown_names(special_tokens_dict, names):
            what, expected = "not a name of special tokens", None if nearest else ", ".join(names)
            raise TokenizerError(what, where=where, got=repr(name), expected=expected, remedy=nearest)
        for name, value in special_tokens_dict.items():
            if name in lists and not is_list(value):
                got = reprlib.repr(value)
                raise TokenizerError("not a list of tokens", where=f"{where}, {name}", got=got, expected="a list")
        kept = [] if replace_extra_special_tokens else self.additional_special_tokens
        tokens = {
            name: [token for token in value if str(token) not in kept] if name in lists else [value]
            for name, value in special_tokens_dict.items()
        }
        added = self.backend.add([token for listed in tokens.values() for token in listed], special=True)
        named = {name: str(token) for name, token in special_tokens_dict.items() if name not in lists}
        self.special_tokens = {**self.special_tokens, **named}
        if extra := [token for name in lists for token in tokens.get(name, [])]:
            self.additional_special_tokens = list(dict.fromkeys([*kept, *map(str, extra)]))
        self._update_files()
        return added

    def add_tokens(
        self, new_tokens: str | AddedToken | Sequence[str | AddedToken], special_tokens: bool = False
    ) -> int:
        """Adds tokens, which are never split.

        Args:
            new_tokens: a token or several.
            special_tokens: whether decoding with `skip_special_tokens=True` leaves them out.

        Returns:
            The number of tokens that are new.

        Raises:
            TokenizerError: a token is not a string or an `AddedToken`, or is too long.
        """
        tokens = [new_tokens] if isinstance(new_tokens, str | AddedToken) else list(new_tokens)
        added = self.backend.add(tokens, special=special_tokens)
        self._update_files()
        return added

    def _update_files(self) -> None:
        self._special_text = None
        added, extra = self.backend.added_tokens(), self.additional_special_tokens
        self.files = self.files.with_tokens(added, self.special_tokens, extra)

    def check_ids(self, ids: torch.Tensor | Sequence[int], vocab_size: int) -> None:
        """Raises TokenizerError if a token id has no row in the model's embedding.

        A tokenizer may have more tokens than its model, so this must be checked for each prompt.

        Args:
            ids: token ids: a tensor of integers of any shape, or a list.
            vocab_size: number of rows of the model's embedding.

        Raises:
            TokenizerError: an id is `vocab_size` or more.
        """
        largest = max(ids.flatten().tolist() if isinstance(ids, torch.Tensor) else ids, default=-1)
        if largest >= vocab_size:
            token = self.id_to_token(largest)
            what = "no such token" if token is None else f"the token {token!r} is not in the model's vocabulary"
            got, expected = f"id {largest}", f"an id below {vocab_size}, the rows of the model's embedding"
            remedy = "Use the tokenizer that the model was trained with, or remove this token from the text."
            raise TokenizerError(what, where=self.backend.where, got=got, expected=expected, remedy=remedy)

    def _append_tokens(self, listed: list[AddedToken], special: list[AddedToken]) -> None:
        """Adds the tokens that tokenizer.json lacks, or has with other flags, at the next free ids."""
        present = self.backend.added_tokens().values()
        descriptions = {repr(token) for token in present}
        new = [token for token in listed if repr(token) not in descriptions]
        contents = {token.content for token in [*present, *new]}
        for token in special:
            if token.content not in contents:
                new.append(token)
                contents.add(token.content)
        self.backend.add(new, where=f"{self.backend.where}/tokenizer_config.json")
