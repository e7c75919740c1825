"""Evaluation during training: the loss on held-out data, and samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ligerzoo.errors import LigerzooError
from ligerzoo.models import CausalLM
from ligerzoo.parallel import unsharded
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train import processes
from ligerzoo.train.log import CountedBatch

PROMPT_TOKENS, NEW_TOKENS = 128, 40


class TokenLabels(Protocol):
    """Token ids of a sample, and its labels: -100 for tokens that are not trained."""

    @property
    def input_ids(self) -> Sequence[int]: ...
    @property
    def labels(self) -> Sequence[int]: ...


@contextlib.contextmanager
def evaluating(model: CausalLM) -> Iterator[None]:
    """Sets evaluation mode and disables gradients in the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def evaluation_loss(model: CausalLM, batches: Iterable[CountedBatch]) -> tuple[float, int]:
    """Returns the mean loss over all trained tokens, without a load-balancing loss, and the number of these tokens.

    All processes must call it, each with its part of the batches.

    Raises:
        LigerzooError: There are no trained tokens.
    """
    total, tokens = torch.zeros((), dtype=torch.float64, device=model.device), 0
    with evaluating(model):
        for batch in batches:
            inputs = {name: tensor.to(model.device, non_blocking=True) for name, tensor in batch.inputs.items()}
            loss = model(**inputs, num_items_in_batch=1, output_router_logits=False).loss
            assert loss is not None
            total += loss
            tokens += batch.trained_tokens
    total, (tokens,) = processes.mean(total) * processes.world_size(), processes.total(tokens)
    if not tokens:
        raise LigerzooError("the evaluation data has no trained token", remedy="Look at it with --dry-run.")
    return float(total) / tokens, tokens


def continue_prompts(
    model: CausalLM, tokenizer: Tokenizer, prompts: Iterable[Sequence[int]], max_new_tokens: int = NEW_TOKENS
) -> list[dict[str, str]]:
    """Continues prompts greedily. Returns {"prompt": text, "continuation": text} for each.

    All processes must call it. Those of a sharded model each gather the whole model for it.
    """
    shown = []
    gathered = unsharded(model) if processes.world_size() > 1 else contextlib.nullcontext()
    with evaluating(model), gathered:
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=model.device)
            continued = model.generate(ids, max_new_tokens=max_new_tokens)[0, len(prompt) :]
            shown.append({"prompt": tokenizer.decode(prompt), "continuation": tokenizer.decode(continued)})
    model.release_decode_graphs()
    return shown


def evaluate(
    model: CausalLM, tokenizer: Tokenizer, batches: Iterable[CountedBatch], prompted: Iterable[Any]
) -> dict[str, Any]:
    """Returns what a run logs of an evaluation: the loss, and greedy continuations. All processes must call it.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        batches: held-out data, this process's part.
        prompted: samples with token ids and labels, whose prompts are continued; the same in all processes.
    """
    loss, tokens = evaluation_loss(model, batches)
    shown = continue_prompts(model, tokenizer, map(prompt_of, prompted))
    return {"eval_loss": loss, "eval_tokens": tokens, "samples": shown}


def prompt_of(sample: TokenLabels) -> list[int]:
    """Returns the tokens before the first trained one; of a sample that is trained from its start, the first half."""
    ids, labels = list(sample.input_ids), list(sample.labels)
    first = next((index for index, label in enumerate(labels) if label != -100), len(labels))
    return ids[: first if first > 1 else max(1, len(ids) // 2)][-PROMPT_TOKENS:]
