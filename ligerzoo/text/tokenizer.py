"""Text to token ids and back, for checkpoints with a tokenizer.json.

The tokenizers library does the splitting. Around it stand the conventions of a checkpoint's other files: named special
tokens, tokens listed only in tokenizer_config.json, chat templates. A beginning-of-sequence token is added where the
post-processor in tokenizer.json says so, and nowhere else.
"""

import json
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
from ligerzoo.text.incremental_decoding import TextStream
from ligerzoo.text.tokenizer_limits import Limits

PaddingSide = Literal["left", "right"]

FILE_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
"""The files of a tokenizer, as glob patterns inside a checkpoint's directory. Only the first is required."""

_MAX_VOCABULARY_BYTES = 2**27  # of tokenizer.json; Gemma 3's, among the largest, has a quarter of that
_MAX_FILE_BYTES = 2**24  # of each other file
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ID = re.compile(r"[0-9]{1,10}")
_LEFT_PADDING_CLASSES = ("LlamaTokenizer", "GemmaTokenizer")  # where tokenizer_config.json names a class and no side


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        files: contents by name, the names as in `FILE_PATTERNS`.
        where: what errors call the place these come from: the directory or the hub id.

    Attributes:
        special_tokens: the named special tokens, such as `{"bos_token": "<s>", "eos_token": "</s>"}`, by the names that
            chat templates use for them.
        all_special_ids: the ids that `decode(..., skip_special_tokens=True)` leaves out, ascending.
        chat_templates: the chat templates by name. A checkpoint's only template is called "default".
        padding_side: the side `__call__` pads on unless told otherwise.

    Raises:
        TokenizerError: tokenizer.json is missing, or a file is malformed.
    """

    def __init__(self, files: Mapping[str, bytes], where: str) -> None:
        self._files, self._where = dict(files), where
        self._backend = self._load_backend()

        config, source = self._json("tokenizer_config.json"), f"{where}/tokenizer_config.json"
        listed = _listed_tokens(config, source)
        named, extra = _named_tokens(config, source), _extra_tokens(config, source)
        if not listed:  # the older way to write a checkpoint, in which another file has the last word
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
        """Read a checkpoint's tokenizer from a directory, or download the few files it needs from the hub.

        Args:
            name_or_path: a directory, or a hub id such as "org/name".
            revision: the branch, tag or commit on the hub.
            token: the access token for the hub; None takes the one of the login.
            cache_dir: where downloads are kept; None is the hub library's own place.
            local_files_only: never ask the hub, use what was downloaded before.

        Raises:
            TokenizerError: there is no tokenizer.json, or a file is malformed.
            CheckpointError: the directory was replaced while it was read.
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
        """Write the files this tokenizer was read from, byte for byte.

        Each file is replaced in one step. Files of another tokenizer that was saved there before are removed.
        """
        replace_files(Path(directory), self._files, FILE_PATTERNS)

    # What there is

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text. `encode` adds it only where tokenizer.json says so."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text. generation_config.json may list more ids that end one."""
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The token that fills up short rows of a batch; where there is none, `__call__` uses `eos_token`."""
        return self.special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The token for what the vocabulary cannot spell."""
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
        """How many tokens the model of tokenizer.json knows, without the added ones that `len` counts too."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_to_id(self, token: str) -> int | None:
        """The id of exactly this token, None if there is none."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: SupportsIndex) -> str | None:
        """The token as the vocabulary spells it, None if there is none: a model may have more rows than tokens."""
        with _reporting("cannot look up this id", self._where, token_id):
            return self._backend.id_to_token(token_id.__index__())

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            text: any text; special tokens that are spelled out in it become their ids.
            add_special_tokens: whether to add what tokenizer.json puts around every text, a BOS token for example.

        Raises:
            TokenizerError: `text` is not a string, holds half a surrogate pair, or is too long for the rules of
                tokenizer.json.
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
        """A model's inputs for one text, or for several that are padded to the longest.

        Args:
            text: a text, or a list of B of them.
            padding_side: "left" (for generation) or "right"; None takes `self.padding_side`.
            return_tensors: "pt" for int64 tensors, None for lists.
            add_special_tokens: as in `encode`.

        Returns:
            `input_ids` and `attention_mask` (1 for a token, 0 for padding), each (B, T); of a single text (T,) as
            lists and (1, T) as tensors.

        Raises:
            TokenizerError: a text cannot be encoded; an argument has another value than those above; or padding is
                needed and there is neither a pad nor an EOS token.
        """
        if return_tensors not in (None, "pt"):
            raise TokenizerError("unknown kind", where="return_tensors", got=return_tensors, expected='"pt" or None')
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
        fill = self._fill_id() if any(len(row) < width for row in rows) else 0
        inputs: dict[str, Any] = {
            "input_ids": [_padded(row, width, fill, side) for row in rows],
            "attention_mask": [_padded([1] * len(row), width, 0, side) for row in rows],
        }
        if return_tensors == "pt":
            shape = len(rows), width
            return {name: torch.tensor(value, dtype=torch.int64).view(shape) for name, value in inputs.items()}
        return {name: value[0] for name, value in inputs.items()} if isinstance(text, str) else inputs

    def check_ids(self, ids: torch.Tensor, vocab_size: int) -> None:
        """Refuses token ids that a model's embedding has no row for.

        A tokenizer may know more tokens than its model, so only the ids of an actual prompt show whether they fit.

        Args:
            ids: integers of any shape.
            vocab_size: rows of the model's embedding.

        Raises:
            TokenizerError: an id is `vocab_size` or more.
        """
        if ids.numel() and (largest := int(ids.max())) >= vocab_size:
            raise TokenizerError(
                f"the token {self.id_to_token(largest)!r} is not in the model's vocabulary",
                where=self._where,
                got=f"id {largest}",
                expected=f"an id below {vocab_size}, the rows of the model's embedding",
                remedy="Use the tokenizer that the model was trained with, or leave that token out of the text.",
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
        """The prompt of a conversation, as the checkpoint's chat template writes it.

        Args:
            messages: a conversation, such as `[{"role": "user", "content": "Hello"}]`, or a list of conversations.
                Entries whose value is None are left out.
            tools: JSON schemas of the functions the model may call.
            documents: texts for the model to draw on, each with "title" and "text".
            chat_template: the name of one of `self.chat_templates`, or the text of a template. None takes "tool_use" if
                there are tools and such a template, else "default".
            add_generation_prompt: whether to begin the model's answer.
            tokenize: whether to return ids; False returns text.
            padding_side: as in `__call__`.
            return_tensors: as in `__call__`.
            variables: more variables for the template. They win over the special tokens.

        Returns:
            `str` with `tokenize=False`; `list[int]` for one conversation; with `return_tensors` or several
            conversations, the dictionary that `__call__` returns. A list of conversations without tokenization gives a
            list of texts. No special tokens are added to what the template writes.

        Raises:
            TokenizerError: there is no such template, or it fails, refuses the messages or takes too long.
        """
        batched = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Sequence)
        template = self._chosen_template(chat_template, tools)
        given = {
            **self.special_tokens,
            **variables,
            "tools": None if tools is None else _checked_objects(tools, "tools"),
            "documents": None if documents is None else _checked_objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        texts = []
        for conversation in messages if batched else [messages]:
            stated = [
                {key: value for key, value in message.items() if value is not None}
                for message in _checked_objects(conversation, "messages")
            ]
            texts.append(template.render({**given, "messages": stated}))
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

    # Ids to text

    def decode(self, ids: Sequence[int] | torch.Tensor, skip_special_tokens: bool = False) -> str:
        """The text of some ids.

        Args:
            ids: a list or a 1-D integer tensor. Ids without a token, which a model may have rows for, are left out.
            skip_special_tokens: whether to leave out `all_special_ids` too.

        Raises:
            TokenizerError: `ids` is not a sequence of non-negative integers, or the text is too long.
        """
        with _reporting("cannot decode these ids", self._where, ids):
            numbers = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
            self._limits.check_tokens(map(self._backend.id_to_token, numbers), len(numbers))
            return self._backend.decode(numbers, skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = False) -> TextStream:
        """A decoder for ids that come one at a time."""
        hidden = self.all_special_ids if skip_special_tokens else ()
        return TextStream(self.id_to_token, self._backend.decoder, hidden)

    # How it is done

    def _check_text(self, text: object) -> None:
        self._limits.check_text(text)
        try:
            if isinstance(text, str):
                text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                "cannot encode this text: it has half of a surrogate pair",
                where=self._where,
                got=f"{error.object[error.start]!r} as character {error.start}",
                remedy='Decode the bytes that it came from as UTF-8, with errors="replace" if they are not valid.',
            ) from error

    def _json(self, name: str) -> dict[str, Any]:
        where, remedy = f"{self._where}/{name}", "Download the file again; in a git clone, run `git lfs pull`."
        try:
            value = json.loads(self._files.get(name, b"{}"))
        except (ValueError, RecursionError) as error:
            raise TokenizerError("is not valid JSON", where=where, got=error, remedy=remedy) from error
        if not isinstance(value, dict):
            raise TokenizerError("is not a JSON object", where=where, got=type(value).__name__)
        return value

    def _load_backend(self) -> tokenizers.Tokenizer:
        if "tokenizer.json" not in self._files:
            raise TokenizerError(
                "there is no tokenizer.json",
                where=self._where,
                remedy="Only tokenizers with that file can be read. transformers makes it from the other formats: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...).",
            )
        where = f"{self._where}/tokenizer.json"
        content = self._json("tokenizer.json")
        with _reporting("cannot be read", where):
            self._limits = Limits.of(content, where)
            backend = tokenizers.Tokenizer.from_buffer(self._files["tokenizer.json"])
        for token in content.get("added_tokens") or []:
            if (got := backend.token_to_id(token["content"])) != token["id"]:
                raise TokenizerError(
                    f"the added token {token['content']!r} cannot have the id that the file gives it",
                    where=where,
                    got=token["id"],
                    expected=f"{got}, the next free one or the one in the vocabulary",
                )
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _added_tokens(self) -> dict[int, AddedToken]:
        return dict(sorted(self._backend.get_added_tokens_decoder().items()))

    def _append_tokens(self, listed: list[AddedToken], special: list[AddedToken]) -> None:
        """Add the tokens that tokenizer.json lacks, or has with other flags, at the next free ids."""
        present = self._added_tokens().values()
        descriptions = {repr(token) for token in present}
        new = [token for token in listed if repr(token) not in descriptions]
        known = {token.content for token in [*present, *new]}
        for token in special:
            if token.content not in known:
                new.append(token)
                known.add(token.content)
        self._limits.check_added(known)
        with _reporting("has tokens that cannot be added", f"{self._where}/tokenizer_config.json"):
            self._backend.add_tokens(new)

    def _find_chat_templates(self, config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
        """Those in files of their own; only if there are none, those in tokenizer_config.json."""
        in_files = {}
        for name, content in self._files.items():
            if name.endswith(".jinja"):
                key = "default" if name == "chat_template.jinja" else Path(name).stem
                where = f"{self._where}/{name}"
                try:
                    in_files[key] = ChatTemplate(content.decode(), where)
                except UnicodeDecodeError as error:
                    raise TokenizerError(f"is not UTF-8: {error}", where=where) from error
        if in_files:
            return in_files

        value = config.get("chat_template") or []
        entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
        in_config = {}
        where = f"{self._where}/tokenizer_config.json: chat_template"
        for entry in entries:
            match entry:
                case {"name": str(name), "template": str(source)}:
                    in_config[name] = ChatTemplate(source, f"{where} {name!r}")
                case _:
                    raise TokenizerError("is malformed", where=where, expected="a text, or a list of names and texts")
        return in_config

    def _chosen_template(self, chat_template: str | None, tools: object) -> ChatTemplate:
        wanted = chat_template
        if wanted is None:
            wanted = "tool_use" if tools is not None and "tool_use" in self.chat_templates else "default"
        if wanted in self.chat_templates:
            return self.chat_templates[wanted]
        if "{" in wanted:
            return ChatTemplate(wanted, "the chat_template argument")
        raise TokenizerError(
            f"there is no chat template named {wanted!r}",
            where=self._where,
            expected=f"one of {sorted(self.chat_templates)}" if self.chat_templates else None,
            remedy="Pass the text of one as chat_template.",
        )

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _fill_id(self) -> int:
        for token_id in (self.pad_token_id, self.eos_token_id):
            if token_id is not None:
                return token_id
        raise TokenizerError(
            "texts of different lengths need padding, and there is neither a pad_token nor an eos_token",
            where=self._where,
            remedy="Encode the texts one by one.",
        )


def _read_files(directory: Path) -> dict[str, bytes]:
    files = {}
    for pattern in FILE_PATTERNS:
        limit = _MAX_VOCABULARY_BYTES if pattern == "tokenizer.json" else _MAX_FILE_BYTES
        for path in sorted(directory.glob(pattern)):
            if path.is_file():
                with path.open("rb") as file:
                    content = file.read(limit + 1)
                if len(content) > limit:
                    raise TokenizerError("is too large", where=path, expected=f"at most {limit} bytes")
                files[path.relative_to(directory).as_posix()] = content
    return files


def _named_tokens(config: Mapping[str, Any], where: str) -> dict[str, AddedToken]:
    """The entries such as "bos_token" that name a token: a string or an object. Null and "" name none."""
    named = {
        name: value
        for name, value in config.items()
        if value and (name in _NAMED_TOKENS or (name.endswith("_token") and isinstance(value, (str, dict))))
    }
    if isinstance(config.get("extra_special_tokens"), dict):
        named |= config["extra_special_tokens"]
    return {name: _token(value, f"{where}: {name}") for name, value in named.items()}


def _extra_tokens(config: Mapping[str, Any], where: str) -> list[AddedToken]:
    """Special tokens without a name of their own, under the newer or the older key."""
    for key in ("extra_special_tokens", "additional_special_tokens"):
        if isinstance(config.get(key), list):
            return [_token(value, f"{where}: {key}") for value in config[key]]
    return []


def _listed_tokens(config: Mapping[str, Any], where: str) -> list[AddedToken]:
    """The tokens of "added_tokens_decoder", by ascending id."""
    where = f"{where}: added_tokens_decoder"
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(_ID.fullmatch(token_id) for token_id in listed):
        raise TokenizerError("is malformed", where=where, expected="an object of ids and tokens")
    return [_token(listed[token_id], where) for token_id in sorted(listed, key=int)]


def _token(value: Any, where: str) -> AddedToken:
    """A token from its content alone, then it is a special one, or from an object of its content and flags."""
    with _reporting("is not a token", where, value):
        if isinstance(value, str):
            return AddedToken(value, special=True)
        content, flags = value["content"], {flag: value[flag] for flag in _TOKEN_FLAGS if flag in value}
        if isinstance(content, str):
            return AddedToken(content, **flags)
    raise TokenizerError("is not a token", where=where, got=reprlib.repr(value))


def _padding_side(config: Mapping[str, Any], where: str) -> PaddingSide:
    tokenizer_class = str(config.get("tokenizer_class")).removesuffix("Fast")
    default = "left" if tokenizer_class in _LEFT_PADDING_CLASSES else "right"
    return _checked_side(config.get("padding_side", default), f"{where}/tokenizer_config.json: padding_side")


def _checked_side(side: object, where: str) -> PaddingSide:
    if side == "left" or side == "right":
        return side
    raise TokenizerError("unknown side", where=where, got=repr(side), expected='"left" or "right"')


def _padded(row: list[int], width: int, fill: int, side: PaddingSide) -> list[int]:
    padding = [fill] * (width - len(row))
    return padding + row if side == "left" else row + padding


def _checked_objects(values: Any, where: str) -> list[Mapping[str, Any]]:
    if isinstance(values, Sequence) and all(isinstance(value, Mapping) for value in values):
        return list(values)
    raise TokenizerError("is not a list of objects", where=where, got=reprlib.repr(values), expected="dictionaries")


@contextmanager
def _reporting(what: str, where: str, value: object = None) -> Iterator[None]:
    """Turn what the tokenizers library raises into a TokenizerError; its panics are not even `Exception`s."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        got = None if value is None else reprlib.repr(value)
        raise TokenizerError(f"{what}: {error}", where=where, got=got) from error
