"""A prompt with its options, for the scheduler, and the log-probabilities of its tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligerzoo.checks import FLAG, integer
from ligerzoo.generate.option_names import no_such_option
from ligerzoo.generate.options import SupportsGenerate, check_option, count_new_tokens, parse_call
from ligerzoo.generate.sampling import check_generator
from ligerzoo.generate.stopping import StopStrings, SupportsDecode, token_ids
from ligerzoo.kernels.cross_entropy import cross_entropy
from ligerzoo.sampling_options import SAMPLING_OPTIONS

MAX_TOP_LOGPS = 20
"""Number of the most likely tokens that the device finds for each token, if any are asked for."""

Scored = tuple[list[int], list[float], list[dict[int, float]]]
"""Tokens, their log-probabilities without temperature and filters, and for each the most likely tokens and theirs."""


def packed_logps(tokens: Tensor, logps: Tensor) -> Tensor:
    """Returns tokens and log-probabilities, (n,) each, as (2, n) fp64, which holds token ids exactly."""
    return torch.stack([tokens.double(), logps.double()])


def score(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the packed log-probabilities of given tokens, (n,), under logits (n, V)."""
    logps = -cross_entropy(logits, tokens, reduction="none") if len(tokens) > 0 else logits.new_empty(0)
    return packed_logps(tokens, logps)


def with_top_logps(packed: Tensor, logits: Tensor) -> Tensor:
    """Appends the most likely tokens to packed log-probabilities, (2, n), of logits (n, V).

    Returns:
        (2 + 2K, n): the packed rows, the ids of the K most likely tokens, and their log-probabilities. Tokens with the
        logit of the given one have its log-probability, to the bit.
    """
    logits = logits.float()
    top, ids = logits.topk(min(MAX_TOP_LOGPS, logits.shape[1]))
    given = logits.gather(1, packed[0].long()[:, None])
    logps = torch.where(top == given, packed[1][:, None], (top - logits.logsumexp(-1, keepdim=True)).double())
    return torch.cat([packed, ids.T.double(), logps.T])


def unpack(rows: Sequence[Sequence[float]], columns: Sequence[int], count: int) -> Scored:
    """Returns some columns of what `with_top_logps` or `packed_logps` returned, with the `count` most likely tokens."""
    tokens, logps, *top = rows
    ids, top_logps = top[: len(top) // 2][:count], top[len(top) // 2 :][:count]
    likely = [{int(a[i]): b[i] for a, b in zip(ids, top_logps, strict=True)} for i in columns] if count else []
    return [int(tokens[i]) for i in columns], [logps[i] for i in columns], likely


_REMEDIES = {
    "attention_mask": "Leave out the padding: each prompt is a list of tokens.",
    "cache_dtype": "Pass it to Scheduler: all requests share a KV cache.",
    "exact": "Pass it to Scheduler: all requests share a KV cache.",
    "input_ids": "Pass the prompts as the first argument.",
    "max_length": "Use max_new_tokens.",
    "num_return_sequences": "Pass the prompt several times.",
    "pad_token_id": "Leave it out: results contain no padding.",
    "streamer": "Call step() of a ligerzoo.generate.Scheduler, which returns the new tokens of each step.",
    "use_cache": "Leave it out: a KV cache is always kept.",
    **dict.fromkeys(
        ("inputs_embeds", "past_key_values", "return_dict_in_generate", "stopping_criteria"),
        "Use generate, which has this option.",
    ),
}


class RequestOptions:
    """The options of a request, validated.

    Args:
        model: the model, whose configs give the defaults.
        max_new_tokens: largest number of new tokens, at least 1, or 0 with `prompt_logps`.
        eos_token_id, stop_strings, tokenizer, generator, use_model_defaults: see `generate`.
        top_logps: number of the most likely tokens to return with each token, from 0 to MAX_TOP_LOGPS.
        prompt_logps: whether to return the log-probabilities of the prompt.
        sampling: see `SamplingOptions`.

    Attributes:
        naming_file: see `CallOptions`.

    Raises:
        LigerzooError: an option is unknown or invalid.
    """

    def __init__(
        self,
        model: SupportsGenerate,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: SupportsDecode | None = None,
        generator: torch.Generator | None = None,
        use_model_defaults: bool = True,
        top_logps: int = 0,
        prompt_logps: bool = False,
        **sampling: Any,
    ) -> None:
        check_option("prompt_logps", prompt_logps, FLAG)
        check_option("top_logps", top_logps, integer(0, MAX_TOP_LOGPS))
        self.top_logps, self.prompt_logps = top_logps, prompt_logps
        given = {"max_new_tokens": max_new_tokens, "stop_strings": stop_strings}
        call = parse_call(model, given, sampling, use_model_defaults=use_model_defaults)
        for name in call.others:
            raise no_such_option(name, "not an option of a request", _OPTIONS, ", ".join(_OPTIONS), others=_REMEDIES)
        self.naming_file = call.naming_file
        with call.naming_file():
            self.sampling = call.sampling
            self._max_new_tokens, self._max_length = call.get("max_new_tokens"), call.get("max_length")
            if self._max_new_tokens is not None:
                check_option("max_new_tokens", self._max_new_tokens, integer(0 if prompt_logps else 1))
            strings = call.get("stop_strings")
            self.stop_strings = StopStrings(strings, tokenizer) if strings is not None else None
        self.eos_token_ids = frozenset(token_ids(model, "eos_token_id", eos_token_id))
        if generator is not None:
            check_generator(generator, getattr(model, "device", torch.device("cpu")))
        self.generator = generator

    def require_limit(self) -> None:
        """Raises LigerzooError if there is no largest number of tokens."""
        if self._max_length is None:
            self.count_new_tokens(0)

    def count_new_tokens(self, prompt_length: int) -> int:
        """Returns the largest number of new tokens; raises LigerzooError if it is unknown, or none fits."""
        return count_new_tokens(self._max_new_tokens, self._max_length, prompt_length)


_OPTIONS = [name for name in inspect.signature(RequestOptions).parameters if name not in ("model", "sampling")]
_OPTIONS += SAMPLING_OPTIONS


class Request:
    """A prompt, its options, and its new tokens so far.

    Attributes:
        prompt: (T,) int64 token ids on the CPU.
        options: its options.
        max_new_tokens: see `RequestOptions`.
        started: number of new tokens that the device has been asked for; the host may not know all of them yet.
        tokens: the new tokens that the host knows.
        index: what `Scheduler.add` returned for it.
        seed: (1,) int64 on the device, see `Sampler.assign`; None if the request does not sample.
    """

    index: int
    seed: Tensor | None = None

    def __init__(self, prompt: Tensor, options: RequestOptions) -> None:
        self.prompt, self.options, self.max_new_tokens = prompt, options, options.count_new_tokens(len(prompt))
        self.started = 0
        self.tokens: list[int] = []
        self._scored = 0  # tokens of the prompt whose log-probabilities the host knows

    @property
    def length(self) -> int:
        """Number of tokens of the prompt, and of those that the device has been asked for."""
        return len(self.prompt) + self.started

    @property
    def max_length(self) -> int:
        """Largest number of tokens, with those of the prompt."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def context(self) -> Tensor:
        """The prompt and the new tokens that the host knows, (T,) int64 on the CPU."""
        return torch.cat([self.prompt, torch.tensor(self.tokens, dtype=torch.int64)])

    @property
    def needs_prompt_logps(self) -> bool:
        """Whether the prompt must be scored, before the first new token."""
        return self.options.prompt_logps and self.started == 0

    def append(self, token: int) -> str | None:
        """Appends a new token, and returns why the request is finished; None if it is not."""
        self.tokens.append(token)
        stop = self.options.stop_strings
        if token in self.options.eos_token_ids or (stop is not None and stop.found_in(self.tokens[-stop.window :])):
            return "stop"
        return "length" if len(self.tokens) == self.max_new_tokens else None

    def count_scored(self, tokens: int) -> str | None:
        """Counts tokens of the prompt that are scored, and returns why the request is finished; None if it is not."""
        self._scored += tokens
        return "length" if self.max_new_tokens == 0 and self._scored == len(self.prompt) - 1 else None
