"""Packed rows of prompts with completions, and the loss over the completions, which is that of each sequence alone.

Several sequences share a row and do not attend to each other. The hidden states that predict the tokens of completions
are gathered into (S, L, H) for S completions of up to L tokens, so a loss gets them as if each had its own row. Prompts
and the padding of rows do not reach the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ligerzoo.adapters import adapters_disabled
from ligerzoo.layers.exactness import exact_obstacle
from ligerzoo.losses import Distillation, LossOutput, sampler_correction
from ligerzoo.losses.logps import label_logps
from ligerzoo.models import CausalLM
from ligerzoo.train import processes
from ligerzoo.train.completions import SampledCompletion, without_labels
from ligerzoo.train.data.batches import collate, first_with_image
from ligerzoo.train.data.images import SampleImages
from ligerzoo.train.data.packing import Row, pack_best_fit
from ligerzoo.train.data.samples import UNTRAINED, Sample


@dataclass(frozen=True)
class CompletionBatch:
    """B rows of T tokens with S completions of up to L tokens, on the CPU.

    Attributes:
        inputs: int64 tensors (B, T): `input_ids`, `labels` and `position_ids`, which begin at 0 in each segment. Each
            padding token is a segment.
        completions: the completions, in the order of the rows.
        predictors: (S, L) int64, where in the flattened rows the token before each token of a completion is; 0 for
            padding.
        targets: (S, L) int64, the tokens of the completions; -100 for padding and completions that are not trained.
        advantages: (S,) fp32.
        sampler_logps: (S, L) fp32, log-probabilities of the tokens when they were sampled; 0 for padding.
        tokens: number of tokens of the rows without padding and completions that are not trained.
        exact: give each completion the bits that it has alone, as exact sampling does.
    """

    inputs: dict[str, Tensor]
    completions: list[SampledCompletion]
    predictors: Tensor
    targets: Tensor
    advantages: Tensor
    sampler_logps: Tensor
    tokens: int
    exact: bool = False

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that the loss counts."""
        return sum(one.trained_tokens for one in self.completions)

    @property
    def padding(self) -> int:
        """Number of padding tokens of the rows."""
        return self.inputs["input_ids"].numel() - self.tokens

    @property
    def sources(self) -> list[str]:
        """The records of the prompts, as `file:line`."""
        return [str(one.source) for one in self.completions]


def pack_completions(
    completions: Sequence[SampledCompletion],
    *,
    batch_size: int,
    seq_length: int,
    pad_token_id: int,
    images: SampleImages | None = None,
) -> list[CompletionBatch]:
    """Packs prompts with their completions into batches, whose rows are as long as the longest one of the batch.

    Each process gets every n-th row of a batch of all n processes. All get equally many batches, since a sharded model
    runs in all of them. A process for which the last batch has no row gets a row that is not trained.

    Args:
        completions: with advantages; those of all processes.
        batch_size: B, largest number of rows of a batch of a process.
        seq_length: largest number of tokens of a row.
        pad_token_id: fills the end of a row; any token.
        images: reads the images of prompts; None for text only.

    Raises:
        DataError: a prompt with its completion is longer than a row.
    """
    rows = cast("list[list[SampledCompletion]]", pack_best_fit(completions, seq_length, True).rows)
    rank, world_size = processes.data_rank(), processes.data_ranks()
    size = batch_size * world_size
    steps = [rows[first : first + size] for first in range(0, len(rows), size)]
    return [_batch(step[rank::world_size] or [[_untrained(completions)]], step, pad_token_id, images) for step in steps]


def _untrained(completions: Sequence[SampledCompletion]) -> SampledCompletion:
    """Returns the shortest completion, without labels and advantage."""
    return replace(without_labels(min(completions, key=lambda one: len(one.input_ids))), advantage=0.0)


def _batch(
    rows: list[list[SampledCompletion]],
    rows_of_step: list[list[SampledCompletion]],
    pad_token_id: int,
    images: SampleImages | None,
) -> CompletionBatch:
    """Returns the batch of rows. If only other processes have images, an untrained row with one of theirs follows."""
    completions, layout = [one for row in rows for one in row], cast("list[list[Sample]]", rows)
    length = max(sum(len(one.input_ids) for one in row) for row in rows)
    other = first_with_image(cast("list[Row]", rows_of_step))
    if other is not None and not any(one.images for one in completions):
        layout, length = [*layout, [other]], max(length, len(other.input_ids))
    inputs = collate([], layout, length, pad_token_id, images).inputs
    length = inputs["input_ids"].shape[1]
    predictors = []
    for index, row in enumerate(rows):
        last = index * length - 1
        for one in row:
            last += len(one.input_ids)
            predictors.append(torch.arange(last - len(one.tokens), last))
    return CompletionBatch(
        inputs,
        completions,
        pad_sequence(predictors, batch_first=True),
        pad_sequence(
            [torch.tensor(one.labels[-len(one.tokens) :]) for one in completions],
            batch_first=True,
            padding_value=UNTRAINED,
        ),
        torch.tensor([one.advantage for one in completions]),
        pad_sequence([torch.tensor(one.logps) for one in completions], batch_first=True),
        sum(len(one.input_ids) for one in completions if one.trained_tokens),
        all(one.is_exact for one in completions),
    )


def completion_logps(model: CausalLM, batch: CompletionBatch, *, temperature: float = 1.0) -> Tensor:
    """Returns the log-probabilities of the tokens of completions, (S, L) fp32 on the model's device; 0 for padding."""

    def logps(*head: Any, **options: Any) -> tuple[None, Tensor]:
        return None, label_logps(*head, temperature=temperature, **options)

    details: Tensor = _forward(model, batch, logps).details
    return details


class PolicyBatch(NamedTuple):
    """A batch, and what updates with it do not change.

    Attributes:
        batch: the batch.
        constants: arguments of `ligerzoo.losses.GRPO`: `advantages` (S,), and (S, L) `old_logps` and, if they are
            needed, `correction` and `ref_logps`.
        metrics: "sampler_difference", if the model has computed `old_logps`: the mean absolute difference of
            log-probabilities between the model and sampling.
    """

    batch: CompletionBatch
    constants: dict[str, Tensor]
    metrics: dict[str, Tensor]


@torch.no_grad()
def policy_batch(
    model: CausalLM, batch: CompletionBatch, *, recomputes: bool, reference: CausalLM | None, temperature: float = 1.0
) -> PolicyBatch:
    """Returns a batch with the constants of a policy gradient, before the first update.

    Args:
        model: the model that trains.
        recomputes: whether `old_logps` are computed by the model, with truncated importance weights `correction` for
            their difference from those of sampling. Otherwise they are those of sampling.
        reference: the model before training, without adapters that it has; None without a KL term.
        temperature: that of sampling.
    """
    sampler_logps, mask = batch.sampler_logps.to(model.device), batch.targets.to(model.device) != UNTRAINED
    given = {"advantages": batch.advantages.to(model.device), "old_logps": sampler_logps}
    metrics = {}
    if recomputes:
        given["old_logps"] = completion_logps(model, batch, temperature=temperature)
        given["correction"] = sampler_correction(given["old_logps"], sampler_logps, mask)
        differences = (given["old_logps"] - sampler_logps).abs() * mask
        metrics["sampler_difference"] = differences.sum() / mask.sum().clamp(min=1)
    if reference is not None:
        with adapters_disabled(reference):
            given["ref_logps"] = completion_logps(reference, batch, temperature=temperature)
    return PolicyBatch(batch, given, metrics)


def completion_loss(
    model: CausalLM,
    batch: CompletionBatch,
    loss: Callable[..., LossOutput],
    *,
    aux_loss_share: float = 1.0,
    **inputs: object,
) -> LossOutput:
    """Returns a loss over the completions, and its metrics.

    Args:
        loss: such as `ligerzoo.losses.GRPO`; gets a row for each completion.
        aux_loss_share: factor of the load-balancing loss of a mixture of experts: 1 / n for each of n batches.
        inputs: keyword arguments of the loss, such as `advantages` (S,) and `old_logps` (S, L).
    """

    def objective(*head: Any, **options: Any) -> LossOutput:
        return loss(*head, **{**options, **inputs})

    out = _forward(model, batch, objective)
    if out.aux_loss is None:
        return LossOutput(out.loss, out.details)
    return LossOutput(out.loss - (1 - aux_loss_share) * model.aux_loss_weight * out.aux_loss, out.details)


def completion_divergence(
    model: CausalLM,
    teacher: CausalLM,
    batch: CompletionBatch,
    loss: Distillation,
    *,
    aux_loss_share: float = 1.0,
    **inputs: object,
) -> LossOutput:
    """Returns the divergence from a teacher at the tokens of the completions, and its metrics.

    The teacher reads the same rows without gradients, within the forward of the model; exactly, if it can.

    Args:
        teacher: the teacher, with the same vocabulary.
        aux_loss_share: see `completion_loss`.
        inputs: keyword arguments of `ligerzoo.losses.distillation_loss`, such as `num_items`.
    """
    rows = replace(batch, exact=batch.exact and exact_obstacle(teacher) is None)
    with_teacher = loss.with_teacher(partial(_forward, teacher, rows), **inputs)
    return completion_loss(model, batch, with_teacher, aux_loss_share=aux_loss_share)


def _forward(model: CausalLM, batch: CompletionBatch, function: Callable[..., Any]) -> Any:
    """Runs the model with a function of the hidden states of completions, the weight of the head and the targets."""
    device = model.device
    predictors, targets = batch.predictors.to(device), batch.targets.to(device)

    def objective(hidden: Tensor, weight: Tensor, _: Tensor, **options: Any) -> Any:
        return function(hidden.flatten(0, 1)[predictors], weight, targets, **options)

    inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items()}
    return model(**inputs, exact=batch.exact, objective=objective)
