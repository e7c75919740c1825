"""Continues more prompts than fit into a batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor, nn

from ligerzoo.generate.options import require, type_name
from ligerzoo.generate.scheduler import Scheduler, Update


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        index: index of the prompt.
        tokens: the new tokens, with the end-of-sequence token, without padding.
        logps: their log-probabilities under the softmax of the logits, without temperature and filters.
        finish_reason: "stop" after an end-of-sequence token or stop string, "length" after `max_new_tokens` tokens.
        top_logps: for each token, the `top_logps` most likely token ids at its position and their log-probabilities,
            the most likely first; empty if none were asked for.
        prompt_logps, prompt_top_logps: the same of the tokens of the prompt, without the first one; empty without the
            option `prompt_logps`.
    """

    index: int
    tokens: list[int]
    logps: list[float]
    finish_reason: str
    top_logps: list[dict[int, float]] = field(default_factory=list)
    prompt_logps: list[float] = field(default_factory=list)
    prompt_top_logps: list[dict[int, float]] = field(default_factory=list)


def generate_many(
    model: nn.Module, prompts: Iterable[Tensor | Sequence[int]], *, batch_size: int, **options: Any
) -> Iterator[Completion]:
    """Continues each prompt, as `generate` does alone, and yields the results as they finish.

    Up to `batch_size` prompts run at the same time. When one has finished, the next takes its row of the batch.

    Args:
        model: a causal language model with self-attention only. Text inputs only.
        prompts: token ids of each prompt, without padding. An iterator is read only as rows become free; a list, tuple
            or tensor is checked before anything runs.
        batch_size: largest number of prompts that run at the same time.
        options: those of `Scheduler`, with `max_cache_tokens`, `cache_dtype` and `exact`. Without a limit in
            generation_config.json, `max_new_tokens` is required.

    Returns:
        An iterator of results, in the order in which they finish. To stop early, close it or drop it.

    Raises:
        LigerzooError: an option is unknown or invalid, a prompt is empty, has an unknown token id or is too long, the
            model cannot decode in a `DecodeBatch`, or, later, logits are NaN or infinite.
    """
    scheduler = Scheduler(model, batch_size=batch_size, **options)
    scheduler.defaults.require_limit()
    is_iterable = isinstance(prompts, Iterable) and not isinstance(prompts, str | Mapping)
    remedy = "Encode text, and pass its token ids: [tokenizer.encode(text) for text in texts]."
    require(is_iterable, "prompts", type_name(prompts), "an iterable of lists of token ids", remedy)
    if isinstance(prompts, list | tuple | Tensor):
        for index, prompt in enumerate(prompts):
            scheduler.request(prompt, f"prompts[{index}]")
    return _run(scheduler, iter(prompts))


def _run(scheduler: Scheduler, prompts: Iterator[Tensor | Sequence[int]]) -> Iterator[Completion]:
    received: defaultdict[int, list[Update]] = defaultdict(list)
    requests = (scheduler.request(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts))
    has_more = True
    with scheduler:
        while has_more or not scheduler.is_idle:
            free = scheduler.free_rows
            started = list(islice(requests, free))
            has_more = len(started) == free
            for request in started:
                scheduler.submit(request)
            for update in scheduler.step():
                received[update.index].append(update)
                if update.finish_reason is not None:
                    yield _completion(received.pop(update.index))


def _completion(updates: Sequence[Update]) -> Completion:
    """Returns what the updates of a request say together."""
    completion = Completion(updates[-1].index, [], [], updates[-1].finish_reason or "")
    for update in updates:
        if update.is_prompt:
            completion.prompt_logps.extend(update.logps)
            completion.prompt_top_logps.extend(update.top_logps)
        else:
            completion.tokens.extend(update.tokens)
            completion.logps.extend(update.logps)
            completion.top_logps.extend(update.top_logps)
    return completion
