"""The entries of a tokenizer's files in a checkpoint, and the files with changed tokens.

tokenizer.json holds the rules and the vocabulary. tokenizer_config.json names special tokens and may list tokens that
tokenizer.json lacks. In older checkpoints special_tokens_map.json names the special tokens.
"""

import codecs
import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import tokenizers
from tokenizers import AddedToken

from ligerzoo.checks import is_text
from ligerzoo.entries import is_array, is_object
from ligerzoo.errors import TokenizerError
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.tokenizer_json import read_object, read_rules
from ligerzoo.text.tokenizer_limits import Limits

PaddingSide = Literal["left", "right"]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ID = re.compile(r"[0-9]{1,10}")
_LEFT_PADDING_CLASSES = (
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "GemmaTokenizer",
    "CohereTokenizer",
    "Siglip2Tokenizer",
    "XLNetTokenizer",
)
_CLASSES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"), "GemmaTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
}
"""The class of a model type, for a tokenizer_config.json without `tokenizer_class`."""

_GENERIC_CLASS_TYPES = (
    "ernie4_5",
    "ernie4_5_moe",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "granite",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)
"""Model types whose tokenizers transformers loads with a class that pads on the right, whatever their file says."""


class TokenizerFiles:
    """The entries of a tokenizer's files.

    Args:
        contents: contents of the files in `TOKENIZER_INPUTS` of `ligerzoo.files.layout`, by relative path.
        where: the directory or hub id of the files, for error messages.
    """

    def __init__(self, contents: Mapping[str, bytes], where: str) -> None:
        self.contents, self.where = contents, where

    @cached_property
    def config(self) -> dict[str, Any]:
        """The entries of tokenizer_config.json."""
        return self._entries("tokenizer_config.json")

    def _entries(self, name: str) -> dict[str, Any]:
        return read_object(self.contents, name, self.where)

    def backend(self) -> tuple[tokenizers.Tokenizer, Limits]:
        """Returns the tokenizer of the tokenizers library, without padding and truncation, and its limits."""
        if "tokenizer.json" not in self.contents:
            remedy = (
                "Other tokenizer formats are not supported. transformers converts them: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
            )
            raise TokenizerError("there is no tokenizer.json", where=self.where, remedy=remedy)
        content = read_rules(self.contents, self.where)
        where = f"{self.where}/tokenizer.json"
        with reporting("cannot load the tokenizer", where):
            limits = Limits.of(content, where)
            backend = tokenizers.Tokenizer.from_buffer(self.contents["tokenizer.json"].removeprefix(codecs.BOM_UTF8))
        for token in content.get("added_tokens") or []:
            if (found := backend.token_to_id(token["content"])) != token["id"]:
                what = f"the added token {token['content']!r} cannot have this id"
                expected = f"{found}, its id in the vocabulary or the next free id"
                raise TokenizerError(what, where=where, got=token["id"], expected=expected)
        backend.no_truncation()
        backend.no_padding()
        return backend, limits

    def chat_templates(self) -> dict[str, ChatTemplate]:
        """Returns the templates in .jinja files or, if there are no such files, those in tokenizer_config.json."""
        from_files = {}
        for name, content in self.contents.items():
            if name.endswith(".jinja"):
                key = "default" if name == "chat_template.jinja" else Path(name).stem
                where = f"{self.where}/{name}"
                try:
                    from_files[key] = ChatTemplate(content.decode(), where)
                except UnicodeDecodeError as error:
                    raise TokenizerError("not valid UTF-8", where=where, got=error) from error
        if from_files:
            return from_files

        value = self.config.get("chat_template") or []
        entries = value if is_array(value) else [{"name": "default", "template": value}]
        from_config = {}
        where = f"{self.where}/tokenizer_config.json: chat_template"
        for entry in entries:
            match entry:
                case {"name": str(name), "template": str(source)}:
                    from_config[name] = ChatTemplate(source, f"{where} {name!r}")
                case _:
                    expected = "a string, or a list of objects with name and template"
                    raise TokenizerError("malformed", where=where, got=reprlib.repr(entry), expected=expected)
        return from_config

    def tokens(self) -> tuple[list[AddedToken], dict[str, AddedToken], list[AddedToken]]:
        """Returns the listed tokens in ascending order of their ids, those with a name, and further special tokens."""
        config, source = self.config, f"{self.where}/tokenizer_config.json"
        where, by_id = f"{source}: added_tokens_decoder", self.config.get("added_tokens_decoder") or {}
        if not is_object(by_id) or not all(map(_ID.fullmatch, by_id)):
            raise TokenizerError("malformed", where=where, expected="an object that maps ids to tokens")
        listed = [_token(by_id[token_id], where) for token_id in sorted(by_id, key=int)]
        named, extra = _named_tokens(config, source), _extra_tokens(config, source)
        if not listed:  # the older format: special_tokens_map.json takes precedence
            config, source = self._entries("special_tokens_map.json"), f"{self.where}/special_tokens_map.json"
            named |= _named_tokens(config, source)
            extra = extra or _extra_tokens(config, source)
        return listed, named, extra

    def padding_side(self) -> PaddingSide:
        """Returns the padding side of tokenizer_config.json, or else that of the class which transformers uses."""
        model_type = str(self._entries("config.json").get("model_type"))
        name = str(self.config.get("tokenizer_class") or _CLASSES.get(model_type)).removesuffix("Fast")
        is_byte_level_llama = name == "LlamaTokenizer" and b'"ByteLevel"' in self.contents["tokenizer.json"]
        is_left = name in _LEFT_PADDING_CLASSES and not is_byte_level_llama and model_type not in _GENERIC_CLASS_TYPES
        return self.side("padding_side", "left" if is_left else "right")

    def side(self, name: str, default: PaddingSide) -> PaddingSide:
        """Returns a side of tokenizer_config.json."""
        return checked_side(self.config.get(name, default), f"{self.where}/tokenizer_config.json: {name}")

    def with_tokens(self, added: Mapping[int, AddedToken], named: Mapping[str, str], extra: list[str]) -> Self:
        """Returns the files with other added and special tokens.

        Args:
            added: all added tokens, by id.
            named: the special tokens that have a name, such as "eos_token".
            extra: the special tokens without a name.
        """
        content = self._entries("tokenizer.json")
        content["added_tokens"] = [{"id": token_id, **_entry(token)} for token_id, token in added.items()]
        changed = {"tokenizer.json": content, "tokenizer_config.json": self._entries("tokenizer_config.json")}
        if "added_tokens_decoder" in changed["tokenizer_config.json"]:
            decoder = {str(token_id): _entry(token) for token_id, token in added.items()}
            changed["tokenizer_config.json"]["added_tokens_decoder"] = decoder
        if "special_tokens_map.json" in self.contents:
            changed["special_tokens_map.json"] = self._entries("special_tokens_map.json")
        for name, entries in changed.items():
            if name != "tokenizer.json":
                _set_special_tokens(entries, named, extra)
        encoded = {name: json.dumps(one, indent=2, ensure_ascii=False).encode() for name, one in changed.items()}
        return type(self)({**self.contents, **encoded}, self.where)

    def with_chat_template(self, source: str) -> Self:
        """Returns the files with one chat template instead of all others."""
        others = {name: content for name, content in self.contents.items() if not name.endswith(".jinja")}
        return type(self)({**others, "chat_template.jinja": source.encode()}, self.where)

    def with_lowercase(self) -> Self:
        """Returns the files whose first normalizer converts to lower case, unless one does already."""
        content = self._entries("tokenizer.json")
        normalizer = content.get("normalizer") or {"type": "Sequence", "normalizers": []}
        each = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
        if any(one.get("type") == "Lowercase" for one in each):
            return self
        content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *each]}
        return type(self)({**self.contents, "tokenizer.json": json.dumps(content).encode()}, self.where)

    def without(self, name: str) -> Self:
        """Returns the files but one."""
        return type(self)({other: content for other, content in self.contents.items() if other != name}, self.where)


def _named_tokens(config: Mapping[str, Any], where: str) -> dict[str, AddedToken]:
    """Returns the tokens of entries such as "bos_token", each a string or an object. Skips null and ""."""
    named = {
        name: value
        for name, value in config.items()
        if value and (name in NAMED_TOKENS or (name.endswith("_token") and (is_text(value) or is_object(value))))
    }
    if is_object(config.get("extra_special_tokens")):
        named |= config["extra_special_tokens"]
    return {name: _token(value, f"{where}: {name}") for name, value in named.items()}


def _extra_tokens(config: Mapping[str, Any], where: str) -> list[AddedToken]:
    """Returns the unnamed special tokens, which are under the newer or the older key."""
    for key in ("extra_special_tokens", "additional_special_tokens"):
        if is_array(config.get(key)):
            return [_token(value, f"{where}: {key}") for value in config[key]]
    return []


def _token(value: Any, where: str) -> AddedToken:
    """Returns a token from a string (a special token) or from an object with its content and flags."""
    with reporting("not a token", where, value):
        if is_text(value):
            return AddedToken(value, special=True)
        content, flags = value["content"], {flag: value[flag] for flag in _TOKEN_FLAGS if flag in value}
        if is_text(content):
            return AddedToken(content, **flags)
    raise TokenizerError("not a token", where=where, got=reprlib.repr(value), expected="a string or an object")


def checked_side(side: object, where: str) -> PaddingSide:
    """Returns the side, or raises TokenizerError if it is neither "left" nor "right"."""
    if side == "left" or side == "right":
        return side
    raise TokenizerError("unsupported value", where=where, got=repr(side), expected='"left" or "right"')


def _set_special_tokens(entries: dict[str, Any], named: Mapping[str, str], extra: list[str]) -> None:
    """Sets the entries that name special tokens. An entry with the same token keeps its spelling."""
    others = entries.get("extra_special_tokens")
    others = others if is_object(others) else {}
    for name, token in named.items():
        entry = entries.get(name, others.get(name))
        if (entry["content"] if is_object(entry) else entry) != token:
            entries[name] = token
    for name in NAMED_TOKENS:
        if name not in named:
            entries.pop(name, None)
    newer = is_array(entries.get("extra_special_tokens"))
    key = "extra_special_tokens" if newer else "additional_special_tokens"
    if extra or key in entries:
        entries[key] = extra


def _entry(token: AddedToken) -> dict[str, Any]:
    return {"content": token.content, **{flag: getattr(token, flag) for flag in _TOKEN_FLAGS}}


@contextmanager
def reporting(what: str, where: str, value: object = None) -> Iterator[None]:
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
