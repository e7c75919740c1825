"""JSON of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

from ligerzoo.errors import LigerzooError
from ligerzoo.serve.fields import FLAG, IDS, STRING, Fields, Json, Neutral, check_field, check_names, checked, read
from ligerzoo.serve.prompts import CHAT_FIELDS, ChatPrompt, PromptEncoder

_TOKENIZE_FIELDS = ("model", "add_special_tokens", "return_token_strs")


_NEUTRAL_TOKENIZE: Neutral = {
    "chat_template": ((), "The option --chat-template of the server replaces the chat template."),
    "mm_processor_kwargs": (({},), None),
}


def tokenize_request(fields: Fields, encoder: PromptEncoder) -> Json:
    """Returns the token ids of a text or of a conversation. They may be more than the context.

    Args:
        fields: the request: `prompt` or `messages`; `add_special_tokens`, by default only with `prompt`, since chat
            templates add them; `return_token_strs`, and those of `CHAT_FIELDS`.
        encoder: encodes the prompt.

    Raises:
        LigerzooError: a field is unknown or invalid, or the prompt is missing or one of several.
    """
    is_chat = "messages" in fields
    if is_chat == ("prompt" in fields):
        got = "both" if is_chat else "none"
        raise LigerzooError("invalid request", where="prompt", got=got, expected="either prompt or messages")
    if is_chat:
        check_names(fields, (*CHAT_FIELDS, *_TOKENIZE_FIELDS), _NEUTRAL_TOKENIZE)
    else:
        check_names(fields, ("prompt", *_TOKENIZE_FIELDS), {})
    adds_special_tokens = read(fields, "add_special_tokens", FLAG, not is_chat)
    has_texts = read(fields, "return_token_strs", FLAG, False)
    tokenizer = encoder.tokenizer
    if is_chat:
        rendered = encoder.render(ChatPrompt.read(fields))
        ids, _ = tokenizer.encode_rendered(rendered, add_special_tokens=adds_special_tokens)
    else:
        ids = tokenizer.encode(checked(fields["prompt"], "prompt", STRING), add_special_tokens=adds_special_tokens)
    return {
        "count": len(ids),
        "max_model_len": encoder.max_context,
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids) if has_texts else None,
    }


def detokenize_request(fields: Fields, encoder: PromptEncoder) -> Json:
    """Returns the text of token ids, with special tokens.

    Args:
        fields: the request: `tokens`.
        encoder: has the tokenizer.

    Raises:
        LigerzooError: a field is unknown or invalid, or a token id does not exist.
    """
    check_names(fields, ("model", "tokens"), {})
    ids: list[int] = checked(fields.get("tokens"), "tokens", IDS)
    size = max(len(encoder.tokenizer), encoder.vocab_size)
    unknown = next((token_id for token_id in ids if token_id >= size), None)
    check_field(unknown is None, "tokens", unknown, f"token ids below {size}")
    return {"prompt": encoder.tokenizer.decode(ids)}
