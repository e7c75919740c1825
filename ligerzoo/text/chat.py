"""Rendering of a conversation by a chat template: which template, which variables, and special tokens as text."""

import reprlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ligerzoo.errors import TokenizerError, unknown_names
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.messages import REASONING_FIELDS, Messages, checked_objects, normalized_messages
from ligerzoo.text.rendered import Rendered
from ligerzoo.text.special_text import SpecialTokens
from ligerzoo.text.vocabulary import Vocabulary

_NO_TEMPLATE = (
    "Base models have none: use the instruction-tuned variant of the model, or pass the source of a template as "
    "chat_template."
)
_SET_BY_OPTIONS = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables of templates that options set."""


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
            raise TokenizerError("the tokenizer has no chat template", where=where, remedy=_NO_TEMPLATE)
        expected = f"one of {sorted(templates)}" if templates else None
        what, remedy = f"there is no chat template named {name!r}", "Pass the source of a template as chat_template."
        raise TokenizerError(what, where=where, expected=expected, remedy=remedy)


def render(conversation: object, options: RenderOptions, template: ChatTemplate, vocabulary: Vocabulary) -> Rendered:
    """Renders a conversation, and finds the special tokens in it that are text.

    Args:
        conversation: a list of messages.
        options: the options.
        template: the chat template.
        vocabulary: has the special tokens, which are variables of the template too.

    Raises:
        TokenizerError: as `Tokenizer.apply_chat_template`, or the template changes the text of a block.
    """
    values: dict[str, Any] = {
        "messages": normalized_messages(conversation),
        "tools": None if options.tools is None else checked_objects(options.tools, "tools"),
        "documents": None if options.documents is None else checked_objects(options.documents, "documents"),
    }
    variables = dict(options.variables or {})
    is_text = options.special_tokens == "text"
    if is_text:
        values, variables = vocabulary.special_text.mark(values), vocabulary.special_text.mark(variables)
    open_message = None
    if options.continue_final_message:
        open_message = OpenMessage(values["messages"], options.continue_final_message, template.source)
        values["messages"] = open_message.messages
    values["add_generation_prompt"] = options.add_generation_prompt
    variables = {**vocabulary.special_tokens, **variables, **values}
    spans = None
    if options.finds_spans and template.has_generation_blocks:
        text, spans = template.render_spans(variables)
    else:
        text = template.render(variables)
    text = text if open_message is None else open_message.cut(text)
    return vocabulary.special_text.unmark(text, spans) if is_text else Rendered(text, spans, None)


def check_variables(
    variables: Mapping[str, object] | None, template: ChatTemplate, named: Collection[str], options: Collection[str]
) -> None:
    """Raises TokenizerError if the template does not read a variable: it would have no effect.

    Args:
        variables: the user's variables.
        template: the chat template.
        named: names of special tokens.
        options: names of the options that are not variables.
    """
    if not variables:
        return
    accepted = template.variables - _SET_BY_OPTIONS
    own = sorted(accepted.difference(options, named))
    for name, nearest in unknown_names(sorted(variables.keys() - accepted), own, options):
        what = "neither an option nor a variable that the chat template reads"
        expected = f"an option, or one of the template's variables {', '.join(own) or '(it has none)'}"
        raise TokenizerError(what, where=name, expected=expected, remedy=nearest)


class OpenMessage:
    """The last message of a conversation, which the model continues: a tag at its end shows where the prompt ends.

    Args:
        messages: normalized messages.
        field: the field of the last message that is continued, or True for "content".
        source: source of the chat template.

    Attributes:
        messages: the messages, with the tag.

    Raises:
        TokenizerError: the message has no such text, or the template does not read the field.
    """

    def __init__(self, messages: Messages, field: str | bool, source: str) -> None:
        name = field if isinstance(field, str) else "content"
        self._where = f"continue_final_message={field!r}"
        self._tag = f"CONTINUE{secrets.token_hex(8)} "  # unpredictable: no message can contain it
        last = messages[-1]
        names = [name]
        if name in REASONING_FIELDS:
            names = [other for other in REASONING_FIELDS if other in last and last[other] == last.get(name)]
        if last.get(name) is None:
            what = f"the last message has no {name!r} to continue"
            raise TokenizerError(what, where=self._where, got=f"fields {list(last)}")
        if not any(other in source for other in names):
            raise TokenizerError(f"the chat template does not read {name!r}", where=self._where)
        self._text, tagged = self._tagged(last[name])
        self.messages = [*messages[:-1], {**last, **dict.fromkeys(names, tagged)}]

    def _tagged(self, content: Any) -> tuple[str, Any]:
        """Returns the text to continue, and the content with the tag after it."""
        if isinstance(content, str):
            return content, content + self._tag
        for index in reversed(range(len(content)) if isinstance(content, list | tuple) else ()):
            match content[index]:
                case {"text": str(text)}:
                    part = {**content[index], "text": text + self._tag}
                    return text, [*content[:index], part, *content[index + 1 :]]
        raise TokenizerError("the last message has no text to continue", where=self._where, got=reprlib.repr(content))

    def cut(self, rendered: str) -> str:
        """Returns a rendered conversation up to the end of the message.

        Raises:
            TokenizerError: the template does not render the whole message.
        """
        end = rendered.rfind(self._tag.strip())
        if end < 0 or self._text.strip() not in rendered:
            raise TokenizerError("the chat template changes the last message", where=self._where)
        keeps_spaces = rendered.startswith(self._tag, end)
        return rendered[:end] if keeps_spaces else rendered[:end].rstrip()
