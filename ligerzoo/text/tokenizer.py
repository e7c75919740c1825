"""Tokenizers of checkpoints that have a tokenizer.json.

    tokenizer_files       reads the files, and writes those with changed tokens
    tokenizer_limits      refuses a hostile tokenizer.json
    vocabulary            tokens and ids, special and added tokens
    encoding              texts -> ids, with `truncation` and `padding`
    chat_template         conversations -> texts
    incremental_decoding  ids that arrive one at a time -> text

The tokenizers library encodes and decodes. Only the post-processor in tokenizer.json adds a beginning-of-sequence
token.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, SupportsIndex

import torch

from ligerzoo.errors import TokenizerError
from ligerzoo.files.atomic import reading_directory, replace_files
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.encoding import TextEncoder
from ligerzoo.text.incremental_decoding import IncrementalDecoder, token_length
from ligerzoo.text.tokenizer_files import (
    FILE_PATTERNS,
    PaddingSide,
    find_chat_templates,
    read_files,
    read_json,
    reporting,
)


class Tokenizer(TextEncoder):
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
        super().__init__(files, where)
        self.chat_templates = find_chat_templates(files, read_json(files, "tokenizer_config.json", where), where)

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

    # Chat templates

    def set_chat_template(self, source: str, where: str) -> None:
        """Replaces all chat templates by one, which `save_pretrained` writes.

        Args:
            source: the jinja source.
            where: its file, for error messages.
        """
        self.chat_templates = {"default": ChatTemplate(source, where)}
        others = {name: content for name, content in self._files.items() if not name.endswith(".jinja")}
        self._files = {**others, "chat_template.jinja": source.encode()}

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

    def bytes_per_token(self) -> list[int]:
        """Returns how many bytes of UTF-8 text each token adds, by id; 0 for special tokens and ids without a token.

        The bytes of a text's tokens are those of the text. Only a leading space that the decoder strips, as those of
        SentencePiece do, counts too.
        """
        length, special = token_length(self._backend.decoder), set(self.all_special_ids)
        tokens = (None if token_id in special else self.id_to_token(token_id) for token_id in range(len(self)))
        return [0 if token is None else length(token) for token in tokens]

    def stream(self, skip_special_tokens: bool = False) -> IncrementalDecoder:
        """Returns a decoder for ids that arrive one at a time."""
        skipped_ids = self.all_special_ids if skip_special_tokens else ()
        return IncrementalDecoder(self.id_to_token, self._backend.decoder, skipped_ids)


def _checked_objects(values: Any, where: str) -> list[Mapping[str, Any]]:
    if isinstance(values, Sequence) and all(isinstance(value, Mapping) for value in values):
        return list(values)
    raise TokenizerError("not a list of dictionaries", where=where, got=reprlib.repr(values))


def _is_integer(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not getattr(value, "ndim", 0)
