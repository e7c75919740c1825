"""The fields of a request that make a prompt of messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ligerzoo.errors import LigerzooError
from ligerzoo.serve.fields import check_field, optional_flag, or_default
from ligerzoo.text.special_text import SpecialTokens

FIELDS = ("messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "special_tokens")


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
        """Reads the fields `FIELDS`. Both flags may also be in `chat_template_kwargs`.

        Raises:
            LigerzooError: a field is invalid. The messages are not looked at.
        """
        variables = or_default(fields.get("chat_template_kwargs"), {})
        check_field(isinstance(variables, dict), "chat_template_kwargs", variables, "an object")
        special_tokens = or_default(fields.get("special_tokens"), "text")
        check_field(special_tokens in ("text", "control"), "special_tokens", special_tokens, '"text" or "control"')
        continues = bool(_given_once(fields, variables, "continue_final_message"))
        begins = or_default(_given_once(fields, variables, "add_generation_prompt"), not continues)
        variables = {name: value for name, value in variables.items() if name not in FIELDS}
        return cls(fields.get("messages"), variables, begins, continues, special_tokens)


def _given_once(fields: Mapping[str, Any], variables: Mapping[str, Any], name: str) -> bool | None:
    """Returns an option that is a field of the request or in `chat_template_kwargs`."""
    given, variable = optional_flag(fields, name), variables.get(name)
    check_field(isinstance(variable, bool | None), f"chat_template_kwargs.{name}", variable, "true or false")
    if given is not None and variable is not None and given != variable:
        raise LigerzooError("given twice with different values", where=name, expected="one of them")
    return variable if given is None else given
