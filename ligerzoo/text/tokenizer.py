"""Tokenizers of checkpoints that have a tokenizer.json.

    tokenizer_files       reads the files, and writes those with changed tokens
    tokenizer_limits      refuses a hostile tokenizer.json
    stages                the stages of its rules
    vocabulary            tokens and ids, special and added tokens
    encoding              texts -> ids, with `truncation` and `padding`
    messages              conversations in the form of chat templates
    chat_template         conversations -> texts
    special_text          special tokens that are written in messages
    token_bound           texts -> a lower bound on the number of ids
    incremental_decoding  ids that arrive one at a time -> text

The tokenizers library encodes and decodes. Only the post-processor in tokenizer.json adds a beginning-of-sequence
token.
"""

import inspect
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, SupportsIndex, Unpack, get_args

import torch

from ligerzoo.checks import AT_LEAST_1, one_of
from ligerzoo.errors import ConfigError, TokenizerError, did_you_mean
from ligerzoo.files.atomic import replace_files
from ligerzoo.files.transformers_options import TextOptions, text_options
from ligerzoo.files.untrusted import reading_directory
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.encoding import TextEncoder, refuse_unknown
from ligerzoo.text.incremental_decoding import IncrementalDecoder, token_bytes
from ligerzoo.text.messages import OpenMessage, checked_objects, normalized_messages
from ligerzoo.text.padding import BatchEncoding
from ligerzoo.text.rendered import Rendered
from ligerzoo.text.special_text import SpecialTokens, token_mask
from ligerzoo.text.tokenizer_files import (
    FILE_PATTERNS,
    READ_PATTERNS,
    PaddingSide,
    TokenizerFiles,
    read_files,
    reporting,
)
from ligerzoo.text.truncation import Truncation, truncate_single, truncation_strategy

_NO_TEMPLATE = (
    "Base models have none: use the instruction-tuned variant of the model, or pass the source of a template as "
    "chat_template."
)
_FURTHER_OPTIONS = ("pad_to_multiple_of", "padding_side", "return_attention_mask", "return_offsets_mapping")
"""What `tokenizer_kwargs` of `apply_chat_template` may have."""


class Tokenizer(TextEncoder):
    """A checkpoint's tokenizer.

    Args:
        files: contents of the files in `READ_PATTERNS`, by name.
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
        read = TokenizerFiles(files, where)
        super().__init__(read)
        self.chat_templates = read.chat_templates()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        padding_side: PaddingSide | None = None,
        truncation_side: PaddingSide | None = None,
        model_max_length: int | None = None,
        **options: Unpack[TextOptions],
    ) -> Self:
        """Loads a checkpoint's tokenizer from a directory or from the hub.

        Args:
            name_or_path: a directory, or a hub id such as "org/name".
            padding_side: value of the attribute instead of the files'.
            truncation_side: value of the attribute instead of the files'.
            model_max_length: value of the attribute instead of the files'.
            options: `revision`, `token`, `cache_dir` and `local_files_only`, see `HubOptions`; and options of
                transformers that change nothing here, such as `use_fast`.

        Raises:
            TokenizerError: tokenizer.json is missing, or a file is malformed.
            CheckpointError: the directory was replaced during the read.
            ConfigError: an option is unknown, or has an invalid value.
        """
        from ligerzoo.files.locate import locate_files

        given = {"padding_side": padding_side, "truncation_side": truncation_side, "model_max_length": model_max_length}
        hub_options = text_options(options, "Tokenizer.from_pretrained", *given)
        attributes = {name: _attribute(name, value) for name, value in given.items() if value is not None}
        directory = locate_files(name_or_path, READ_PATTERNS, **hub_options)
        with reading_directory(directory):
            files = read_files(directory)
        tokenizer = cls(files, str(name_or_path))
        for name, value in attributes.items():
            setattr(tokenizer, name, value)
        return tokenizer

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
        conversation: Sequence[Mapping[str, object]] | Sequence[Sequence[Mapping[str, object]]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        special_tokens: SpecialTokens = "control",
        tokenize: bool = True,
        padding: bool | Literal["longest", "max_length", "do_not_pad"] | None = None,
        truncation: Truncation = False,
        max_length: int | None = None,
        padding_side: PaddingSide | None = None,
        return_tensors: Literal["pt"] | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: Mapping[str, object] | None = None,
        **variables: Any,
    ) -> Any:
        """Renders the prompt of a conversation with the checkpoint's chat template, and encodes it.

        The options are those of transformers. No special tokens are added to the template's output.

        Args:
            conversation: a conversation, such as `[{"role": "user", "content": "Hello"}]`, or a list of conversations.
                Entries whose value is None are dropped. Reasoning may be called "reasoning_content", "reasoning" or
                "thinking".
            tools: JSON schemas of the functions that the model may call.
            documents: documents for retrieval-augmented generation, each with "title" and "text".
            chat_template: a name in `self.chat_templates`, or the source of a template. None uses "tool_use" if `tools`
                are given and that template exists, else "default".
            add_generation_prompt: whether to end the prompt with the beginning of the model's answer.
            continue_final_message: whether the prompt ends within the last message, which the model then continues. A
                string names the field of the message that it continues, such as "reasoning_content".
            special_tokens: what a special token means that is written in messages, tools, documents or variables:
                "control" for the special token, as in transformers; "text" for its characters, so that untrusted text
                cannot end a message.
            tokenize: whether to return token ids instead of text. The options below have no effect without.
            padding: see `__call__`.
            truncation: see `__call__`.
            max_length: see `__call__`.
            padding_side: see `__call__`.
            return_tensors: see `__call__`.
            return_dict: whether to return the dictionary of `__call__`, or only `input_ids`. None means True for
                several conversations, with `return_tensors` and with `return_assistant_tokens_mask`.
            return_assistant_tokens_mask: whether to return `assistant_masks`: 1 for tokens in the `{% generation %}`
                blocks of the template, the assistant's text. Warns if the template has none.
            tokenizer_kwargs: further options of `__call__`: `pad_to_multiple_of`, `padding_side`,
                `return_attention_mask` and `return_offsets_mapping`.
            variables: further variables that the template reads, such as `enable_thinking`. They take precedence over
                special tokens. Others are refused by name; transformers ignores them.

        Returns:
            With `tokenize=False` a text, or a list of texts for several conversations. Otherwise the ids, or a
            dictionary; see `return_dict`.

        Raises:
            TokenizerError: the conversation is empty, or an option is unknown or does not go with another one; the
                template does not exist, fails, refuses the messages, or exceeds the time or memory limit.
        """
        is_batch = isinstance(conversation, Sequence) and bool(conversation) and isinstance(conversation[0], Sequence)
        conversations: Sequence[Any] = conversation if is_batch else [conversation]
        if any(isinstance(one, Sequence) and not one for one in conversations):
            raise TokenizerError("the conversation is empty", where="messages", expected="at least one message")
        if return_assistant_tokens_mask and not (tokenize and return_dict is not False and not continue_final_message):
            what = "does not go with tokenize=False, return_dict=False or continue_final_message"
            raise TokenizerError(what, where="return_assistant_tokens_mask")
        render = partial(
            self.render_chat,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=special_tokens,
            finds_spans=return_assistant_tokens_mask,
            variables=variables,
        )
        rendered = [render(one) for one in conversations]
        if not tokenize:
            texts = [one.text for one in rendered]
            return texts if is_batch else texts[0]
        if return_assistant_tokens_mask and rendered[0].spans is None:
            warnings.warn("the chat template has no {% generation %} block: assistant_masks are 0", stacklevel=2)
        further: dict[str, Any] = {} if padding_side is None else {"padding_side": padding_side}
        further |= tokenizer_kwargs or {}
        refuse_unknown(further, _FURTHER_OPTIONS, "tokenizer_kwargs")
        strategy = truncation_strategy(truncation)
        limit = self._limit(max_length)
        inputs: dict[str, list[Any]] = {"input_ids": [], "offset_mapping": [], "assistant_masks": []}
        for one in rendered:
            ids, offsets = self.encode_rendered(one)
            kept = truncate_single(len(ids), strategy, limit, self.truncation_side)
            inputs["input_ids"].append(ids[kept])
            inputs["offset_mapping"].append(offsets[kept])
            inputs["assistant_masks"].append(token_mask(offsets[kept], one.spans or []))
        if not further.pop("return_offsets_mapping", False):
            del inputs["offset_mapping"]
        if not return_assistant_tokens_mask:
            del inputs["assistant_masks"]
        padding = return_tensors is not None if padding is None else padding
        padded = self.pad(inputs, padding=padding, max_length=limit, return_tensors=return_tensors, **further)
        if not is_batch and return_tensors is None:
            padded = BatchEncoding({name: rows[0] for name, rows in padded.items()})
        if return_dict is None:
            return_dict = is_batch or return_tensors is not None or return_assistant_tokens_mask
        return padded if return_dict else padded["input_ids"]

    def render_chat(
        self,
        conversation: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        special_tokens: SpecialTokens = "control",
        finds_spans: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> Rendered:
        """Renders a conversation, and finds the special tokens in it that are text.

        Args:
            conversation: see `apply_chat_template`, as are the others.
            finds_spans: whether to find the `{% generation %}` blocks.
            variables: further variables of the template.

        Returns:
            The text with the characters of blocks and of special tokens that are text; `encode_rendered` encodes it.

        Raises:
            TokenizerError: as `apply_chat_template`, or the template changes the text of a block.
        """
        template = self._chosen_template(chat_template, tools)
        messages, variables = normalized_messages(conversation), dict(variables or {})
        self._refuse_unknown_variables(template, variables)
        if continue_final_message and add_generation_prompt:
            what, remedy = "given together with add_generation_prompt", "Continue the last message, or begin a new one."
            raise TokenizerError(what, where="continue_final_message", remedy=remedy)
        values: dict[str, Any] = {
            "messages": messages,
            "tools": None if tools is None else checked_objects(tools, "tools"),
            "documents": None if documents is None else checked_objects(documents, "documents"),
        }
        if special_tokens not in get_args(SpecialTokens):
            got, expected = repr(special_tokens), '"text" or "control"'
            raise TokenizerError("unsupported value", where="special_tokens", got=got, expected=expected)
        if special_tokens == "text":
            values, variables = self.special_text.mark(values), self.special_text.mark(variables)
        open_message = None
        if continue_final_message:
            open_message = OpenMessage(values["messages"], continue_final_message, template.source)
            values["messages"] = open_message.messages
        variables = {**self.special_tokens, **variables, "add_generation_prompt": add_generation_prompt, **values}
        spans = None
        if finds_spans and template.has_generation_blocks:
            text, spans = template.render_spans(variables)
        else:
            text = template.render(variables)
        text = text if open_message is None else open_message.cut(text)
        return self.special_text.unmark(text, spans) if special_tokens == "text" else Rendered(text, spans, None)

    def _refuse_unknown_variables(self, template: ChatTemplate, variables: Mapping[str, object]) -> None:
        """Raises TokenizerError if the template does not read a variable: it would have no effect."""
        if not variables:
            return
        options = inspect.signature(Tokenizer.apply_chat_template).parameters.keys() - {"self", "variables"}
        accepted = template.variables - {"messages", "tools", "documents", "add_generation_prompt"}
        for name in variables:
            if name not in accepted:
                own = sorted(accepted - options - self.special_tokens.keys())
                what = "neither an option nor a variable that the chat template reads"
                expected = f"an option, or one of the template's variables {', '.join(own) or '(it has none)'}"
                remedy = did_you_mean(name, [*options, *own])
                raise TokenizerError(what, where=name, expected=expected, remedy=remedy)

    def _chosen_template(self, chat_template: str | None, tools: object) -> ChatTemplate:
        name = chat_template
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.chat_templates else "default"
        if name in self.chat_templates:
            return self.chat_templates[name]
        if "{" in name:
            return ChatTemplate(name, "the chat_template argument")
        if not self.chat_templates and chat_template is None:
            raise TokenizerError("the tokenizer has no chat template", where=self._where, remedy=_NO_TEMPLATE)
        expected = f"one of {sorted(self.chat_templates)}" if self.chat_templates else None
        what, remedy = f"there is no chat template named {name!r}", "Pass the source of a template as chat_template."
        raise TokenizerError(what, where=self._where, expected=expected, remedy=remedy)

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
            got, expected = reprlib.repr(ids), "a list or a 1-D tensor of integers"
            what, remedy = "cannot decode these ids", "decode takes one row of ids, batch_decode takes several."
            raise TokenizerError(what, where=self._where, got=got, expected=expected, remedy=remedy)
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

    def token_bytes(self) -> Callable[[int], bytes]:
        """Returns a function of a token id: the bytes of UTF-8 that it adds to a text that has begun.

        They may be a part of a character. Those of a special token are its name. An id without a token has none.
        """
        bytes_of, special = token_bytes(self._backend.decoder), frozenset(self.all_special_ids)

        def of(token_id: int) -> bytes:
            token = self.id_to_token(token_id)
            if token is None:
                return b""
            return token.encode() if token_id in special else bytes_of(token)

        return of

    def bytes_per_token(self) -> list[int]:
        """Returns how many bytes of UTF-8 text each token adds, by id; 0 for special tokens and ids without a token.

        The bytes of a text's tokens are those of the text. Only a leading space that the decoder strips, as those of
        SentencePiece do, counts too.
        """
        bytes_of, special = self.token_bytes(), frozenset(self.all_special_ids)
        return [0 if token_id in special else len(bytes_of(token_id)) for token_id in range(len(self))]

    def stream(self, skip_special_tokens: bool = False, *, continues_text: bool = False) -> IncrementalDecoder:
        """Returns a decoder for ids that arrive one at a time; see `IncrementalDecoder`."""
        skipped_ids = self.all_special_ids if skip_special_tokens else ()
        return IncrementalDecoder(self.id_to_token, self._backend.decoder, skipped_ids, continues_text=continues_text)


def _is_integer(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not getattr(value, "ndim", 0)


def _attribute(name: str, value: object) -> object:
    """Returns the value of an attribute that a user gives. Raises ConfigError if it is invalid."""
    values = AT_LEAST_1 if name == "model_max_length" else one_of(get_args(PaddingSide))
    if not values.accepts(value):
        where, got = f"Tokenizer.from_pretrained, argument {name}", repr(value)[:200]
        raise ConfigError("invalid value", where=where, got=got, expected=values.expected)
    return value
