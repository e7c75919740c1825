"""Texts and conversations as token ids that the model accepts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ligerzoo.errors import LigerzooError, quote
from ligerzoo.text.messages import trying_text_arguments, with_parsed_arguments
from ligerzoo.text.special_text import SpecialTokens
from ligerzoo.text.tokenizer import Tokenizer


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

    def encode_chat(
        self,
        messages: object,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        special_tokens: SpecialTokens = "text",
    ) -> list[int]:
        """Returns the ids of a conversation, followed by the beginning of the model's answer.

        Args:
            messages: objects with "role" and "content". The content is a string or a list of parts of type "text",
                which newlines join; messages of the assistant may have none. The role "developer" is "system" for the
                template. Arguments of tool calls may be JSON text. Other fields are passed to the template.
            variables: further variables of the chat template. They may also have the two options below.
            add_generation_prompt: whether the prompt ends with the beginning of an answer. None means True unless
                `continue_final_message`.
            continue_final_message: whether the model continues the last message instead.
            special_tokens: what a special token means that is written in a message or a variable, see
                `Tokenizer.apply_chat_template`.

        Raises:
            LigerzooError: a message is malformed, the chat template refuses the conversation or does not read a
                variable.
            ContextLengthError: the conversation is certainly longer than the context.
        """
        if not isinstance(messages, list) or not messages:
            raise _invalid("messages", messages, "a list of messages")
        conversation = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        variables = dict(variables or {})
        for name in options:
            options[name] = _given_once(name, options[name], variables.pop(name, None))
        continues = bool(options["continue_final_message"])
        begins = not continues if options["add_generation_prompt"] is None else options["add_generation_prompt"]
        if taken := inspect.signature(Tokenizer.apply_chat_template).parameters.keys() & variables.keys():
            raise LigerzooError("not a variable of the template", where="chat_template_kwargs", got=quote(min(taken)))
        render = partial(
            self.tokenizer.render_chat, add_generation_prompt=begins, continue_final_message=continues,
            special_tokens=special_tokens, variables=variables,
        )  # fmt: skip
        rendered = trying_text_arguments(render, conversation)
        self._check_length(rendered.text)
        return self.check(self.tokenizer.encode_rendered(rendered)[0])

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


def _given_once(name: str, field: bool | None, variable: object) -> bool | None:
    """Returns an option that is a field of the request or in `chat_template_kwargs`."""
    if not isinstance(variable, bool | None):
        raise _invalid(f"chat_template_kwargs.{name}", variable, "true or false")
    if field is not None and variable is not None and field != variable:
        raise LigerzooError("given twice with different values", where=name, expected="one of them")
    return variable if field is None else field


def _too_long(got: str, max_context: int) -> ContextLengthError:
    return ContextLengthError(
        "the context is too long", where="prompt", got=got, expected=f"at most {max_context} in total",
        remedy="Shorten the prompt, or ask for fewer new tokens.",
    )  # fmt: skip


def _invalid(where: str, got: object, expected: str, remedy: str | None = None) -> LigerzooError:
    return LigerzooError("invalid value", where=where, got=quote(repr(got)), expected=expected, remedy=remedy)
