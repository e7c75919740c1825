"""Continues more prompts than fit into a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn

from ligerzoo.generate.options import require, type_name
from ligerzoo.generate.scheduler import Scheduler


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        index: index of the prompt.
        tokens: the new tokens, with the end-of-sequence token, without padding.
        logps: their log-probabilities under the softmax of the logits, without temperature and filters.
        finish_reason: "stop" after an end-of-sequence token or stop string, "length" after `max_new_tokens` tokens.
    """

    index: int
    tokens: list[int]
    logps: list[float]
    finish_reason: str


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
    partial: dict[int, tuple[list[int], list[float]]] = {}
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
                tokens, logps = partial.setdefault(update.index, ([], []))
                tokens += update.tokens
                logps += update.logps
                if update.finish_reason is not None:
                    yield Completion(update.index, *partial.pop(update.index), update.finish_reason)
