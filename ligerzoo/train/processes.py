"""The processes of a run, which torchrun starts: one for each GPU."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ligerzoo import parallel
from ligerzoo.parallel.processes import control_group


def rank() -> int:
    """Returns the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Returns the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def world_size_of_host() -> int:
    """Returns the number of processes on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_main() -> bool:
    """Returns whether this process prints and writes files."""
    return rank() == 0


def say(text: object) -> None:
    """Prints a text in the main process."""
    if is_main():
        print(text)


def gather(value: Any) -> list[Any]:
    """Returns the value of each process, in the order of the ranks. All processes must call this function."""
    return parallel.gather_objects(value)


def total(*counts: int) -> tuple[int, ...]:
    """Returns the sum of each number over all processes, without waiting for GPUs."""
    if world_size() == 1:
        return counts
    sums = torch.tensor(counts)
    dist.all_reduce(sums, group=control_group())
    return tuple(sums.tolist())


def mean(value: Tensor) -> Tensor:
    """Returns the mean of a 0-d tensor over all processes, without waiting for GPUs."""
    if world_size() == 1:
        return value
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / world_size()


def divisor(count: int, device: torch.device) -> int | Tensor:
    """Returns `num_items_in_batch` of this process: gradients are averaged over processes, so `count` is too.

    Args:
        count: number of trained tokens of the step, in all processes.
    """
    return count if world_size() == 1 else torch.full((), count / world_size(), device=device)
