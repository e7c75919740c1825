"""Evaluation during training: the loss on held-out data, and samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ligerzoo.entries import is_object
from ligerzoo.errors import LigerzooError
from ligerzoo.models import CausalLM
from ligerzoo.parallel import reshard, unsharded
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train import processes
from ligerzoo.train.data import Sample
from ligerzoo.train.log import CountedBatch

PROMPT_TOKENS, NEW_TOKENS = 128, 40

B = TypeVar("B")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode and disables gradients in the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


Prompt = Sequence[int] | Mapping[str, Tensor]
"""Token ids of a prompt; or, with images, all model inputs of one row."""


def continue_prompts(
    model: CausalLM, tokenizer: Tokenizer, prompts: Iterable[Prompt], max_new_tokens: int = NEW_TOKENS
) -> list[dict[str, str]]:
    """Continues prompts greedily, without the options of generation_config.json.

    Returns {"prompt": text, "continuation": text} for each.

    All processes must call it. Those of a sharded model each gather the whole model for it.
    """
    shown = []
    gathered = unsharded(model) if processes.world_size() > 1 else contextlib.nullcontext()
    with evaluating(model), gathered:
        for prompt in prompts:
            given = prompt if is_object(prompt) else {"input_ids": torch.tensor([list(prompt)])}
            inputs: dict[str, Any] = {name: tensor.to(model.device) for name, tensor in given.items()}
            ids = given["input_ids"][0].tolist()
            continued = model.generate(**inputs, max_new_tokens=max_new_tokens, use_model_defaults=False)[0, len(ids) :]
            # Of an image, one token is shown.
            kept = [b for a, b in pairwise([None, *ids]) if a != b or b not in model.placeholders]
            shown.append({"prompt": tokenizer.decode(kept), "continuation": tokenizer.decode(continued)})
    model.release_decode_graphs()
    return shown


def evaluate_loss(
    model: CausalLM, tokenizer: Tokenizer, batches: Iterable[CountedBatch], prompts: Iterable[Prompt]
) -> dict[str, Any]:
    """Returns what a run logs of an evaluation: the mean loss over trained tokens, and greedy continuations.

    All processes must call it. A load-balancing loss is left out.

    Args:
        batches: held-out data, this process's part.
        prompts: prompts to continue, see `prompt_of`; the same in all processes.

    Raises:
        LigerzooError: No token is trained.
    """
    total, tokens = torch.zeros((), dtype=torch.float64, device=model.device), 0
    with evaluating(model):
        for batch in batches:
            inputs = {name: tensor.to(model.device, non_blocking=True) for name, tensor in batch.inputs.items()}
            loss = model(**inputs, num_items_in_batch=1, output_router_logits=False).loss
            assert loss is not None
            total += loss
            tokens += batch.trained_tokens
    total, (tokens,) = processes.mean(total) * processes.data_ranks(), processes.total_of_data(tokens)
    if not tokens:
        raise LigerzooError("the evaluation data has no trained token", remedy="Look at it with --dry-run.")
    samples = continue_prompts(model, tokenizer, prompts)
    return {"eval_loss": float(total) / tokens, "eval_tokens": tokens, "samples": samples}


def evaluate_method(
    model: CausalLM,
    tokenizer: Tokenizer,
    loss_of: Callable[[list[B]], tuple[Tensor, dict[str, Tensor]]],
    batches: Iterable[B],
    prompts: Iterable[Prompt],
) -> dict[str, object]:
    """Returns what a run logs of an evaluation: the loss and metrics of a method, and greedy continuations.

    All processes must call it.

    Args:
        loss_of: returns the loss of the micro-batches of a step and its metrics, without gradients if they are off.
        batches: held-out data, this process's part.
        prompts: token ids of prompts to continue; the same in all processes.
    """
    numbers = {f"eval_{name}": number for name, number in evaluate_batches(model, loss_of, list(batches)).items()}
    return {**numbers, "samples": continue_prompts(model, tokenizer, prompts)}


def evaluate_batches(
    model: CausalLM, loss_of: Callable[[list[B]], tuple[Tensor, dict[str, Tensor]]], batches: list[B]
) -> dict[str, float]:
    """Returns the loss and metrics of a method without gradients, see `evaluate_method`."""
    with evaluating(model):
        loss, metrics = loss_of(batches)
    if processes.world_size() > 1:
        reshard(model)
    return {name: value.item() for name, value in {"loss": processes.mean(loss), **metrics}.items()}


def prompt_of(sample: Sample) -> list[int]:
    """Returns the tokens before the first trained one; of a sample that is trained from its start, the first half."""
    return sample.input_ids[: continued_length(sample)][-PROMPT_TOKENS:]


def continued_length(sample: Sample) -> int:
    """Returns the number of tokens of a sample that are continued, see `prompt_of`."""
    return sample.prompt_length if sample.prompt_length > 1 else max(1, len(sample.input_ids) // 2)
