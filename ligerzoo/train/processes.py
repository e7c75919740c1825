"""The processes of a run, which torchrun starts: one for each GPU."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from ligerzoo.errors import LigerzooError


def rank() -> int:
    """Returns the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Returns the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def is_main() -> bool:
    """Returns whether this process prints and writes files."""
    return rank() == 0


def gather(value: Any) -> list[Any]:
    """Returns the value of each process, in the order of the ranks. All processes must call this function."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def refuse_several() -> None:
    """Raises LigerzooError in a run of several processes, for recipes that train in one."""
    if world_size() > 1:
        raise LigerzooError(
            "this recipe trains in one process", where="environment variable WORLD_SIZE", got=world_size(),
            expected=1, remedy="Start it without torchrun.",
        )  # fmt: skip
