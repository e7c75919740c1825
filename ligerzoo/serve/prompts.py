"""Texts and conversations as token ids that the model accepts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch

from ligerzoo.errors import LigerzooError, quote
from ligerzoo.serve.fields import check_field, optional_flag, or_default
from ligerzoo.text.messages import trying_text_arguments, with_parsed_arguments
from ligerzoo.text.rendered import Rendered
from ligerzoo.text.special_text import SpecialTokens
from ligerzoo.text.tokenizer import Tokenizer

CHAT_FIELDS = ("messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "special_tokens")


@dataclass(frozen=True)
class ChatPrompt:
    """Messages and the options of the chat template.

    Attributes:
        messages: what the client sent, unchecked.
        variables: further variables of the chat template.
        add_generation_prompt: whether the prompt ends with the beginning of an answer.
        continue_final_message: whether the model continues the last message instead.
        special_tokens: what a special token means that is written in a message or a variable, see
            `Tokenizer.apply_chat_template`.
    """

    messages: object
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    special_tokens: SpecialTokens = "text"

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the fields `CHAT_FIELDS`. Both flags may also be in `chat_template_kwargs`.

        Raises:
            LigerzooError: a field is invalid. The messages are not looked at.
        """
        variables = or_default(fields.get("chat_template_kwargs"), {})
        check_field(isinstance(variables, dict), "chat_template_kwargs", variables, "an object")
        special_tokens = or_default(fields.get("special_tokens"), "text")
        check_field(special_tokens in ("text", "control"), "special_tokens", special_tokens, '"text" or "control"')
        continues = bool(_given_once(fields, variables, "continue_final_message"))
        begins = or_default(_given_once(fields, variables, "add_generation_prompt"), not continues)
        variables = {name: value for name, value in variables.items() if name not in CHAT_FIELDS}
        return cls(fields.get("messages"), variables, begins, continues, special_tokens)


def _given_once(fields: Mapping[str, Any], variables: Mapping[str, Any], name: str) -> bool | None:
    """Returns an option that is a field of the request or in `chat_template_kwargs`."""
    given, variable = optional_flag(fields, name), variables.get(name)
    check_field(isinstance(variable, bool | None), f"chat_template_kwargs.{name}", variable, "true or false")
    if given is not None and variable is not None and given != variable:
        raise LigerzooError("given twice with different values", where=name, expected="one of them")
    return variable if given is None else given


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

    def encode_chat(self, messages: object, variables: Mapping[str, Any] | None = None, **options: Any) -> list[int]:
        """Returns the ids of a conversation; see `render`.

        Args:
            messages, variables, options: the fields of a `ChatPrompt`.

        Raises:
            LigerzooError: also if an id is outside the model's vocabulary.
            ContextLengthError: the conversation is certainly longer than the context.
        """
        rendered = self.render(ChatPrompt(messages, variables or {}, **options))
        self._check_length(rendered.text)
        return self.check(self.tokenizer.encode_rendered(rendered)[0])

    def render(self, chat: ChatPrompt) -> Rendered:
        """Returns the text of a conversation.

        Its messages are objects with "role" and "content". The content is a string or a list of parts of type "text",
        which newlines join; messages of the assistant may have none. The role "developer" is "system" for the template.
        Arguments of tool calls may be JSON text. Other fields are passed to the template.

        Raises:
            LigerzooError: a message is malformed, the chat template refuses the conversation or does not read a
                variable.
        """
        messages, variables = chat.messages, chat.variables
        if not isinstance(messages, list) or not messages:
            raise _invalid("messages", messages, "a list of messages")
        checked = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        if taken := inspect.signature(Tokenizer.apply_chat_template).parameters.keys() & variables.keys():
            raise LigerzooError("not a variable of the template", where="chat_template_kwargs", got=quote(min(taken)))
        render = partial(
            self.tokenizer.render_chat, add_generation_prompt=chat.add_generation_prompt, variables=variables,
            continue_final_message=chat.continue_final_message, special_tokens=chat.special_tokens,
        )  # fmt: skip
        return trying_text_arguments(render, checked)

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


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _invalid(where, message, "an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise _invalid(f"{where}.role", role, '"system", "user" or "assistant"')
    if isinstance(content, list):
        content = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif not (isinstance(content, str) or (content is None and role == "assistant")):
        raise _invalid(f"{where}.content", content, "a string, or a list of parts")
    message = with_parsed_arguments(message, where)
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _text(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    expected = '{"type": "text", "text": "..."}'
    raise _invalid(where, part, expected, "Images are not supported: use `ligerzoo generate --image`.")


def _too_long(got: str, max_context: int) -> ContextLengthError:
    return ContextLengthError(
        "the context is too long", where="prompt", got=got, expected=f"at most {max_context} in total",
        remedy="Shorten the prompt, or ask for fewer new tokens.",
    )  # fmt: skip


def _invalid(where: str, got: object, expected: str, remedy: str | None = None) -> LigerzooError:
    return LigerzooError("invalid value", where=where, got=quote(repr(got)), expected=expected, remedy=remedy)
