"""Numbers of a step: the loss and metrics of its micro-batches together, in all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.losses import LossOutput
from ligerzoo.train import processes
from ligerzoo.train.log import CountedBatch, first_sources

T = TypeVar("T")


class SeededRun(Protocol):
    """What a step needs of a run, see `Run`."""

    device: torch.device

    def seed(self, micro_batch: int = 0) -> None: ...


def forward_backward(
    loss_of: Callable[[T], LossOutput], micro_batches: Sequence[T], sizes: Sequence[int], run: SeededRun
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the sum of the losses of micro-batches, 0-d, and their mean metrics; adds up gradients if enabled.

    Args:
        loss_of: the forward of a micro-batch: its part of the loss of the step, and metrics.
        micro_batches: those of this process.
        sizes: weights of the metrics of each, see `mean_metrics`.
        run: the run, which seeds the random numbers of each micro-batch.
    """
    loss, metrics = torch.zeros((), device=run.device), []
    for index, micro_batch in enumerate(micro_batches):
        run.seed(index)
        part = loss_of(micro_batch)
        if torch.is_grad_enabled():
            torch.autograd.backward(part.loss)
        loss += part.loss.detach()
        metrics.append(part.metrics)
    return loss, mean_metrics(metrics, sizes)


def num_items(batches: Sequence[CountedBatch], device: torch.device, where: str = "") -> int | Tensor:
    """Returns the divisor of the summed loss over the tokens of a step, see `processes.divisor`.

    Args:
        batches: the micro-batches of this process.
        where: begins the message of the error.

    Raises:
        LigerzooError: No token is trained, in any process.
    """
    (count,) = processes.total_of_data(sum(batch.trained_tokens for batch in batches))
    if not count:
        remedy = "Look at the data with --dry-run."
        raise LigerzooError("no token is trained", where=f"{where}{first_sources(batches)}", remedy=remedy)
    return processes.divisor(count, device)


def mean_metrics(parts: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Averages the metrics of micro-batches over a step. All processes must call it with the same metrics.

    Args:
        parts: the metrics of each micro-batch, 0-d. The mean of "NAME/GROUP" is weighted by "count/GROUP", if that is
            a metric; counts are added up.
        sizes: number of samples or tokens of each micro-batch; the weights of other metrics.
    """
    if not parts or not parts[0]:
        return {}
    weighted, weights = [], []
    for name in parts[0]:
        values = torch.stack([part[name].detach() for part in parts]).double()
        count = f"count/{name.rpartition('/')[2]}"
        is_weighted_by_count = count in parts[0] and name != count
        weight = torch.stack([part[count] for part in parts]) if is_weighted_by_count else values.new_tensor(sizes)
        weighted.append(values.sum() if name == count else (values * weight).sum())
        weights.append(weight.sum())
    sums = processes.mean(torch.stack([torch.stack(weighted), torch.stack(weights).double()])) * processes.data_ranks()
    return {
        name: total if name.startswith("count/") else total / weight.clamp(min=1)
        for name, total, weight in zip(parts[0], *sums, strict=True)
    }


def mean_of(updates: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the means of the numbers of several updates, 0-d; nothing without updates."""
    return {name: torch.stack([one[name].double() for one in updates]).mean() for name in (updates or [{}])[0]}


def on_device(numbers: Mapping[str, float], device: torch.device) -> dict[str, Tensor]:
    """Returns numbers of a step as 0-d fp64 tensors, copied to the device together."""
    return dict(zip(numbers, torch.tensor([*numbers.values()], dtype=torch.float64).to(device), strict=True))
