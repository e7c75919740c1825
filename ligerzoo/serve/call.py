"""What a client asks for: prompts, options of sampling, and how many continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ligerzoo.checks import integer
from ligerzoo.generate import Request
from ligerzoo.serve.engine_thread import EngineThread
from ligerzoo.serve.fields import FLAG, OBJECT, Fields, check_field, check_names, read
from ligerzoo.serve.options import ClientOptions
from ligerzoo.serve.prompts import PromptEncoder
from ligerzoo.serve.tools import Tools

MAX_CHOICES = 128
_CHOICES = integer(1, MAX_CHOICES)


class Delivery(NamedTuple):
    """How many continuations a client wants, and how.

    Attributes:
        n: number of continuations of each prompt.
        is_streamed: whether the response is a stream of events.
        includes_usage: whether the stream ends with the numbers of tokens.
    """

    n: int
    is_streamed: bool
    includes_usage: bool

    @classmethod
    def read(cls, fields: Fields) -> Delivery:
        """Reads `n`, `stream` and `stream_options`; raises LigerzooError if one is invalid."""
        n, is_streamed = read(fields, "n", _CHOICES, 1), read(fields, "stream", FLAG, False)
        given = fields.get("stream_options")
        check_field(given is None or is_streamed, "stream_options", given, "no such field without stream")
        stream_options: Fields = read(fields, "stream_options", OBJECT, {})
        check_names(stream_options, ["include_usage"], {"include_obfuscation": ((False,), None)})
        return cls(n, is_streamed, read(stream_options, "include_usage", FLAG, False))


@dataclass(frozen=True)
class Call:
    """A request of a client.

    Attributes:
        model: the model's name.
        prompts: the token ids of each prompt.
        options: sampling options. Their `max_new_tokens` is what the client asked for, or None.
        delivery: how many continuations, and how.
        top_logprobs: number of the most likely tokens whose log-probabilities the response has with each token; None
            for a response without log-probabilities.
        logprob_token_ids: tokens whose log-probabilities it has instead; empty for those of the most likely.
        echoed: the texts of the tokens of each prompt, which precede the continuations; None if they do not.
        continues_text: whether a prompt is a text to continue, not one to answer.
        tools: the functions that the model may call; None for no functions.
    """

    model: str
    prompts: list[list[int]]
    options: ClientOptions
    delivery: Delivery
    top_logprobs: int | None
    logprob_token_ids: Sequence[int] = ()
    echoed: list[list[str]] | None = None
    continues_text: bool = False
    tools: Tools | None = None

    def requests(self, encoder: PromptEncoder, engine: EngineThread) -> list[Request]:
        """Returns the requests for the engine: `n` for each prompt.

        Raises:
            ContextLengthError: prompt and continuation are longer than the context.
            LigerzooError: the model does not accept the prompt or the options.
        """
        requests = []
        for prompt in self.prompts:
            options = self.options.updated(max_new_tokens=encoder.room(prompt, self.options.max_new_tokens))
            for choice in range(self.delivery.n):
                given = options.for_scheduler(engine.device, choice)
                top, scored = self.top_logprobs or 0, self.echoed is not None
                given |= {"top_logps": top, "logp_token_ids": self.logprob_token_ids or None, "prompt_logps": scored}
                requests.append(engine.request(prompt, **given))
        return requests

    def usage(self, completion_tokens: int) -> dict[str, int]:
        """Returns the numbers of tokens for the response."""
        prompt_tokens = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
