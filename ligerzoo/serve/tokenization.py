"""The requests of `/tokenize` and `/detokenize`, in vLLM's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.errors import LigerzooError
from ligerzoo.serve import chat_prompt
from ligerzoo.serve.chat_prompt import ChatPrompt
from ligerzoo.serve.fields import Neutral, check_field, check_names, flag, is_ids
from ligerzoo.serve.prompts import PromptEncoder

_COMMON = ("model", "add_special_tokens", "return_token_strs")
_NEUTRAL: Neutral = {
    "chat_template": ((), "The option --chat-template of the server replaces the chat template."),
    "tools": (([],), "Describe the functions in a message."),
    "mm_processor_kwargs": (({},), None),
}


def tokenize(fields: Mapping[str, Any], encoder: PromptEncoder) -> dict[str, Any]:
    """Returns the token ids of a text or of a conversation. They may be more than the context.

    Args:
        fields: the request: `prompt` or `messages`; `add_special_tokens`, by default only with `prompt`, since chat
            templates add them; `return_token_strs`, and those of `chat_prompt.FIELDS`.
        encoder: encodes the prompt.

    Raises:
        LigerzooError: a field is unknown or invalid, or there is no prompt or more than one.
    """
    is_chat = "messages" in fields
    if is_chat == ("prompt" in fields):
        got = "both" if is_chat else "none"
        raise LigerzooError("invalid request", where="prompt", got=got, expected="either prompt or messages")
    if is_chat:
        check_names(fields, (*chat_prompt.FIELDS, *_COMMON), _NEUTRAL)
    else:
        check_names(fields, ("prompt", *_COMMON), {})
    adds_special_tokens = flag(fields, "add_special_tokens", default=not is_chat)
    has_texts = flag(fields, "return_token_strs")
    tokenizer = encoder.tokenizer
    if is_chat:
        rendered = encoder.render(ChatPrompt.read(fields))
        ids, _ = tokenizer.encode_rendered(rendered, add_special_tokens=adds_special_tokens)
    else:
        check_field(isinstance(fields["prompt"], str), "prompt", fields["prompt"], "a text")
        ids = tokenizer.encode(fields["prompt"], add_special_tokens=adds_special_tokens)
    return {
        "count": len(ids),
        "max_model_len": encoder.max_context,
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids) if has_texts else None,
    }


def detokenize(fields: Mapping[str, Any], encoder: PromptEncoder) -> dict[str, Any]:
    """Returns the text of token ids, with special tokens.

    Args:
        fields: the request: `tokens`.
        encoder: has the tokenizer.

    Raises:
        LigerzooError: a field is unknown or invalid, or a token id does not exist.
    """
    check_names(fields, ("model", "tokens"), {})
    ids = fields.get("tokens")
    check_field(is_ids(ids), "tokens", ids, "a list of token ids")
    size = max(len(encoder.tokenizer), encoder.vocab_size)
    unknown = next((token_id for token_id in ids or () if token_id >= size), None)
    check_field(unknown is None, "tokens", unknown, f"token ids below {size}")
    return {"prompt": encoder.tokenizer.decode(ids or [])}
