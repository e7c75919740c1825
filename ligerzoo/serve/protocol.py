"""OpenAI's JSON for chat completions and completions: requests -> calls, continuations -> responses.

A field that would change the result and is not supported is refused by name, unless it has its neutral value. Fields
that are not OpenAI's: `_EXTENSIONS` and, for chats, vLLM's `chat_template_kwargs`, `add_generation_prompt` and
`continue_final_message`, and `special_tokens`.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ligerzoo.errors import LigerzooError, did_you_mean
from ligerzoo.serve.continuation import Piece, TokenText
from ligerzoo.serve.engine import Request
from ligerzoo.serve.options import RequestOptions, is_integer, show
from ligerzoo.serve.prompts import PromptEncoder

MAX_CHOICES = 128
MIN_LOGP = -9999.0
"""What the API returns for less likely tokens."""

_EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_new_tokens", "no_repeat_ngram_size", "bad_words_ids")
_SAMPLING = ("temperature", "top_p", "seed", "stop", *_EXTENSIONS)
_WITHOUT_EFFECT = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier",
)  # fmt: skip
_COMMON = ("model", "n", "stream", "stream_options", "logprobs", "max_tokens", *_SAMPLING, *_WITHOUT_EFFECT)

_TOP_LOGPROBS = "Only the log-probabilities of the chosen tokens are returned."
_PENALTY = "Use repetition_penalty."
_TOOLS = "Describe the functions in a message, and parse the answer."
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str | None]] = {
    "presence_penalty": ((0,), _PENALTY),
    "frequency_penalty": ((0,), _PENALTY),
    "logit_bias": (({},), None),
    "store": ((False,), None),
}
_NEUTRAL_CHAT: dict[str, tuple[tuple[Any, ...], str | None]] = {
    **_NEUTRAL,
    "top_logprobs": ((0,), _TOP_LOGPROBS),
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "parallel_tool_calls": ((True, False), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "response_format": (({"type": "text"},), "Describe the format in a message."),
    "modalities": ((["text"],), None),
    "audio": ((), None),
    "prediction": ((), None),
    "reasoning_effort": ((), "Use chat_template_kwargs if the chat template has such a variable."),
    "verbosity": ((), None),
    "web_search_options": ((), None),
}
_NEUTRAL_COMPLETION: dict[str, tuple[tuple[Any, ...], str | None]] = {
    **_NEUTRAL,
    "echo": ((False,), "Prepend the prompt to the text of the response."),
    "best_of": ((1,), "Use n and logprobs, and choose among the continuations."),
    "suffix": (("",), None),
}
"""Unsupported fields: the values without an effect, and what to do instead."""


@dataclass(frozen=True)
class Call:
    """A request of a client.

    Attributes:
        model: the model's name.
        prompts: the token ids of each prompt.
        options: sampling options. Their `max_new_tokens` is what the client asked for, or None.
        n: number of continuations of each prompt.
        is_streamed: whether the response is a stream of events.
        includes_usage: whether the stream ends with the numbers of tokens.
        has_logprobs: whether the response has the log-probabilities of the tokens.
    """

    model: str
    prompts: list[list[int]]
    options: RequestOptions
    n: int
    is_streamed: bool
    includes_usage: bool
    has_logprobs: bool

    def requests(self, encoder: PromptEncoder, device: torch.device | str) -> list[Request]:
        """Returns the requests for the scheduler: `n` for each prompt.

        Raises:
            ContextLengthError: prompt and continuation are longer than the context.
        """
        requests = []
        for prompt in self.prompts:
            room = encoder.room(prompt, self.options.max_new_tokens)
            options = replace(self.options, max_new_tokens=room)
            requests += [Request(prompt, options.for_scheduler(device, choice)) for choice in range(self.n)]
        return requests

    def usage(self, completion_tokens: int) -> dict[str, int]:
        """Returns the numbers of tokens for the response."""
        prompt_tokens = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


class Endpoint(ABC):
    """Reads the requests and writes the responses of one endpoint."""

    prefix: ClassVar[str]
    response_type: ClassVar[str]
    chunk_type: ClassVar[str]

    def __init__(self, call: Call) -> None:
        self._call = call
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": call.model}

    @classmethod
    @abstractmethod
    def read(cls, fields: Mapping[str, Any], encoder: PromptEncoder, max_requests: int) -> Call:
        """Reads a request.

        Args:
            fields: its JSON object.
            encoder: encodes and checks the prompts.
            max_requests: largest number of continuations.

        Raises:
            LigerzooError: a field is unknown, unsupported or invalid, or the continuations are too many. They are
                counted before any prompt is encoded.
        """

    def response(self, choices: Sequence[Piece], completion_tokens: int) -> dict[str, Any]:
        """Returns the response with the whole continuations."""
        return {
            **self._head,
            "object": self.response_type,
            "choices": [self._choice(i, piece, self._whole(piece.text)) for i, piece in enumerate(choices)],
            "usage": self._call.usage(completion_tokens),
        }

    def opening(self) -> list[dict[str, Any]]:
        """Returns the chunks that precede the text of a stream."""
        return []

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Returns the chunk of a stream for a part of a continuation."""
        return self._chunk([self._choice(index, piece, self._part(piece.text))], None)

    def closing(self, completion_tokens: int) -> list[dict[str, Any]]:
        """Returns the chunks that follow the text of a stream."""
        return [self._chunk([], self._call.usage(completion_tokens))] if self._call.includes_usage else []

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_type, "choices": choices}
        return {**chunk, "usage": usage} if self._call.includes_usage else chunk

    def _choice(self, index: int, piece: Piece, text: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if self._call.has_logprobs else None
        return {"index": index, **text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]: ...
    @abstractmethod
    def _part(self, text: str) -> dict[str, Any]: ...
    @abstractmethod
    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]: ...


class Chat(Endpoint):
    """/v1/chat/completions."""

    prefix, response_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"
    fields = (
        "messages", "max_completion_tokens", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
        "special_tokens", *_COMMON,
    )  # fmt: skip

    @classmethod
    def read(cls, fields: Mapping[str, Any], encoder: PromptEncoder, max_requests: int) -> Call:
        _check_names(fields, cls.fields, _NEUTRAL_CHAT)
        has_logprobs = _flag(fields, "logprobs")
        variables = _or_default(fields.get("chat_template_kwargs"), {})
        _require(isinstance(variables, dict), "chat_template_kwargs", variables, "an object")
        limits = [name for name in ("max_tokens", "max_completion_tokens") if fields.get(name) is not None]
        if len(limits) > 1:
            raise LigerzooError("given together with max_completion_tokens", where="max_tokens", expected="one of them")
        flags = {name: _optional_flag(fields, name) for name in ("add_generation_prompt", "continue_final_message")}
        special_tokens = _or_default(fields.get("special_tokens"), "text")
        _require(special_tokens in ("text", "control"), "special_tokens", special_tokens, '"text" or "control"')
        call = _call(fields, has_logprobs, dict.fromkeys(limits, "max_new_tokens"))
        _check_count(call.n, max_requests)
        prompt = encoder.encode_chat(fields.get("messages"), variables, special_tokens=special_tokens, **flags)
        return replace(call, prompts=[prompt])

    def opening(self) -> list[dict[str, Any]]:
        beginning = {"delta": {"role": "assistant", "content": ""}}
        choices = (self._choice(i, Piece("", [], None), beginning) for i in range(self._call.n))
        return [self._chunk([choice], None) for choice in choices]

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        content = [
            {
                "token": token.text,
                "bytes": list(token.text.encode()),
                "logprob": max(token.logp, MIN_LOGP),
                "top_logprobs": [],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class Completion(Endpoint):
    """/v1/completions."""

    prefix, response_type, chunk_type = "cmpl", "text_completion", "text_completion"
    fields = ("prompt", *_COMMON)
    default_max_tokens = 16  # the API's

    @classmethod
    def read(cls, fields: Mapping[str, Any], encoder: PromptEncoder, max_requests: int) -> Call:
        _check_names(fields, cls.fields, _NEUTRAL_COMPLETION)
        top = fields.get("logprobs")
        _require(top is None or is_integer(top, 0, 0), "logprobs", top, "0 or null", _TOP_LOGPROBS)
        fields = {**fields, "max_tokens": _or_default(fields.get("max_tokens"), cls.default_max_tokens)}
        call = _call(fields, top is not None, {"max_tokens": "max_new_tokens"})
        prompts = _prompts(fields.get("prompt"))
        _check_count(len(prompts) * call.n, max_requests)
        encoded = [encoder.encode(prompt) if isinstance(prompt, str) else encoder.check(prompt) for prompt in prompts]
        return replace(call, prompts=encoded)

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _part = _whole

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [max(token.logp, MIN_LOGP) for token in tokens],
            "top_logprobs": None,
            "text_offset": [token.offset for token in tokens],
        }


def _check_names(
    fields: Mapping[str, Any], supported: Sequence[str], neutral: Mapping[str, tuple[tuple[Any, ...], str | None]]
) -> None:
    for name, value in fields.items():
        if name in supported or (name in neutral and value is None):
            continue
        if name not in neutral:
            raise LigerzooError("unknown field", where=name[:100], remedy=did_you_mean(name[:100], supported))
        values, remedy = neutral[name]
        if value not in values:
            expected = " or ".join(map(repr, values)) or "no such field"
            raise LigerzooError("not supported", where=name, got=show(value), expected=expected, remedy=remedy)


def _call(fields: Mapping[str, Any], has_logprobs: bool, limits: Mapping[str, str]) -> Call:
    """Reads what both endpoints have, all but the prompts."""
    names = {**{name: name for name in _SAMPLING}, **limits}
    n = _or_default(fields.get("n"), 1)
    _require(is_integer(n, 1, MAX_CHOICES), "n", n, f"an integer from 1 to {MAX_CHOICES}")
    is_streamed = _flag(fields, "stream")
    stream_options = fields.get("stream_options")
    _require(stream_options is None or is_streamed, "stream_options", stream_options, "no such field without stream")
    _require(isinstance(stream_options, dict | None), "stream_options", stream_options, "an object")
    _check_names(stream_options or {}, ["include_usage"], {"include_obfuscation": ((False,), None)})
    return Call(
        model=fields["model"],
        prompts=[],
        options=replace(RequestOptions.from_json(fields, names), do_sample=True),  # the API samples by default
        n=n,
        is_streamed=is_streamed,
        includes_usage=_flag(stream_options or {}, "include_usage"),
        has_logprobs=has_logprobs,
    )


def _check_count(count: int, max_requests: int) -> None:
    if count > max_requests:
        raise LigerzooError(
            "too many continuations", where="n times the number of prompts", got=count,
            expected=f"at most {max_requests}", remedy="Send several requests.",
        )  # fmt: skip


def _prompts(prompt: object) -> list[str | list[int]]:
    """Returns the prompts: a text, several texts, a list of ids, or several lists of ids."""
    several: list[Any] = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    _require(several != [] and all(isinstance(one, str) or _is_ids(one) for one in several), "prompt", prompt,
             "a text, a list of texts, a list of token ids, or a list of such lists")  # fmt: skip
    return several


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(is_integer(item, 0, 2**31 - 1) for item in value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    return bool(_optional_flag(fields, name))


def _optional_flag(fields: Mapping[str, Any], name: str) -> bool | None:
    value: bool | None = fields.get(name)
    _require(isinstance(value, bool | None), name, value, "true or false")
    return value


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _require(holds: bool, field: str, got: object, expected: str, remedy: str | None = None) -> None:
    if not holds:
        raise LigerzooError("invalid value", where=field, got=show(got), expected=expected, remedy=remedy)
