"""Texts and conversations as token ids that the model accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch

from ligerzoo.checks import instances, is_text, one_of
from ligerzoo.entries import is_array
from ligerzoo.errors import LigerzooError
from ligerzoo.serve.fields import FLAG, IDS, OBJECT, STRING, Fields, Json, checked, read, show
from ligerzoo.text.chat import CHAT_OPTIONS
from ligerzoo.text.messages import check_message_names, trying_text_arguments, with_parsed_arguments
from ligerzoo.text.rendered import Rendered
from ligerzoo.text.special_text import SpecialTokens
from ligerzoo.text.tokenizer import Tokenizer

_SPECIAL_TOKENS = one_of(("text", "control"))._replace(expected='"text" or "control"')
_MESSAGES = instances("a list of messages", lambda value: is_array(value) and value != [])
_CONTENT = instances("a string, or a list of parts", lambda value: is_text(value) or is_array(value))
_PART = instances(
    '{"type": "text", "text": "..."}',
    lambda part: OBJECT.accepts(part) and part.get("type") == "text" and STRING.accepts(part.get("text")),
)
MAX_TOOLS = 128
TOOLS = instances(
    f"a list of up to {MAX_TOOLS} objects",
    lambda value: is_array(value) and len(value) <= MAX_TOOLS and all(map(OBJECT.accepts, value)),
)
_NO_IMAGES = "Images are not supported: use `ligerzoo generate --image`."

_FLAGS = ("add_generation_prompt", "continue_final_message")
CHAT_FIELDS = ("messages", "tools", "chat_template_kwargs", "special_tokens", *_FLAGS)


def is_prompt(value: object) -> bool:
    """Returns whether a value is one prompt: a text, or a list of token ids."""
    return STRING.accepts(value) or (IDS.accepts(value) and value != [])


PROMPTS = instances(
    "a text, a list of texts, a list of token ids, or a list of such lists",
    lambda value: is_prompt(value) or (is_array(value) and value != [] and all(map(is_prompt, value))),
)


@dataclass(frozen=True)
class ChatPrompt:
    """Messages and the options of the chat template.

    Attributes:
        messages: what the client sent, unchecked.
        tools: the functions that the model may call, as the client sent them; None for none.
        variables: further variables of the chat template.
        add_generation_prompt: whether the prompt ends with the beginning of an answer.
        continue_final_message: whether the model continues the last message instead.
        special_tokens: what a special token means that is written in a message or a variable, see
            `Tokenizer.apply_chat_template`.
    """

    messages: object
    tools: Sequence[Fields] | None = None
    variables: Fields = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    special_tokens: SpecialTokens = "text"

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """Reads the fields `CHAT_FIELDS`, and whether `tool_choice` is "none".

        Both flags may also be in `chat_template_kwargs`.

        Raises:
            LigerzooError: a field is invalid. The messages are not looked at.
        """
        variables: Fields = read(fields, "chat_template_kwargs", OBJECT, {})
        special_tokens: SpecialTokens = read(fields, "special_tokens", _SPECIAL_TOKENS, "text")
        continues = _given_once(fields, variables, "continue_final_message", default=False)
        begins = _given_once(fields, variables, "add_generation_prompt", default=not continues)
        variables = {name: value for name, value in variables.items() if name not in _FLAGS}
        tools: Sequence[Fields] | None = read(fields, "tools", TOOLS, None)
        if fields.get("tool_choice") == "none" or not tools:
            tools = None
        return cls(fields.get("messages"), tools, variables, begins, continues, special_tokens)


def _given_once(fields: Fields, variables: Fields, name: str, *, default: bool) -> bool:
    """Returns an option that is a field of the request or in `chat_template_kwargs`."""
    given: bool | None = read(fields, name, FLAG, None)
    variable: bool | None = read(variables, name, FLAG, given, f"chat_template_kwargs.{name}")
    if given is not None and variable != given:
        raise LigerzooError("given twice with different values", where=name, expected="one of them")
    return default if variable is None else variable


class ContextLengthError(LigerzooError):
    """The tokens of a prompt and of its continuation exceed the context."""


class PromptEncoder:
    """Encodes and checks prompts.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of rows of the model's embedding.
        max_context: largest number of tokens of a prompt and its continuation.
        default_new_tokens: largest number of new tokens, unless a request has one; None for the rest of the context.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, max_context: int, default_new_tokens: int | None = None
    ) -> None:
        self.tokenizer, self.vocab_size, self.max_context = tokenizer, vocab_size, max_context
        self._default_new_tokens = default_new_tokens
        self._check_length("")  # the first call takes longer

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text to continue. Special tokens that are written in it are control tokens."""
        self._check_length(text)
        return self.check(self.tokenizer.encode(text))

    def texts(self, prompt: str | Sequence[int], ids: Sequence[int]) -> list[str]:
        """Returns the text that each token of a prompt completes; together they are the prompt.

        Args:
            prompt: the text, or the token ids.
            ids: its token ids.
        """
        if isinstance(prompt, str):
            return _parts(prompt, self.tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"])
        decoder = self.tokenizer.stream()
        texts = [decoder.push(token_id) for token_id in ids]
        return [*texts[:-1], texts[-1] + decoder.flush()]

    def encode_chat(self, messages: object, variables: Fields | None = None, **options: Any) -> list[int]:
        """Returns the ids of a conversation: `encode_prompt` of a `ChatPrompt` with these fields."""
        return self.encode_prompt(ChatPrompt(messages, variables=variables or {}, **options))

    def encode_prompt(self, chat: ChatPrompt) -> list[int]:
        """Returns the ids of a conversation; see `render`.

        Raises:
            LigerzooError: also if an id is outside the model's vocabulary.
            ContextLengthError: the conversation is certainly longer than the context.
        """
        rendered = self.render(chat)
        self._check_length(rendered.text)
        return self.check(self.tokenizer.encode_rendered(rendered)[0])

    def render(self, chat: ChatPrompt) -> Rendered:
        """Returns the text of a conversation.

        Its messages are objects with "role" and "content". The content is a string or a list of parts of type "text",
        which newlines join; messages of the assistant with calls may have none. The role "developer" is "system" for
        the template. Arguments of tool calls may be JSON text. Other fields are passed to the template, see
        `check_message_names`.

        Raises:
            LigerzooError: a message is malformed, the chat template refuses the conversation or does not read a
                variable.
        """
        messages, variables = checked(chat.messages, "messages", _MESSAGES), chat.variables
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        if taken := {*CHAT_OPTIONS, "variables", "self"} & variables.keys():
            raise LigerzooError("not a variable of the template", where="chat_template_kwargs", got=show(min(taken)))
        options = {name: value for name, value in vars(chat).items() if name != "messages"}
        return trying_text_arguments(partial(self.tokenizer.render_chat, **options), messages)

    def _check_length(self, text: str) -> None:
        """Refuses a text that cannot fit, before the time to encode it is spent."""
        if (least := self.tokenizer.min_tokens(text)) > self.max_context:
            raise _too_long(f"at least {least} tokens of the prompt", self.max_context)

    def check(self, ids: Sequence[int]) -> list[int]:
        """Returns the ids if the model accepts them.

        Raises:
            LigerzooError: there is no id, or an id is outside the model's vocabulary.
        """
        if not ids:
            raise LigerzooError("empty prompt", where="prompt", got="no tokens", expected="at least one token")
        self.tokenizer.check_ids(torch.tensor(ids), self.vocab_size)
        return list(ids)

    def room(self, prompt: Sequence[int], max_new_tokens: int | None) -> int:
        """Returns the number of new tokens that a prompt may have.

        Args:
            prompt: the token ids.
            max_new_tokens: the number that was asked for. None asks for `default_new_tokens`, or the rest of the
                context if it is shorter.

        Raises:
            ContextLengthError: prompt and continuation are longer than the context.
        """
        room = self.max_context - len(prompt)
        requested = max_new_tokens
        if requested is None:
            requested = max(1, min(room, self._default_new_tokens or room))
        if requested > room:
            raise _too_long(f"{len(prompt)} tokens of the prompt and {requested} new tokens", self.max_context)
        return requested


def _parts(text: str, offsets: Sequence[tuple[int, int]]) -> list[str]:
    """Splits a text into those of its tokens, whose (first, last + 1) characters are `offsets`.

    A character of several tokens belongs to the last of them. Spaces that no token has, since tokenizers may leave them
    out of the offsets, belong to the next one. Added special tokens have no characters.
    """
    ends = [0]
    for (_, last), (first_of_next, last_of_next) in pairwise([*offsets, (0, 0)]):
        ends.append(max(ends[-1], min(last, first_of_next) if first_of_next < last_of_next else last))
    return [text[start:end] for start, end in pairwise([*ends[:-1], len(text)])]


def _message(message: object, where: str) -> Json:
    fields: Fields = checked(message, where, OBJECT)
    check_message_names({name: value for name, value in fields.items() if value is not None}, where)
    role, content = fields["role"], fields.get("content")
    if content is not None or role != "assistant" or not (fields.get("tool_calls") or fields.get("function_call")):
        content = checked(content, f"{where}.content", _CONTENT)
    if is_array(content):
        parts = (checked(part, f"{where}.content[{i}]", _PART, _NO_IMAGES) for i, part in enumerate(content))
        content = "\n".join(part["text"] for part in parts)
    parsed = with_parsed_arguments(fields, where)
    return {**parsed, "role": "system" if role == "developer" else role, "content": content}


def _too_long(got: str, max_context: int) -> ContextLengthError:
    expected, remedy = f"at most {max_context} in total", "Shorten the prompt, or ask for fewer new tokens."
    return ContextLengthError("the context is too long", where="prompt", got=got, expected=expected, remedy=remedy)
