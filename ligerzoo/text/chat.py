"""Conversations -> texts -> model inputs: which chat template, which variables, and special tokens as text."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ligerzoo.checks import TEXT, check, is_list
from ligerzoo.errors import TemplateError, TokenizerError, unknown_names
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.encoder import Encoder, refuse_unknown
from ligerzoo.text.messages import OpenMessage, checked_objects, normalized_messages
from ligerzoo.text.padding import BatchEncoding, Columns
from ligerzoo.text.rendered import Rendered
from ligerzoo.text.special_text import SpecialTokens, token_mask
from ligerzoo.text.tokenizer_files import PaddingSide, TokenizerFiles
from ligerzoo.text.truncation import Truncation, TruncationStrategy, truncation_of

NO_TEMPLATE = (
    "Base models have none: use the instruction-tuned variant of the model, or set tokenizer.chat_template, on the "
    "command line with --chat-template FILE."
)
"""What to do about a tokenizer without a chat template."""
_SET_BY_OPTIONS = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables of templates that options set."""
_FURTHER_OPTIONS = ("pad_to_multiple_of", "padding_side", "return_attention_mask", "return_offsets_mapping")
"""What `tokenizer_kwargs` of `apply_chat_template` may have."""


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    """How a conversation is rendered.

    Args:
        finds_spans: whether to find the `{% generation %}` blocks of the template.
        variables: further variables of the template.

    The others are those of `Tokenizer.apply_chat_template`.

    Raises:
        TokenizerError: an option has an unsupported value, or does not go with another one.
    """

    tools: Sequence[Mapping[str, object]] | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool | str = False
    special_tokens: SpecialTokens = "control"
    finds_spans: bool = False
    variables: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            what, remedy = "given together with add_generation_prompt", "Continue the last message, or begin a new one."
            raise TokenizerError(what, where="continue_final_message", remedy=remedy)
        if self.special_tokens not in get_args(SpecialTokens):
            got, expected = repr(self.special_tokens), '"text" or "control"'
            raise TokenizerError("unsupported value", where="special_tokens", got=got, expected=expected)

    def choose(self, templates: Mapping[str, ChatTemplate], where: str) -> ChatTemplate:
        """Returns the template to render with.

        Args:
            templates: the tokenizer's templates by name.
            where: the tokenizer's name for errors.

        Raises:
            TokenizerError: there is no such template.
        """
        name = self.chat_template
        if name is None:
            name = "tool_use" if self.tools is not None and "tool_use" in templates else "default"
        if name in templates:
            return templates[name]
        if "{" in name:
            return ChatTemplate(name, "the chat_template argument")
        if not templates and self.chat_template is None:
            raise TemplateError("the tokenizer has no chat template", where=where, remedy=NO_TEMPLATE)
        expected = f"one of {sorted(templates)}" if templates else None
        what, remedy = f"there is no chat template named {name!r}", "Pass the source of a template as chat_template."
        raise TokenizerError(what, where=where, expected=expected, remedy=remedy)


class ChatRenderer(Encoder):
    """Renders conversations by chat templates, and encodes them.

    Args:
        files: see `Tokenizer`.

    Attributes:
        chat_templates: see `Tokenizer`.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        super().__init__(files)
        self.chat_templates = files.chat_templates()

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template, None without one. Assigning one does `set_chat_template`."""
        default = self.chat_templates.get("default")
        return None if default is None else default.source

    @chat_template.setter
    def chat_template(self, source: str) -> None:
        check(None, TEXT, chat_template=source)
        self.set_chat_template(source, "chat_template")

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
        is_batch = is_list(conversation) and bool(conversation) and is_list(conversation[0])
        conversations: Sequence[Any] = conversation if is_batch else [conversation]
        if any(is_list(one) and not one for one in conversations):
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

    def _rendered(self, conversation: object, options: RenderOptions) -> Rendered:
        template = options.choose(self.chat_templates, self.backend.where)
        self._check_variables(options.variables or {}, template)
        values: dict[str, Any] = {
            "messages": normalized_messages(conversation),
            "tools": None if options.tools is None else checked_objects(options.tools, "tools"),
            "documents": None if options.documents is None else checked_objects(options.documents, "documents"),
        }
        variables = dict(options.variables or {})
        is_text = options.special_tokens == "text"
        if is_text:
            values, variables = self.special_text.mark(values), self.special_text.mark(variables)
        open_message = None
        if options.continue_final_message:
            open_message = OpenMessage(values["messages"], options.continue_final_message, template.source)
            values["messages"] = open_message.messages
        values["add_generation_prompt"] = options.add_generation_prompt
        variables = {**self.special_tokens, **variables, **values}
        spans = None
        if options.finds_spans and template.has_generation_blocks:
            text, spans = template.render_spans(variables)
        else:
            text = template.render(variables)
        text = text if open_message is None else open_message.cut(text)
        return self.special_text.unmark(text, spans) if is_text else Rendered(text, spans, None)

    def _check_variables(self, variables: Mapping[str, object], template: ChatTemplate) -> None:
        """Raises TokenizerError if the template does not read a variable: it would have no effect."""
        if not variables:
            return
        accepted = template.variables - _SET_BY_OPTIONS
        own = sorted(accepted.difference(CHAT_OPTIONS, self.special_tokens))
        for name, nearest in unknown_names(sorted(variables.keys() - accepted), own, CHAT_OPTIONS):
            what = "neither an option nor a variable that the chat template reads"
            expected = f"an option, or one of the template's variables {', '.join(own) or '(it has none)'}"
            raise TokenizerError(what, where=name, expected=expected, remedy=nearest)


CHAT_OPTIONS = inspect.signature(ChatRenderer.apply_chat_template).parameters.keys() - {"self", "variables"}
"""Names of the options of `apply_chat_template`, which variables of templates cannot have."""
