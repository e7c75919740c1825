"""Texts and conversations as token ids that the model accepts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ligerzoo.errors import LigerzooError, quote
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

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text to continue."""
        return self.check(self.tokenizer.encode(text))

    def encode_chat(self, messages: object, variables: Mapping[str, Any] | None = None) -> list[int]:
        """Returns the ids of a conversation, followed by the beginning of the model's answer.

        Args:
            messages: objects with "role" and "content". The content is a string or a list of parts of type "text",
                which newlines join; messages of the assistant may have none. The role "developer" is "system" for the
                template. Other fields are passed to it.
            variables: further variables of the chat template.

        Raises:
            LigerzooError: a message is malformed, or the chat template refuses the conversation.
        """
        if not isinstance(messages, list) or not messages:
            raise _invalid("messages", messages, "a list of messages")
        conversation = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        taken = inspect.signature(Tokenizer.apply_chat_template).parameters.keys() & set(variables or ())
        if taken:
            raise LigerzooError("not a variable of the template", where="chat_template_kwargs", got=quote(min(taken)))
        rendered = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, **(variables or {}))
        return self.check(rendered)

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
            raise ContextLengthError(
                "the context is too long", where="prompt",
                got=f"{len(prompt)} tokens of the prompt and {requested} new tokens",
                expected=f"at most {self.max_context} in total",
                remedy="Shorten the prompt, or ask for fewer new tokens.",
            )  # fmt: skip
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
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _text(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    expected = '{"type": "text", "text": "..."}'
    raise _invalid(where, part, expected, "Images are not supported: use `ligerzoo generate --image`.")


def _invalid(where: str, got: object, expected: str, remedy: str | None = None) -> LigerzooError:
    return LigerzooError("invalid value", where=where, got=quote(repr(got)), expected=expected, remedy=remedy)
