"""Tokenizers of checkpoints that have a tokenizer.json.

The tokenizers library encodes and decodes; `tokenizer_files` reads the files. Only the post-processor in tokenizer.json
adds a beginning-of-sequence token.
"""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, SupportsIndex, overload

import tokenizers
import torch
from tokenizers import AddedToken

from ligerzoo.errors import TokenizerError, did_you_mean
from ligerzoo.files.atomic import reading_directory, replace_files
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.incremental_decoding import IncrementalDecoder
from ligerzoo.text.padding import BatchEncoding, Columns, as_tensors, pad_columns, padded_length
from ligerzoo.text.tokenizer_files import (
    FILE_PATTERNS,
    NAMED_TOKENS,
    PaddingSide,
    checked_side,
    extra_tokens,
    find_chat_templates,
    listed_tokens,
    load_backend,
    named_tokens,
    padding_side,
    read_files,
    read_json,
    reporting,
    with_tokens,
)
from ligerzoo.text.tokenizer_limits import MAX_GROWTH

Truncation = bool | Literal["longest_first", "only_first", "only_second", "do_not_truncate"]

_NO_MAX_LENGTH = int(1e30)  # transformers' value for "unknown"


class _SpecialToken:
    """A special token of a tokenizer by name; None if the tokenizer has no such token."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, tokenizer: None, owner: type) -> Self: ...
    @overload
    def __get__(self, tokenizer: "Tokenizer", owner: type) -> str | None: ...
    def __get__(self, tokenizer: "Tokenizer | None", owner: type) -> Self | str | None:
        return self if tokenizer is None else tokenizer.special_tokens.get(self.name)

    def __set__(self, tokenizer: "Tokenizer", token: str | None) -> None:
        tokenizer.set_special_token(self.name, token)


class _SpecialTokenId:
    """The id of a special token; None if the tokenizer has no such token."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name.removesuffix("_id")

    @overload
    def __get__(self, tokenizer: None, owner: type) -> Self: ...
    @overload
    def __get__(self, tokenizer: "Tokenizer", owner: type) -> int | None: ...
    def __get__(self, tokenizer: "Tokenizer | None", owner: type) -> Self | int | None:
        if tokenizer is None:
            return self
        token = tokenizer.special_tokens.get(self.name)
        return None if token is None else tokenizer.token_to_id(token)

    def __set__(self, tokenizer: "Tokenizer", token_id: int | None) -> None:
        token = None if token_id is None else tokenizer.id_to_token(token_id)
        if token is None and token_id is not None:
            raise TokenizerError("no token has this id", where=f"{self.name}_id", got=token_id)
        tokenizer.set_special_token(self.name, token)


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        files: contents of the files in `FILE_PATTERNS`, by name.
        where: the directory or hub id of the files, for error messages.

    Attributes:
        special_tokens: special tokens by the names that chat templates use, such as
            `{"bos_token": "<s>", "eos_token": "</s>"}`.
        additional_special_tokens: special tokens without a name.
        chat_templates: chat templates by name. The only template of a checkpoint is called "default".
        padding_side: the default padding side of `__call__`, "left" or "right".
        truncation_side: the side from which `truncation=True` removes tokens, "left" or "right".
        model_max_length: the default `max_length`; 10**30 if tokenizer_config.json has none.

    Raises:
        TokenizerError: tokenizer.json is missing, or a file is malformed.
    """

    def __init__(self, files: Mapping[str, bytes], where: str) -> None:
        self._files, self._where = dict(files), where
        self._backend, self._limits = load_backend(files, where)

        config, source = read_json(files, "tokenizer_config.json", where), f"{where}/tokenizer_config.json"
        listed = listed_tokens(config, source)
        named, extra = named_tokens(config, source), extra_tokens(config, source)
        if not listed:  # the older format: special_tokens_map.json takes precedence
            special_tokens_map = read_json(files, "special_tokens_map.json", where)
            source = f"{where}/special_tokens_map.json"
            named |= named_tokens(special_tokens_map, source)
            extra = extra or extra_tokens(special_tokens_map, source)
        self._append_tokens(listed, [*named.values(), *extra])

        self.special_tokens = {name: token.content for name, token in named.items()}
        self.additional_special_tokens = [token.content for token in extra]
        self.chat_templates = find_chat_templates(files, config, where)
        self.padding_side = padding_side(config, where)
        self.truncation_side = checked_side(config.get("truncation_side", "right"), f"{source}: truncation_side")
        self.model_max_length = _model_max_length(config)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Loads a checkpoint's tokenizer from a directory or from the hub.

        Args:
            name_or_path: a directory, or a hub id such as "org/name".
            revision: branch, tag or commit on the hub.
            token: access token for the hub. None uses the token of the login.
            cache_dir: directory for downloads. None uses the hub library's default.
            local_files_only: never contact the hub; use earlier downloads only.

        Raises:
            TokenizerError: tokenizer.json is missing, or a file is malformed.
            CheckpointError: the directory was replaced during the read.
        """
        from ligerzoo.files.locate import locate_files

        directory = locate_files(
            name_or_path,
            FILE_PATTERNS,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        with reading_directory(directory):
            files = read_files(directory)
        return cls(files, str(name_or_path))

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the tokenizer's files, byte for byte as they were loaded unless tokens were added or renamed.

        Replaces each file atomically and removes the files of a tokenizer that was saved there before.
        """
        replace_files(Path(directory), self._files, FILE_PATTERNS)

    # Vocabulary and special tokens

    bos_token = _SpecialToken()  # `encode` adds it only if tokenizer.json says so
    eos_token = _SpecialToken()  # generation_config.json may list more ids that end a sequence
    unk_token = _SpecialToken()
    sep_token = _SpecialToken()
    pad_token = _SpecialToken()  # without one, padding uses `eos_token`
    cls_token = _SpecialToken()
    mask_token = _SpecialToken()

    bos_token_id = _SpecialTokenId()
    eos_token_id = _SpecialTokenId()
    unk_token_id = _SpecialTokenId()
    sep_token_id = _SpecialTokenId()
    pad_token_id = _SpecialTokenId()
    cls_token_id = _SpecialTokenId()
    mask_token_id = _SpecialTokenId()

    @property
    def all_special_ids(self) -> list[int]:
        """The ids that `decode(..., skip_special_tokens=True)` leaves out, in ascending order."""
        return [token_id for token_id, token in self._added_tokens().items() if token.special]

    @property
    def all_special_tokens(self) -> list[str]:
        """The tokens of `all_special_ids`, in the same order."""
        return [token.content for token in self._added_tokens().values() if token.special]

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the base vocabulary of tokenizer.json. `len` counts the added tokens too."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token, or None if the vocabulary does not contain it."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: SupportsIndex) -> str | None:
        """Returns the vocabulary's spelling of an id, or None if there is no such token."""
        with reporting("cannot look up this id", self._where, token_id):
            return self._backend.id_to_token(token_id.__index__())

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens, added ones included."""
        return self._backend.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Returns the id of a token, or the ids of several. Unknown tokens have `unk_token_id`, or else None."""
        if isinstance(tokens, str):
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
            raise TokenizerError(
                "the vocabulary does not contain this token", where=name, got=repr(token),
                remedy=f"Call add_special_tokens({{{name!r}: {token!r}}}).",
            )  # fmt: skip
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
        if not isinstance(special_tokens_dict, Mapping):
            special_tokens_dict = {"extra_special_tokens": special_tokens_dict}
        lists = ("extra_special_tokens", "additional_special_tokens")
        for name in special_tokens_dict:
            if name not in (*NAMED_TOKENS, *lists):
                names = (*NAMED_TOKENS, *lists)
                remedy = did_you_mean(name, names)
                raise TokenizerError(
                    "not a name of special tokens", where="special_tokens_dict", got=repr(name),
                    expected=None if remedy else ", ".join(names), remedy=remedy,
                )  # fmt: skip
            if name in lists and not isinstance(special_tokens_dict[name], list | tuple):
                raise TokenizerError(
                    "not a list of tokens", where=f"special_tokens_dict, {name}",
                    got=reprlib.repr(special_tokens_dict[name]), expected="a list",
                )  # fmt: skip
        kept = [] if replace_extra_special_tokens else self.additional_special_tokens
        tokens = {
            name: [token for token in value if str(token) not in kept] if name in lists else [value]
            for name, value in special_tokens_dict.items()
        }
        added = self._add([token for listed in tokens.values() for token in listed], special=True)
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
        added = self._add(tokens, special=special_tokens)
        self._update_files()
        return added

    def _add(self, tokens: list[str | AddedToken], *, special: bool) -> int:
        for token in tokens:
            if not (isinstance(token, str | AddedToken) and str(token)):
                raise TokenizerError(
                    "not a token",
                    where=self._where,
                    got=reprlib.repr(token),
                    expected="a non-empty string or AddedToken",
                )
        present = [token.content for token in self._added_tokens().values()]
        self._limits.check_added({*present, *map(str, tokens)})
        with reporting("cannot add these tokens", self._where, tokens):
            if not special:
                return self._backend.add_tokens(tokens)
            return self._backend.add_special_tokens(
                [token if isinstance(token, AddedToken) else AddedToken(token, normalized=False, special=True)
                 for token in tokens]
            )  # fmt: skip

    def _update_files(self) -> None:
        self._files = with_tokens(
            self._files, self._where, self._added_tokens(), self.special_tokens, self.additional_special_tokens
        )

    # Encoding

    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        *,
        truncation: Truncation = False,
        max_length: int | None = None,
        return_tensors: Literal["pt"] | None = None,
    ) -> Any:
        """Encodes a text as token ids.

        Args:
            text: the text. Special tokens written in it become their ids.
            text_pair: a second text, which the post-processor of tokenizer.json joins to the first.
            add_special_tokens: whether to add the special tokens that tokenizer.json puts around a text, such as BOS.
            truncation: see `__call__`.
            max_length: see `__call__`.
            return_tensors: "pt" returns an int64 tensor (1, T), None a list.

        Raises:
            TokenizerError: `text` is not a string, contains half of a surrogate pair, or is too long.
        """
        if text_pair is None and truncation is False and return_tensors is None:
            self._check_text(text)
            with reporting("cannot encode this text", self._where, text):
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self(
            text, text_pair, add_special_tokens=add_special_tokens, truncation=truncation, max_length=max_length,
            return_tensors=return_tensors,
        )["input_ids"]  # fmt: skip

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Returns the vocabulary's spelling of the tokens of a text."""
        tokens: list[str] = self.convert_ids_to_tokens(self.encode(text, add_special_tokens=add_special_tokens))
        return tokens

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | Literal["longest", "max_length", "do_not_pad"] | None = None,
        truncation: Truncation = False,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: PaddingSide | None = None,
        return_tensors: Literal["pt"] | None = None,
        return_attention_mask: bool = True,
        return_token_type_ids: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        **unknown: Any,
    ) -> BatchEncoding:
        """Prepares the model inputs of one text or of several. The options are those of transformers.

        Args:
            text: a text, or a list of B texts.
            text_pair: a second text for each, which the post-processor of tokenizer.json joins to the first.
            add_special_tokens: see `encode`.
            padding: True or "longest" pads to the longest row, "max_length" to `max_length`. None means True with
                `return_tensors`, else False.
            truncation: True or "longest_first" removes tokens from the longer text of a pair until a row has
                `max_length` tokens; "only_first" and "only_second" from one of the texts.
            max_length: number of tokens, special tokens included. None means `model_max_length`.
            pad_to_multiple_of: rounds the length of padded rows up to a multiple of this.
            padding_side: "left" (for generation) or "right". None uses `self.padding_side`.
            return_tensors: "pt" returns int64 tensors, None returns lists.
            return_attention_mask: whether to return `attention_mask`.
            return_token_type_ids: whether to return `token_type_ids`: 0 for the first text, 1 for the second.
            return_special_tokens_mask: whether to return `special_tokens_mask`: 1 for added special tokens.
            return_offsets_mapping: whether to return `offset_mapping`, the (first, last + 1) characters of each token.
            return_length: whether to return `length`, the tokens of each row before padding.
            unknown: refused by name.

        Returns:
            `input_ids` and `attention_mask` (1 for a token, 0 for padding), each (B, T). For a single text: (T,) as
            lists and (1, T) as tensors.

        Raises:
            TokenizerError: a text cannot be encoded, an argument has an unsupported value, or rows need padding and
                there is neither a pad token nor an EOS token.
        """
        _refuse_unknown(unknown)
        is_single = isinstance(text, str)
        texts = [text] if isinstance(text, str) else list(text)
        if not isinstance(text_pair, str | Sequence | None):
            raise TokenizerError(
                "not a text", where="text_pair", got=repr(text_pair), expected="a text, a list or None"
            )
        pairs = None if text_pair is None else [text_pair] if isinstance(text_pair, str) else list(text_pair)
        limit = max_length if max_length is not None else self._known_max_length()
        encodings = self._encode_all(
            texts, pairs, add_special_tokens, _truncation(truncation), limit, offsets=return_offsets_mapping
        )
        columns: Columns = {"input_ids": [encoding.ids for encoding in encodings]}
        lengths = [len(row) for row in columns["input_ids"]]
        if return_attention_mask:
            columns["attention_mask"] = [[1] * length for length in lengths]
        if return_token_type_ids:
            columns["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        if return_special_tokens_mask:
            columns["special_tokens_mask"] = [encoding.special_tokens_mask for encoding in encodings]
        if return_offsets_mapping:
            columns["offset_mapping"] = [encoding.offsets for encoding in encodings]
        further: dict[str, Any] = {"length": lengths} if return_length else {}
        padding = return_tensors is not None if padding is None else padding
        return self._finish(
            columns, further, is_single, padding=padding, max_length=limit, pad_to_multiple_of=pad_to_multiple_of,
            padding_side=padding_side, return_tensors=return_tensors,
        )  # fmt: skip

    def pad(
        self,
        encoded_inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        padding: bool | Literal["longest", "max_length", "do_not_pad"] = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: PaddingSide | None = None,
        return_attention_mask: bool = True,
        return_tensors: Literal["pt"] | None = None,
    ) -> BatchEncoding:
        """Pads encoded rows to one length, such as in a data collator.

        Args:
            encoded_inputs: outputs of `__call__` for single texts, or one output of `__call__`. `input_ids`,
                `attention_mask`, `token_type_ids`, `special_tokens_mask` and `offset_mapping` are padded; other inputs,
                such as `labels`, are not.
            padding: see `__call__`.
            max_length: see `__call__`.
            pad_to_multiple_of: see `__call__`.
            padding_side: see `__call__`.
            return_attention_mask: whether to add an `attention_mask` to inputs without one.
            return_tensors: see `__call__`.

        Raises:
            TokenizerError: `input_ids` are missing, rows have different inputs, or as `__call__`.
        """
        if isinstance(encoded_inputs, Mapping):
            columns = {name: _as_lists(value) for name, value in encoded_inputs.items()}
        else:
            names = {name for row in encoded_inputs for name in row}
            if any(names - row.keys() for row in encoded_inputs):
                raise TokenizerError("rows with different inputs", where="encoded_inputs", got=sorted(names))
            columns = {name: [_as_lists(row[name]) for row in encoded_inputs] for name in encoded_inputs[0]}
        if "input_ids" not in columns:
            raise TokenizerError("no input_ids", where="encoded_inputs", got=sorted(columns))
        is_single = not all(isinstance(row, list) for row in columns["input_ids"])
        if is_single:
            columns = {name: [value] for name, value in columns.items()}
        if return_attention_mask and "attention_mask" not in columns:
            columns["attention_mask"] = [[1] * len(row) for row in columns["input_ids"]]
        limit = max_length if max_length is not None else self._known_max_length()
        return self._finish(
            columns, {}, is_single, padding=padding, max_length=limit, pad_to_multiple_of=pad_to_multiple_of,
            padding_side=padding_side, return_tensors=return_tensors,
        )  # fmt: skip

    def _finish(
        self,
        columns: Columns,
        further: dict[str, Any],
        is_single: bool,
        *,
        padding: bool | str,
        max_length: int | None,
        pad_to_multiple_of: int | None,
        padding_side: PaddingSide | None,
        return_tensors: str | None,
    ) -> BatchEncoding:
        """Pads rows and converts them to tensors; `further` has one number per row."""
        if return_tensors not in (None, "pt"):
            raise TokenizerError(
                "unsupported value", where="return_tensors", got=repr(return_tensors), expected='"pt" or None'
            )
        side = checked_side(padding_side or self.padding_side, "padding_side")
        lengths = [len(row) for row in columns["input_ids"]]
        length = padded_length(padding, lengths, max_length, pad_to_multiple_of)
        if length is not None and any(row < length for row in lengths):
            columns = pad_columns(columns, length, self._padding_id(), side)
        if return_tensors is not None:
            return BatchEncoding(as_tensors({**columns, **further}))
        inputs = {**columns, **further}
        return BatchEncoding({name: rows[0] for name, rows in inputs.items()} if is_single else inputs)

    def _encode_all(
        self,
        texts: list[str],
        pairs: list[str] | None,
        add_special_tokens: bool,
        truncation: str | None,
        max_length: int | None,
        *,
        offsets: bool,
    ) -> list[tokenizers.Encoding]:
        """Encodes texts or pairs of texts. `offsets` are computed on request only."""
        if pairs is not None and len(pairs) != len(texts):
            raise TokenizerError(
                "not one second text for each", where="text_pair", got=len(pairs), expected=f"{len(texts)} texts"
            )
        encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
        with reporting("cannot encode these texts", self._where, texts):
            for one in [*texts, *(pairs or [])]:
                self._check_text(one)
            if pairs is None and truncation is None:
                return encode(texts, add_special_tokens=add_special_tokens)
            first = encode(texts, add_special_tokens=False)
            second = None if pairs is None else encode(pairs, add_special_tokens=False)
        if second is not None:
            self._check_pair_template()
        if truncation is not None:
            if max_length is None:
                raise TokenizerError(
                    "truncation without a length", where="max_length", got="None, and tokenizer_config.json has none",
                    remedy="Pass max_length.",
                )  # fmt: skip
            special = self._backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            for i, encoding in enumerate(first):
                self._truncate(encoding, None if second is None else second[i], truncation, max_length - special)
        rows = [(encoding, None) for encoding in first] if second is None else zip(first, second, strict=True)
        return [self._backend.post_process(one, other, add_special_tokens) for one, other in rows]

    def _truncate(
        self, first: tokenizers.Encoding, second: tokenizers.Encoding | None, truncation: str, room: int
    ) -> None:
        """Truncates a text, or a pair of texts, to `room` tokens in total."""
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
            raise TokenizerError(
                f"cannot truncate the texts with truncation={truncation!r}", where="max_length",
                got=f"{room} tokens without special tokens", expected="more tokens, or another truncation",
            )  # fmt: skip
        for encoding, length in zip((first, second), lengths, strict=True):
            if encoding is not None:
                encoding.truncate(length, direction=self.truncation_side)

    def _check_pair_template(self) -> None:
        """Raises TokenizerError if the post-processor repeats the texts of a pair many times."""
        with reporting("cannot join two texts", self._where):
            first, second = (self._backend.encode("a", add_special_tokens=False) for _ in range(2))
            length, joined = len(first) + len(second), len(self._backend.post_process(first, second, True))
        if joined > MAX_GROWTH * max(1, length):
            raise TokenizerError(
                "the post-processor for two texts exceeds the limit", where=f"{self._where}/tokenizer.json",
                got=f"{joined} tokens from {length}", expected=f"at most {MAX_GROWTH} times as many",
            )  # fmt: skip

    def _known_max_length(self) -> int | None:
        return None if self.model_max_length >= _NO_MAX_LENGTH else self.model_max_length

    def check_ids(self, ids: torch.Tensor, vocab_size: int) -> None:
        """Raises TokenizerError if a token id has no row in the model's embedding.

        A tokenizer may have more tokens than its model, so this must be checked for each prompt.

        Args:
            ids: token ids, integers of any shape.
            vocab_size: number of rows of the model's embedding.

        Raises:
            TokenizerError: an id is `vocab_size` or more.
        """
        if ids.numel() and (largest := int(ids.max())) >= vocab_size:
            raise TokenizerError(
                f"the token {self.id_to_token(largest)!r} is not in the model's vocabulary",
                where=self._where,
                got=f"id {largest}",
                expected=f"an id below {vocab_size}, the rows of the model's embedding",
                remedy="Use the tokenizer that the model was trained with, or remove this token from the text.",
            )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        padding_side: PaddingSide | None = None,
        return_tensors: Literal["pt"] | None = None,
        **variables: Any,
    ) -> Any:
        """Renders the prompt of a conversation with the checkpoint's chat template.

        Args:
            messages: a conversation, such as `[{"role": "user", "content": "Hello"}]`, or a list of conversations.
                Entries whose value is None are dropped.
            tools: JSON schemas of the functions that the model may call.
            documents: documents for retrieval-augmented generation, each with "title" and "text".
            chat_template: a name in `self.chat_templates`, or the source of a template. None uses "tool_use" if `tools`
                are given and that template exists, else "default".
            add_generation_prompt: whether to end the prompt with the beginning of the model's answer.
            tokenize: whether to return token ids instead of text.
            padding_side: see `__call__`.
            return_tensors: see `__call__`.
            variables: further variables of the template. They take precedence over special tokens.

        Returns:
            With `tokenize=False` a text, or a list of texts for several conversations. Otherwise a list of ids for one
            conversation; the dictionary of `__call__` for several conversations or with `return_tensors`. No special
            tokens are added to the template's output.

        Raises:
            TokenizerError: the template does not exist, fails, refuses the messages, or exceeds the time or memory
                limit.
        """
        batched = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Sequence)
        template = self._chosen_template(chat_template, tools)
        variables |= {"documents": documents, "add_generation_prompt": add_generation_prompt}
        texts = [
            template.render(self._template_variables(conversation, tools, variables))
            for conversation in (messages if batched else [messages])
        ]
        if not tokenize:
            return texts if batched else texts[0]
        if batched or return_tensors is not None:
            return self(
                texts if batched else texts[0],
                padding_side=padding_side,
                return_tensors=return_tensors,
                add_special_tokens=False,
            )
        return self.encode(texts[0], add_special_tokens=False)

    def render_assistant_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Renders a conversation and returns its text and what the template marks as the assistant's.

        Args:
            messages: a conversation; see `apply_chat_template`.
            tools: see `apply_chat_template`.
            chat_template: see `apply_chat_template`.
            variables: see `apply_chat_template`.

        Returns:
            The text, and the (first, last + 1) characters of each `{% generation %}` block; None instead of a list if
            the template has no such blocks.

        Raises:
            TokenizerError: as `apply_chat_template`, or the template changes the text of a block.
        """
        template = self._chosen_template(chat_template, tools)
        variables |= {"documents": None, "add_generation_prompt": False}
        values = self._template_variables(messages, tools, variables)
        return template.render_spans(values) if template.has_generation_blocks else (template.render(values), None)

    def special_token_spellings(self) -> dict[int, list[int]]:
        """Returns, for each special token, the ids of its characters as ordinary text.

        Untrusted text that contains `<|im_end|>` must not end the message. Replace the id by these ids to encode it as
        text. The unknown token is left out: the model of the tokenizer produces it for any text.
        """
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        special = set(self.all_special_ids)

        def encode(text: str) -> list[int]:
            return backend.encode(text, add_special_tokens=False).ids

        spellings = {}
        for token_id in special - {self.unk_token_id}:
            token = self.id_to_token(token_id)
            assert token is not None
            ids = encode_continuation(encode, token)
            if special.intersection(ids):  # a Unigram model knows the whole token
                ids = [one for letter in token for one in encode_continuation(encode, letter)]
            spellings[token_id] = ids
        return spellings

    # Decoding

    def decode(self, ids: Sequence[int] | torch.Tensor, skip_special_tokens: bool = False) -> str:
        """Decodes token ids as text.

        Args:
            ids: a list or a 1-D integer tensor. Ids without a token are skipped.
            skip_special_tokens: whether to skip `all_special_ids`.

        Raises:
            TokenizerError: `ids` is not a sequence of non-negative integers, or the text is too long.
        """
        row = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        if isinstance(row, Iterable) and not isinstance(row, str):
            row = list(row)
        if not (isinstance(row, list) and all(map(_is_integer, row[:1]))):
            raise TokenizerError(
                "cannot decode these ids", where=self._where, got=reprlib.repr(ids),
                expected="a list or a 1-D tensor of integers",
                remedy="decode takes one row of ids, batch_decode takes several.",
            )  # fmt: skip
        with reporting("cannot decode these ids", self._where, ids):
            self._limits.check_tokens(map(self._backend.id_to_token, row), len(row))
            return self._backend.decode(row, skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor, skip_special_tokens: bool = False
    ) -> list[str]:
        """Decodes several rows of token ids, such as the output of `generate`; see `decode`.

        Args:
            sequences: rows of ids, or a 2-D integer tensor.
            skip_special_tokens: whether to skip `all_special_ids`.
        """
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def stream(self, skip_special_tokens: bool = False) -> IncrementalDecoder:
        """Returns a decoder for ids that arrive one at a time."""
        skipped_ids = self.all_special_ids if skip_special_tokens else ()
        return IncrementalDecoder(self.id_to_token, self._backend.decoder, skipped_ids)

    # Implementation

    def _check_text(self, text: object) -> None:
        if not isinstance(text, str):
            raise TokenizerError(
                "cannot encode this text: it is not a string", where=self._where, got=reprlib.repr(text),
                remedy="Call tokenizer([...]) for several texts." if isinstance(text, list | tuple) else None,
            )  # fmt: skip
        self._limits.check_text(text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                "cannot encode this text: it contains half of a surrogate pair",
                where=self._where,
                got=f"{error.object[error.start]!r} as character {error.start}",
                remedy='Decode the original bytes as UTF-8, with errors="replace" if they are invalid.',
            ) from error

    def _added_tokens(self) -> dict[int, AddedToken]:
        return dict(sorted(self._backend.get_added_tokens_decoder().items()))

    def _append_tokens(self, listed: list[AddedToken], special: list[AddedToken]) -> None:
        """Adds the tokens that tokenizer.json lacks, or has with other flags, at the next free ids."""
        present = self._added_tokens().values()
        descriptions = {repr(token) for token in present}
        new = [token for token in listed if repr(token) not in descriptions]
        contents = {token.content for token in [*present, *new]}
        for token in special:
            if token.content not in contents:
                new.append(token)
                contents.add(token.content)
        self._limits.check_added(contents)
        with reporting("cannot add the tokens of this file", f"{self._where}/tokenizer_config.json"):
            self._backend.add_tokens(new)

    def _chosen_template(self, chat_template: str | None, tools: object) -> ChatTemplate:
        name = chat_template
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.chat_templates else "default"
        if name in self.chat_templates:
            return self.chat_templates[name]
        if "{" in name:
            return ChatTemplate(name, "the chat_template argument")
        if not self.chat_templates and chat_template is None:
            raise TokenizerError(
                "the tokenizer has no chat template", where=self._where,
                remedy="Base models have none: use the instruction-tuned variant of the model, or pass the source of a "
                "template as chat_template.",
            )  # fmt: skip
        raise TokenizerError(
            f"there is no chat template named {name!r}",
            where=self._where,
            expected=f"one of {sorted(self.chat_templates)}" if self.chat_templates else None,
            remedy="Pass the source of a template as chat_template.",
        )

    def _template_variables(
        self, messages: Any, tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> dict[str, Any]:
        documents = variables["documents"]
        present = [
            {key: value for key, value in message.items() if value is not None}
            for message in _checked_objects(messages, "messages")
        ]
        return {
            **self.special_tokens,
            **variables,
            "tools": None if tools is None else _checked_objects(tools, "tools"),
            "documents": None if documents is None else _checked_objects(documents, "documents"),
            "messages": present,
        }

    def _padding_id(self) -> int:
        for token_id in (self.pad_token_id, self.eos_token_id):
            if token_id is not None:
                return token_id
        raise TokenizerError(
            "texts of different lengths need padding, but there is neither a pad_token nor an eos_token",
            where=self._where,
            remedy="Encode the texts one by one.",
        )


def encode_continuation(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Encodes a text as it continues another one: without the space that some tokenizers put before a text.

    Args:
        encode: encodes a text without special tokens.
        text: the text.
    """
    for before in ("\n", "a", "."):
        first, both = encode(before), encode(before + text)
        if both[: len(first)] == first:
            return both[len(first) :]
    return encode(text)


def _checked_objects(values: Any, where: str) -> list[Mapping[str, Any]]:
    if isinstance(values, Sequence) and all(isinstance(value, Mapping) for value in values):
        return list(values)
    raise TokenizerError("not a list of dictionaries", where=where, got=reprlib.repr(values))


def _is_integer(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not getattr(value, "ndim", 0)


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in options:
        accepted = [option for option in inspect.signature(Tokenizer.__call__).parameters if option != "self"]
        remedy = did_you_mean(name, accepted)
        raise TokenizerError(
            "not an option of the tokenizer", where=name, expected=None if remedy else ", ".join(accepted[:-1]),
            remedy=remedy,
        )  # fmt: skip


def _truncation(value: object) -> str | None:
    """Returns the strategy; None for no truncation."""
    if value is False or value is None or value == "do_not_truncate":
        return None
    if value is True:
        return "longest_first"
    if isinstance(value, str) and value in ("longest_first", "only_first", "only_second"):
        return value
    expected = 'True, "longest_first", "only_first", "only_second", False or "do_not_truncate"'
    raise TokenizerError("unsupported value", where="truncation", got=repr(value), expected=expected)


def _model_max_length(config: Mapping[str, Any]) -> int:
    value = config.get("model_max_length")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _NO_MAX_LENGTH
    return int(value) if is_number and value is not None else _NO_MAX_LENGTH


def _as_lists(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else list(value) if isinstance(value, Sequence) else value
