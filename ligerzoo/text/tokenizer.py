"""Tokenizers of checkpoints that have a tokenizer.json.

The tokenizers library encodes and decodes. This module reads the other files: named special tokens, tokens that only
tokenizer_config.json lists, chat templates. Only the post-processor in tokenizer.json adds a beginning-of-sequence
token.
"""

import json
import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self, SupportsIndex

import tokenizers
import torch
from tokenizers import AddedToken

from ligerzoo.errors import TokenizerError
from ligerzoo.files.atomic import reading_directory, replace_files
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.incremental_decoding import IncrementalDecoder
from ligerzoo.text.tokenizer_limits import Limits

PaddingSide = Literal["left", "right"]

FILE_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
"""The files of a tokenizer, as glob patterns inside a checkpoint directory. Only the first is required."""

_MAX_VOCABULARY_BYTES = 2**27  # of tokenizer.json; Gemma 3's, one of the largest, has a quarter of this
_MAX_FILE_BYTES = 2**24  # of every other file
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ID = re.compile(r"[0-9]{1,10}")
_LEFT_PADDING_CLASSES = ("LlamaTokenizer", "GemmaTokenizer")  # if tokenizer_config.json has no padding_side


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        files: contents of the files in `FILE_PATTERNS`, by name.
        where: the directory or hub id of the files, for error messages.

    Attributes:
        special_tokens: special tokens by the names that chat templates use, such as
            `{"bos_token": "<s>", "eos_token": "</s>"}`.
        all_special_ids: the ids that `decode(..., skip_special_tokens=True)` leaves out, in ascending order.
        chat_templates: chat templates by name. The only template of a checkpoint is called "default".
        padding_side: the default padding side of `__call__`, "left" or "right".

    Raises:
        TokenizerError: tokenizer.json is missing, or a file is malformed.
    """

    def __init__(self, files: Mapping[str, bytes], where: str) -> None:
        self._files, self._where = dict(files), where
        self._backend = self._load_backend()

        config, source = self._json("tokenizer_config.json"), f"{where}/tokenizer_config.json"
        listed = _listed_tokens(config, source)
        named, extra = _named_tokens(config, source), _extra_tokens(config, source)
        if not listed:  # the older format: special_tokens_map.json takes precedence
            special_tokens_map, source = self._json("special_tokens_map.json"), f"{where}/special_tokens_map.json"
            named |= _named_tokens(special_tokens_map, source)
            extra = extra or _extra_tokens(special_tokens_map, source)
        self._append_tokens(listed, [*named.values(), *extra])

        self.special_tokens = {name: token.content for name, token in named.items()}
        self.all_special_ids = [i for i, token in self._added_tokens().items() if token.special]
        self.chat_templates = self._find_chat_templates(config)
        self.padding_side = _padding_side(config, where)

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
            files = _read_files(directory)
        return cls(files, str(name_or_path))

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the tokenizer's files, byte for byte as they were loaded.

        Replaces each file atomically and removes the files of a tokenizer that was saved there before.
        """
        replace_files(Path(directory), self._files, FILE_PATTERNS)

    # Vocabulary and special tokens

    @property
    def bos_token(self) -> str | None:
        """The beginning-of-sequence token. `encode` adds it only if tokenizer.json says so."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The end-of-sequence token. generation_config.json may list more ids that end a sequence."""
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The padding token. Without one, `__call__` pads with `eos_token`."""
        return self.special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The token for text that the vocabulary cannot encode."""
        return self.special_tokens.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._special_id("unk_token")

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
        with _reporting("cannot look up this id", self._where, token_id):
            return self._backend.id_to_token(token_id.__index__())

    # Encoding

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text as token ids.

        Args:
            text: the text. Special tokens written in it become their ids.
            add_special_tokens: whether to add the special tokens that tokenizer.json puts around a text, such as BOS.

        Raises:
            TokenizerError: `text` is not a string, contains half of a surrogate pair, or is too long.
        """
        self._check_text(text)
        with _reporting("cannot encode this text", self._where, text):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding_side: PaddingSide | None = None,
        return_tensors: Literal["pt"] | None = None,
        add_special_tokens: bool = True,
    ) -> dict[str, Any]:
        """Prepares the model inputs of one text, or of several texts padded to the longest.

        Args:
            text: a text, or a list of B texts.
            padding_side: "left" (for generation) or "right". None uses `self.padding_side`.
            return_tensors: "pt" returns int64 tensors, None returns lists.
            add_special_tokens: see `encode`.

        Returns:
            `input_ids` and `attention_mask` (1 for a token, 0 for padding), each (B, T). For a single text: (T,) as
            lists and (1, T) as tensors.

        Raises:
            TokenizerError: a text cannot be encoded, an argument has an unsupported value, or the texts need padding
                and there is neither a pad token nor an EOS token.
        """
        if return_tensors not in (None, "pt"):
            raise TokenizerError(
                "unsupported value", where="return_tensors", got=repr(return_tensors), expected='"pt" or None'
            )
        side = _checked_side(padding_side or self.padding_side, "padding_side")
        if isinstance(text, str):
            rows = [self.encode(text, add_special_tokens)]
        else:
            with _reporting("cannot encode these texts", self._where, text):
                for one in text:
                    self._check_text(one)
                encodings = self._backend.encode_batch_fast(list(text), add_special_tokens=add_special_tokens)
            rows = [encoding.ids for encoding in encodings]

        width = max(map(len, rows), default=0)
        padding_id = self._padding_id() if any(len(row) < width for row in rows) else 0
        inputs: dict[str, Any] = {
            "input_ids": [_padded(row, width, padding_id, side) for row in rows],
            "attention_mask": [_padded([1] * len(row), width, 0, side) for row in rows],
        }
        if return_tensors == "pt":
            shape = len(rows), width
            return {name: torch.tensor(value, dtype=torch.int64).view(shape) for name, value in inputs.items()}
        return {name: value[0] for name, value in inputs.items()} if isinstance(text, str) else inputs

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
        template_variables = {
            **self.special_tokens,
            **variables,
            "tools": None if tools is None else _checked_objects(tools, "tools"),
            "documents": None if documents is None else _checked_objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        texts = []
        for conversation in messages if batched else [messages]:
            present = [
                {key: value for key, value in message.items() if value is not None}
                for message in _checked_objects(conversation, "messages")
            ]
            texts.append(template.render({**template_variables, "messages": present}))
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

    # Decoding

    def decode(self, ids: Sequence[int] | torch.Tensor, skip_special_tokens: bool = False) -> str:
        """Decodes token ids as text.

        Args:
            ids: a list or a 1-D integer tensor. Ids without a token are skipped.
            skip_special_tokens: whether to skip `all_special_ids`.

        Raises:
            TokenizerError: `ids` is not a sequence of non-negative integers, or the text is too long.
        """
        with _reporting("cannot decode these ids", self._where, ids):
            numbers = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
            self._limits.check_tokens(map(self._backend.id_to_token, numbers), len(numbers))
            return self._backend.decode(numbers, skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = False) -> IncrementalDecoder:
        """Returns a decoder for ids that arrive one at a time."""
        skipped_ids = self.all_special_ids if skip_special_tokens else ()
        return IncrementalDecoder(self.id_to_token, self._backend.decoder, skipped_ids)

    # Implementation

    def _check_text(self, text: object) -> None:
        self._limits.check_text(text)
        try:
            if isinstance(text, str):
                text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                "cannot encode this text: it contains half of a surrogate pair",
                where=self._where,
                got=f"{error.object[error.start]!r} as character {error.start}",
                remedy='Decode the original bytes as UTF-8, with errors="replace" if they are invalid.',
            ) from error

    def _json(self, name: str) -> dict[str, Any]:
        where, remedy = f"{self._where}/{name}", "Download the file again, or run `git lfs pull` in a git clone."
        try:
            value = json.loads(self._files.get(name, b"{}"))
        except (ValueError, RecursionError) as error:
            raise TokenizerError("not valid JSON", where=where, got=error, remedy=remedy) from error
        if not isinstance(value, dict):
            raise TokenizerError("not a JSON object", where=where, got=type(value).__name__)
        return value

    def _load_backend(self) -> tokenizers.Tokenizer:
        if "tokenizer.json" not in self._files:
            raise TokenizerError(
                "there is no tokenizer.json",
                where=self._where,
                remedy="Other tokenizer formats are not supported. transformers converts them: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...).",
            )
        where = f"{self._where}/tokenizer.json"
        content = self._json("tokenizer.json")
        with _reporting("cannot load the tokenizer", where):
            self._limits = Limits.of(content, where)
            backend = tokenizers.Tokenizer.from_buffer(self._files["tokenizer.json"])
        for token in content.get("added_tokens") or []:
            if (got := backend.token_to_id(token["content"])) != token["id"]:
                raise TokenizerError(
                    f"the added token {token['content']!r} cannot have this id",
                    where=where,
                    got=token["id"],
                    expected=f"{got}, its id in the vocabulary or the next free id",
                )
        backend.no_truncation()
        backend.no_padding()
        return backend

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
        with _reporting("cannot add the tokens of this file", f"{self._where}/tokenizer_config.json"):
            self._backend.add_tokens(new)

    def _find_chat_templates(self, config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
        """Returns the templates in .jinja files or, if there are no such files, those in tokenizer_config.json."""
        from_files = {}
        for name, content in self._files.items():
            if name.endswith(".jinja"):
                key = "default" if name == "chat_template.jinja" else Path(name).stem
                where = f"{self._where}/{name}"
                try:
                    from_files[key] = ChatTemplate(content.decode(), where)
                except UnicodeDecodeError as error:
                    raise TokenizerError("not valid UTF-8", where=where, got=error) from error
        if from_files:
            return from_files

        value = config.get("chat_template") or []
        entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
        from_config = {}
        where = f"{self._where}/tokenizer_config.json: chat_template"
        for entry in entries:
            match entry:
                case {"name": str(name), "template": str(source)}:
                    from_config[name] = ChatTemplate(source, f"{where} {name!r}")
                case _:
                    expected = "a string, or a list of objects with name and template"
                    raise TokenizerError("malformed", where=where, got=reprlib.repr(entry), expected=expected)
        return from_config

    def _chosen_template(self, chat_template: str | None, tools: object) -> ChatTemplate:
        name = chat_template
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.chat_templates else "default"
        if name in self.chat_templates:
            return self.chat_templates[name]
        if "{" in name:
            return ChatTemplate(name, "the chat_template argument")
        raise TokenizerError(
            f"there is no chat template named {name!r}",
            where=self._where,
            expected=f"one of {sorted(self.chat_templates)}" if self.chat_templates else None,
            remedy="Pass the source of a template as chat_template.",
        )

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _padding_id(self) -> int:
        for token_id in (self.pad_token_id, self.eos_token_id):
            if token_id is not None:
                return token_id
        raise TokenizerError(
            "texts of different lengths need padding, but there is neither a pad_token nor an eos_token",
            where=self._where,
            remedy="Encode the texts one by one.",
        )


def _read_files(directory: Path) -> dict[str, bytes]:
    files = {}
    for pattern in FILE_PATTERNS:
        limit = _MAX_VOCABULARY_BYTES if pattern == "tokenizer.json" else _MAX_FILE_BYTES
        paths = sorted(directory.glob(pattern)) if "*" in pattern else [directory / pattern]
        for path in filter(os.path.lexists, paths):
            if not path.is_file():  # a broken link or a pipe is a damaged checkpoint, not an absent file
                raise TokenizerError("is not a readable file", where=path, remedy="Download the checkpoint again.")
            with path.open("rb") as file:
                content = file.read(limit + 1)
            if len(content) > limit:
                raise TokenizerError("the file is too large", where=path, expected=f"at most {limit} bytes")
            files[path.relative_to(directory).as_posix()] = content
    return files


def _named_tokens(config: Mapping[str, Any], where: str) -> dict[str, AddedToken]:
    """Returns the tokens of entries such as "bos_token", each a string or an object. Skips null and ""."""
    named = {
        name: value
        for name, value in config.items()
        if value and (name in _NAMED_TOKENS or (name.endswith("_token") and isinstance(value, (str, dict))))
    }
    if isinstance(config.get("extra_special_tokens"), dict):
        named |= config["extra_special_tokens"]
    return {name: _token(value, f"{where}: {name}") for name, value in named.items()}


def _extra_tokens(config: Mapping[str, Any], where: str) -> list[AddedToken]:
    """Returns the unnamed special tokens, which are under the newer or the older key."""
    for key in ("extra_special_tokens", "additional_special_tokens"):
        if isinstance(config.get(key), list):
            return [_token(value, f"{where}: {key}") for value in config[key]]
    return []


def _listed_tokens(config: Mapping[str, Any], where: str) -> list[AddedToken]:
    """Returns the tokens of "added_tokens_decoder" in ascending order of their ids."""
    where = f"{where}: added_tokens_decoder"
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(_ID.fullmatch(token_id) for token_id in listed):
        raise TokenizerError("malformed", where=where, expected="an object that maps ids to tokens")
    return [_token(listed[token_id], where) for token_id in sorted(listed, key=int)]


def _token(value: Any, where: str) -> AddedToken:
    """Returns a token from a string (a special token) or from an object with its content and flags."""
    with _reporting("not a token", where, value):
        if isinstance(value, str):
            return AddedToken(value, special=True)
        content, flags = value["content"], {flag: value[flag] for flag in _TOKEN_FLAGS if flag in value}
        if isinstance(content, str):
            return AddedToken(content, **flags)
    raise TokenizerError("not a token", where=where, got=reprlib.repr(value), expected="a string or an object")


def _padding_side(config: Mapping[str, Any], where: str) -> PaddingSide:
    tokenizer_class = str(config.get("tokenizer_class")).removesuffix("Fast")
    default = "left" if tokenizer_class in _LEFT_PADDING_CLASSES else "right"
    return _checked_side(config.get("padding_side", default), f"{where}/tokenizer_config.json: padding_side")


def _checked_side(side: object, where: str) -> PaddingSide:
    if side == "left" or side == "right":
        return side
    raise TokenizerError("unsupported value", where=where, got=repr(side), expected='"left" or "right"')


def _padded(row: list[int], width: int, padding_id: int, side: PaddingSide) -> list[int]:
    padding = [padding_id] * (width - len(row))
    return padding + row if side == "left" else row + padding


def _checked_objects(values: Any, where: str) -> list[Mapping[str, Any]]:
    if isinstance(values, Sequence) and all(isinstance(value, Mapping) for value in values):
        return list(values)
    raise TokenizerError("not a list of dictionaries", where=where, got=reprlib.repr(values))


@contextmanager
def _reporting(what: str, where: str, value: object = None) -> Iterator[None]:
    """Converts what the tokenizers library raises to TokenizerError. Its panics are not subclasses of `Exception`."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        got = None if value is None else reprlib.repr(value)
        raise TokenizerError(f"{what}: {error}", where=where, got=got) from error
