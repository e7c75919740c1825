"""Tokenizers of checkpoints that have a tokenizer.json.

A `Tokenizer` is a `Vocabulary` that encodes, renders and decodes; each part is in its own file:

    tokenizer_files       reads the files, and writes those with changed tokens
    tokenizer_limits      refuses a hostile tokenizer.json
    stages                the stages of its rules
    backend               the tokenizers library, behind the limits
    vocabulary            tokens and ids, special and added tokens
    truncation, padding   rows of ids -> batches
    messages              conversations in the form of chat templates
    chat, chat_template   conversations -> texts
    special_text          special tokens that are written in messages
    token_bound           texts -> a lower bound on the number of ids
    incremental_decoding  ids that arrive one at a time -> text

The tokenizers library encodes and decodes. Only the post-processor in tokenizer.json adds a beginning-of-sequence
token.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, Unpack, get_args

import torch

from ligerzoo.checks import AT_LEAST_1, is_number, one_of
from ligerzoo.errors import ConfigError, TokenizerError, unknown_names
from ligerzoo.files.atomic import replace_files
from ligerzoo.files.transformers_options import TextOptions, text_options
from ligerzoo.files.untrusted import reading_directory
from ligerzoo.text.chat import RenderOptions, check_variables, render
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.incremental_decoding import IncrementalDecoder, token_bytes
from ligerzoo.text.padding import BatchEncoding, Columns, Padding
from ligerzoo.text.rendered import Rendered, Span
from ligerzoo.text.special_text import SpecialTokens, token_mask
from ligerzoo.text.tokenizer_files import FILE_PATTERNS, READ_PATTERNS, PaddingSide, TokenizerFiles, read_files
from ligerzoo.text.truncation import Truncation, TruncationStrategy, truncation_of
from ligerzoo.text.vocabulary import Vocabulary

_NO_MAX_LENGTH = int(1e30)  # transformers' value for "unknown"
_FURTHER_OPTIONS = ("pad_to_multiple_of", "padding_side", "return_attention_mask", "return_offsets_mapping")
"""What `tokenizer_kwargs` of `apply_chat_template` may have."""


class Tokenizer(Vocabulary):
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
        self.padding_side, self.truncation_side = read.padding_side(), read.side("truncation_side", "right")
        length = read.config.get("model_max_length", 0)
        self.model_max_length = int(length) if is_number(length) and 0 < length < _NO_MAX_LENGTH else _NO_MAX_LENGTH
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
        replace_files(Path(directory), self.files.contents, FILE_PATTERNS)

    # Encoding

    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        *,
        truncation: TruncationStrategy = False,
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
            return self.backend.encode([text], add_special_tokens=add_special_tokens)[0].ids
        options: dict[str, Any] = {"truncation": truncation, "max_length": max_length}
        inputs = self(text, text_pair, add_special_tokens=add_special_tokens, return_tensors=return_tensors, **options)
        return inputs["input_ids"]

    def min_tokens(self, text: str) -> int:
        """Returns a number of tokens that a text has at least, in a hundredth of the time of `encode`.

        0 if the tokenizer has rules that drop characters. The first call takes up to a quarter of a second. A text that
        `encode` would refuse is not refused here.
        """
        return self.backend.min_tokens(text)

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
        truncation: TruncationStrategy = False,
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
        if unknown:
            parameters = inspect.signature(Tokenizer.__call__).parameters
            refuse_unknown(unknown, [name for name in parameters if name not in ("self", "unknown")], "the tokenizer")
        is_single = isinstance(text, str)
        texts = [text] if isinstance(text, str) else list(text)
        if not isinstance(text_pair, str | Sequence | None):
            expected = "a text, a list or None"
            raise TokenizerError("not a text", where="text_pair", got=repr(text_pair), expected=expected)
        pairs = None if text_pair is None else [text_pair] if isinstance(text_pair, str) else list(text_pair)
        limit = self._limit(max_length)
        encodings = self.backend.encode(
            texts,
            pairs,
            add_special_tokens=add_special_tokens,
            truncation=truncation_of(truncation, limit, self.truncation_side),
            offsets=return_offsets_mapping,
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
        per_row = {"length": lengths} if return_length else {}
        how = Padding(padding, limit, pad_to_multiple_of, padding_side or self.padding_side, return_tensors)
        return how.batch(columns, self._padding_id, is_single=is_single, per_row=per_row)

    def pad(
        self,
        encoded_inputs: Mapping[str, object] | Sequence[Mapping[str, object]],
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
        side = padding_side or self.padding_side
        how = Padding(padding, self._limit(max_length), pad_to_multiple_of, side, return_tensors)
        return how.batch(columns, self._padding_id, is_single=is_single, per_row={})

    def encode_rendered(self, rendered: Rendered, add_special_tokens: bool = False) -> tuple[list[int], list[Span]]:
        """Returns the ids of a rendered conversation, and the (first, last + 1) characters of each token.

        Args:
            rendered: the conversation.
            add_special_tokens: see `encode`.
        """
        (encoding,) = self.backend.encode([rendered.text], add_special_tokens=add_special_tokens, offsets=True)
        if rendered.literal is None:
            return encoding.ids, encoding.offsets
        return self.special_text.spell(
            rendered.text, encoding.ids, encoding.offsets, rendered.literal, encoding.special_tokens_mask
        )

    def _limit(self, max_length: int | None) -> int | None:
        """Returns the length to truncate and pad to: the default is that of the model, if it is known."""
        own = None if self.model_max_length >= _NO_MAX_LENGTH else self.model_max_length
        return own if max_length is None else max_length

    def _padding_id(self) -> int:
        for token_id in (self.pad_token_id, self.eos_token_id):
            if token_id is not None:
                return token_id
        what = "texts of different lengths need padding, but there is neither a pad_token nor an eos_token"
        raise TokenizerError(what, where=self.backend.where, remedy="Encode the texts one by one.")

    # Chat templates

    def set_chat_template(self, source: str, where: str) -> None:
        """Replaces all chat templates by one, which `save_pretrained` writes.

        Args:
            source: the jinja source.
            where: its file, for error messages.
        """
        self.chat_templates = {"default": ChatTemplate(source, where)}
        self.files = self.files.with_chat_template(source)

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
        truncation: TruncationStrategy = False,
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
        options = RenderOptions(
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=special_tokens,
            finds_spans=return_assistant_tokens_mask,
            variables=variables,
        )
        rendered = [self._rendered(one, options) for one in conversations]
        if not tokenize:
            texts = [one.text for one in rendered]
            return texts if is_batch else texts[0]
        if return_assistant_tokens_mask and rendered[0].spans is None:
            warnings.warn("the chat template has no {% generation %} block: assistant_masks are 0", stacklevel=2)
        further: dict[str, Any] = {} if padding_side is None else {"padding_side": padding_side}
        further |= tokenizer_kwargs or {}
        refuse_unknown(further, _FURTHER_OPTIONS, "tokenizer_kwargs")
        limit = self._limit(max_length)
        inputs = self._encode_chats(rendered, truncation_of(truncation, limit, self.truncation_side))
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

    def _encode_chats(self, rendered: list[Rendered], truncation: Truncation | None) -> Columns:
        columns: Columns = {"input_ids": [], "offset_mapping": [], "assistant_masks": []}
        for one in rendered:
            ids, offsets = self.encode_rendered(one)
            kept = slice(None) if truncation is None else truncation.slice(len(ids))
            columns["input_ids"].append(ids[kept])
            columns["offset_mapping"].append(offsets[kept])
            columns["assistant_masks"].append(token_mask(offsets[kept], one.spans or []))
        return columns

    def render_chat(self, conversation: Sequence[Mapping[str, object]], **options: Any) -> Rendered:
        """Renders a conversation, and finds the special tokens in it that are text.

        Args:
            conversation: see `apply_chat_template`.
            options: those of `RenderOptions`.

        Returns:
            The text with the characters of blocks and of special tokens that are text; `encode_rendered` encodes it.

        Raises:
            TokenizerError: as `apply_chat_template`, or the template changes the text of a block.
        """
        return self._rendered(conversation, RenderOptions(**options))

    def _rendered(self, conversation: Sequence[Mapping[str, object]], options: RenderOptions) -> Rendered:
        template = options.choose(self.chat_templates, self.backend.where)
        check_variables(options.variables, template, self.special_tokens, CHAT_OPTIONS)
        return render(conversation, options, template, self)

    # Decoding

    def decode(self, ids: Sequence[int] | torch.Tensor, skip_special_tokens: bool = False) -> str:
        """Decodes token ids as text.

        Args:
            ids: a list or a 1-D integer tensor. Ids without a token are skipped.
            skip_special_tokens: whether to skip `all_special_ids`.

        Raises:
            TokenizerError: `ids` is not a sequence of non-negative integers, or the text is too long.
        """
        return self.backend.decode(ids, skip_special_tokens)

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
        bytes_of, special = token_bytes(self.backend.library.decoder), frozenset(self.all_special_ids)

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
        decoder = self.backend.library.decoder
        return IncrementalDecoder(self.id_to_token, decoder, skipped_ids, continues_text=continues_text)


CHAT_OPTIONS = inspect.signature(Tokenizer.apply_chat_template).parameters.keys() - {"self", "variables"}
"""Names of the options of `apply_chat_template`, which variables of templates cannot have."""


def _attribute(name: str, value: object) -> object:
    """Returns the value of an attribute that a user gives. Raises ConfigError if it is invalid."""
    values = AT_LEAST_1 if name == "model_max_length" else one_of(get_args(PaddingSide))
    if not values.accepts(value):
        where, got = f"Tokenizer.from_pretrained, argument {name}", repr(value)[:200]
        raise ConfigError("invalid value", where=where, got=got, expected=values.expected)
    return value


def refuse_unknown(options: Mapping[str, object], accepted: Sequence[str], what: str) -> None:
    """Raises TokenizerError for the first option that is not accepted."""
    for name, nearest in unknown_names(options, accepted):
        expected = None if nearest else ", ".join(accepted)
        raise TokenizerError(f"not an option of {what}", where=name, expected=expected, remedy=nearest)


def _as_lists(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else list(value) if isinstance(value, Sequence) else value
