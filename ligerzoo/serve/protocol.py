"""JSON of the endpoints: requests -> calls, continuations -> responses.

/v1/chat/completions and /v1/completions are OpenAI's. A field that would change the result and is not supported is
refused by name, unless it has its neutral value. Fields that are not OpenAI's: `top_k`, `min_p` and further options of
`options.VALUES`; vLLM's `logprob_token_ids` and, for completions, `response_format`; and, for chats, vLLM's
`chat_template_kwargs`, `add_generation_prompt` and `continue_final_message`, and `special_tokens`.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from ligerzoo.checks import instances, integer, is_integer
from ligerzoo.errors import LigerzooError
from ligerzoo.generate import Grammar
from ligerzoo.generate.prompts import MAX_LOGP_TOKENS, MAX_TOP_LOGPS
from ligerzoo.serve.call import Call, Delivery
from ligerzoo.serve.continuation import Piece, TokenText, TokenTexts
from ligerzoo.serve.fields import FLAG, IDS, Fields, Json, Neutral, check_field, check_names, checked, read
from ligerzoo.serve.options import VALUES, ClientOptions
from ligerzoo.serve.prompts import CHAT_FIELDS, PROMPTS, ChatPrompt, PromptEncoder, is_prompt
from ligerzoo.serve.schemas import SCHEMA, read_schema
from ligerzoo.serve.tools import ToolCallParser, Tools, whole_calls

MIN_LOGP = -9999.0
"""What the API returns for less likely tokens."""

_SAMPLING = tuple(name for name in VALUES if name != "max_new_tokens")
_CACHING = ("prompt_cache_key", "prompt_cache_retention")
WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "service_tier", *_CACHING)
"""Fields that change no result."""

_OUTPUT = ("n", "stream", "stream_options", "logprobs", "logprob_token_ids", "max_tokens", "response_format")
_COMMON = ("model", *_OUTPUT, *_SAMPLING, *WITHOUT_EFFECT)

_TOP_LOGPROBS = integer(0, MAX_TOP_LOGPS)
_OPTIONAL_TOP_LOGPROBS = _TOP_LOGPROBS._replace(expected=f"null, or {_TOP_LOGPROBS.expected}")
_LOGPROB_TOKENS = instances(
    f"a list of up to {MAX_LOGP_TOKENS} token ids", lambda value: IDS.accepts(value) and len(value) <= MAX_LOGP_TOKENS
)
_PENALTY = "Use repetition_penalty."
_NEUTRAL: Neutral = {
    "presence_penalty": ((0,), _PENALTY),
    "frequency_penalty": ((0,), _PENALTY),
    "logit_bias": (({},), None),
    "store": ((False,), None),
}
_NEUTRAL_CHAT: Neutral = {
    **_NEUTRAL,
    "functions": (([],), "Use tools."),
    "function_call": (("none", "auto"), "Use tool_choice."),
    "modalities": ((["text"],), None),
    "audio": ((), None),
    "prediction": ((), None),
    "reasoning_effort": ((), "Use chat_template_kwargs if the chat template has such a variable."),
    "verbosity": ((), None),
    "web_search_options": ((), None),
}
_NEUTRAL_COMPLETION: Neutral = {
    **_NEUTRAL,
    "best_of": ((1,), "Use n and logprobs, and choose among the continuations."),
    "suffix": (("",), None),
}
"""Unsupported fields: the values without an effect, and what to do instead."""


class Endpoint(ABC):
    """Reads the requests and writes the responses of one endpoint.

    Args:
        call: the request.
        texts: the texts of single tokens.
    """

    prefix: ClassVar[str]
    response_type: ClassVar[str]
    chunk_type: ClassVar[str]

    def __init__(self, call: Call, texts: TokenTexts) -> None:
        self._call, self._texts = call, texts
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": call.model}

    @classmethod
    @abstractmethod
    def read(cls, fields: Fields, encoder: PromptEncoder, max_requests: int) -> Call:
        """Reads a request.

        Args:
            fields: its JSON object.
            encoder: encodes and checks the prompts.
            max_requests: largest number of continuations.

        Raises:
            LigerzooError: a field is unknown, unsupported or invalid, or the continuations are too many. They are
                counted before any prompt is encoded.
        """

    def response(self, choices: Sequence[Piece], completion_tokens: int) -> Json:
        """Returns the response with the whole continuations."""
        return {
            **self._head,
            "object": self.response_type,
            "choices": [self._choice(i, piece, self._whole(i, piece)) for i, piece in enumerate(choices)],
            "usage": self._call.usage(completion_tokens),
        }

    def opening(self) -> list[Json]:
        """Returns the chunks that precede the text of a stream."""
        return []

    def chunk(self, index: int, piece: Piece) -> Json:
        """Returns the chunk of a stream for a part of a continuation."""
        return self._chunk([self._choice(index, piece, self._part(index, piece))], None)

    def closing(self, completion_tokens: int) -> list[Json]:
        """Returns the chunks that follow the text of a stream."""
        return [self._chunk([], self._call.usage(completion_tokens))] if self._call.delivery.includes_usage else []

    def _chunk(self, choices: list[Json], usage: dict[str, int] | None) -> Json:
        chunk = {**self._head, "object": self.chunk_type, "choices": choices}
        return {**chunk, "usage": usage} if self._call.delivery.includes_usage else chunk

    def _choice(self, index: int, piece: Piece, text: Json) -> Json:
        logprobs = None if self._call.top_logprobs is None else self._logprobs(piece.tokens)
        return {"index": index, **text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    @abstractmethod
    def _whole(self, index: int, piece: Piece) -> Json: ...
    @abstractmethod
    def _part(self, index: int, piece: Piece) -> Json: ...
    @abstractmethod
    def _logprobs(self, tokens: Sequence[TokenText]) -> Json: ...


class Chat(Endpoint):
    """/v1/chat/completions."""

    prefix, response_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"
    tool_fields = ("tool_choice", "parallel_tool_calls")
    fields = ("max_completion_tokens", "top_logprobs", *tool_fields, *CHAT_FIELDS, *_COMMON)

    def __init__(self, call: Call, texts: TokenTexts) -> None:
        super().__init__(call, texts)
        self._parsers = [ToolCallParser(call.tools.form) for _ in range(call.delivery.n)] if call.tools else []

    @classmethod
    def read(cls, fields: Fields, encoder: PromptEncoder, max_requests: int) -> Call:
        check_names(fields, cls.fields, _NEUTRAL_CHAT)
        has_logprobs, top = read(fields, "logprobs", FLAG, False), read(fields, "top_logprobs", _TOP_LOGPROBS, 0)
        check_field(has_logprobs or top == 0, "top_logprobs", top, "0 or null without logprobs")
        limits = [name for name in ("max_tokens", "max_completion_tokens") if fields.get(name) is not None]
        if len(limits) > 1:
            raise LigerzooError("given together with max_completion_tokens", where="max_tokens", expected="one of them")
        chat = ChatPrompt.read(fields)
        delivery, options = Delivery.read(fields), _options(fields, dict.fromkeys(limits, "max_new_tokens"))
        _check_count(delivery.n, max_requests)
        schema, tools = read_schema(fields), Tools.read(fields, encoder.tokenizer)
        if tools is not None:
            options = options.updated(constraint=tools.constraint(schema, encoder.tokenizer))
        elif schema is not None:
            options = options.updated(constraint=Grammar.json_schema(schema, encoder.tokenizer, where=SCHEMA))
        return Call(
            model=str(fields["model"]),
            prompts=[encoder.encode_prompt(chat)],
            options=options,
            delivery=delivery,
            top_logprobs=top if has_logprobs else None,
            logprob_token_ids=_logprob_token_ids(fields, encoder, has_logprobs=has_logprobs),
            continues_text=chat.continue_final_message,
            tools=tools,
        )

    def opening(self) -> list[Json]:
        beginning: Json = {"delta": {"role": "assistant", "content": ""}}
        choices = (self._choice(i, Piece("", [], None), beginning) for i in range(self._call.delivery.n))
        return [self._chunk([choice], None) for choice in choices]

    def _choice(self, index: int, piece: Piece, text: Json) -> Json:
        choice = super()._choice(index, piece, text)
        has_calls = bool(self._parsers) and self._parsers[index].count > 0
        return {**choice, "finish_reason": "tool_calls"} if has_calls and piece.finish_reason == "stop" else choice

    def _whole(self, index: int, piece: Piece) -> Json:
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        if self._parsers:
            content, deltas = self._parsers[index].push(piece.text, is_last=True)
            calls = {"tool_calls": whole_calls(deltas)} if deltas else {}
            message |= {"content": content or (None if deltas else ""), **calls}
        return {"message": message}

    def _part(self, index: int, piece: Piece) -> Json:
        content, deltas = piece.text, list[Json]()
        if self._parsers:
            content, deltas = self._parsers[index].push(piece.text, is_last=piece.finish_reason is not None)
        return {"delta": {**({"content": content} if content else {}), **({"tool_calls": deltas} if deltas else {})}}

    def _logprobs(self, tokens: Sequence[TokenText]) -> Json:
        content = [
            {
                **_entry(token.text, token.text.encode(), token.logp),
                "top_logprobs": [_entry(*self._texts[top], logp) for top, logp in token.top_logps.items()],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _entry(text: str, content: bytes, logp: float | None) -> Json:
    return {"token": text, "bytes": list(content), "logprob": _bounded(logp)}


def _bounded(logp: float | None) -> float | None:
    return None if logp is None else max(logp, MIN_LOGP)


class TextCompletion(Endpoint):
    """/v1/completions."""

    prefix, response_type, chunk_type = "cmpl", "text_completion", "text_completion"
    fields = ("prompt", "echo", *_COMMON)
    default_max_tokens = 16  # the API's

    @classmethod
    def read(cls, fields: Fields, encoder: PromptEncoder, max_requests: int) -> Call:
        check_names(fields, cls.fields, _NEUTRAL_COMPLETION)
        top: int | None = read(fields, "logprobs", _OPTIONAL_TOP_LOGPROBS, None)
        echoes, limit = read(fields, "echo", FLAG, False), fields.get("max_tokens")
        limit = cls.default_max_tokens if limit is None else limit
        is_echo_alone = echoes and is_integer(limit) and limit == 0
        limited = {**fields, "max_tokens": None if is_echo_alone else limit}
        delivery, options = Delivery.read(fields), _options(limited, {"max_tokens": "max_new_tokens"})
        given = checked(fields.get("prompt"), "prompt", PROMPTS)
        prompts: list[str | list[int]] = [given] if is_prompt(given) else given
        _check_count(len(prompts) * delivery.n, max_requests)
        if (schema := read_schema(fields)) is not None:
            options = options.updated(constraint=Grammar.json_schema(schema, encoder.tokenizer, where=SCHEMA))
        encoded = [encoder.encode(prompt) if isinstance(prompt, str) else encoder.check(prompt) for prompt in prompts]
        echoed = [encoder.texts(*pair) for pair in zip(prompts, encoded, strict=True)] if echoes else None
        return Call(
            model=str(fields["model"]),
            prompts=encoded,
            options=options.updated(max_new_tokens=0) if is_echo_alone else options,
            delivery=delivery,
            top_logprobs=top,
            logprob_token_ids=_logprob_token_ids(fields, encoder, has_logprobs=top is not None),
            echoed=echoed,
            continues_text=True,
        )

    def _whole(self, index: int, piece: Piece) -> Json:
        return {"text": piece.text}

    _part = _whole

    def _logprobs(self, tokens: Sequence[TokenText]) -> Json:
        has_top = self._call.top_logprobs or self._call.logprob_token_ids
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_bounded(token.logp) for token in tokens],
            "top_logprobs": [self._likely(token) for token in tokens] if has_top else None,
            "text_offset": [token.offset for token in tokens],
        }

    def _likely(self, token: TokenText) -> dict[str, float | None] | None:
        """Returns the log-probabilities of the most likely tokens and of the chosen one by their texts."""
        if token.id is None:
            return None
        likely: dict[str, float | None] = {}
        for token_id, logp in (*token.top_logps.items(), (token.id, token.logp)):
            likely.setdefault(self._texts[token_id][0], _bounded(logp))
        return likely


def _options(fields: Fields, limits: Mapping[str, str]) -> ClientOptions:
    """Reads the options of sampling; `limits` are the names of further fields, and what these are called here."""
    names = {**{name: name for name in _SAMPLING}, **limits}
    return ClientOptions.from_json(fields, names).updated(do_sample=True)  # the API samples by default


def _logprob_token_ids(fields: Fields, encoder: PromptEncoder, *, has_logprobs: bool) -> list[int]:
    """Reads the tokens whose log-probabilities replace those of the most likely; the name is vLLM's."""
    ids = read(fields, "logprob_token_ids", _LOGPROB_TOKENS, list[int]())
    check_field(has_logprobs or not ids, "logprob_token_ids", ids, "no such field without logprobs")
    unknown = next((token_id for token_id in ids if token_id >= encoder.vocab_size), None)
    check_field(unknown is None, "logprob_token_ids", unknown, f"token ids below {encoder.vocab_size}")
    return ids


def _check_count(count: int, max_requests: int) -> None:
    if count > max_requests:
        where, expected = "n times the number of prompts", f"at most {max_requests}"
        remedy = "Send several requests."
        raise LigerzooError("too many continuations", where=where, got=count, expected=expected, remedy=remedy)
