"""The processes of a run, which torchrun starts: one for each GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ligerzoo import parallel
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.parallel.processes import control_group

T = TypeVar("T")

_mesh: DeviceMesh | None = None


@contextmanager
def over_mesh(sizes: MeshSizes, device: torch.device) -> Iterator[None]:
    """In this context, the processes of a run form a mesh. All processes must enter it.

    Raises:
        ConfigError: The sizes do not fit the number of processes, or an axis is not supported.
    """
    global _mesh
    if not dist.is_initialized():
        sizes.over(1)
    _mesh = parallel.make_mesh(sizes, device.type) if dist.is_initialized() else None
    try:
        yield
    finally:
        _mesh = None


def mesh() -> DeviceMesh | None:
    """Returns the mesh of the run; None in a single process."""
    return _mesh


def mesh_sizes() -> MeshSizes:
    """Returns the sizes of the mesh of the run."""
    if _mesh is None:
        return MeshSizes().over(world_size())
    sizes = {name: _mesh[name].size() for name in parallel.mesh.AXES}
    experts = parallel.mesh.expert_mesh(_mesh)
    return MeshSizes(**sizes, expert=1 if experts is None else experts["expert"].size() // sizes["tensor"])


def context_size() -> int:
    """Returns the number of processes that divide each row."""
    return 1 if _mesh is None else _mesh["context"].size()


def per_copy() -> int:
    """Returns the number of processes that divide a copy of the model."""
    return world_size() if _mesh is None else world_size() // _mesh["replicate"].size()


def data_rank() -> int:
    """Returns the number of the part of the data that this process reads, from 0."""
    if _mesh is None:
        return rank()
    return _mesh.get_local_rank("replicate") * _mesh["shard"].size() + _mesh.get_local_rank("shard")


def data_ranks() -> int:
    """Returns the number of parts of the data, which processes along `context` and `tensor` share."""
    return world_size() if _mesh is None else _mesh["replicate"].size() * _mesh["shard"].size()


def token_rank() -> int:
    """Returns the number of the tokens that this process computes, from 0: a part of the rows of its data."""
    return data_rank() * context_size() + (0 if _mesh is None else _mesh.get_local_rank("context"))


def token_ranks() -> int:
    """Returns the number of parts of the tokens, which processes along `tensor` share."""
    return data_ranks() * context_size()


def rank() -> int:
    """Returns the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Returns the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def gather_data(value: T) -> list[T]:
    """Returns the value for each part of the data, in the order of `data_rank`. All processes must call it."""
    return _by_number(data_rank(), value)


def gather_tokens(value: T) -> list[T]:
    """Returns the value for each part of the tokens, in the order of `token_rank`. All processes must call it."""
    return _by_number(token_rank(), value)


def _by_number(number: int, value: T) -> list[T]:
    """Returns one value for each number that processes have, in order."""
    return [value for _, value in sorted(dict(gather((number, value))).items())]


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


def gather(value: T) -> list[T]:
    """Returns the value of each process, in the order of the ranks. All processes must call this function."""
    return parallel.gather_objects(value)


def total(*counts: int) -> tuple[int, ...]:
    """Returns the sum of each number over all processes, without waiting for GPUs."""
    if world_size() == 1:
        return counts
    sums = torch.tensor(counts)
    dist.all_reduce(sums, group=control_group())
    return tuple(sums.tolist())


def total_of_data(*counts: int) -> tuple[int, ...]:
    """Returns the sum of each number over all parts of the data, which several processes may share."""
    copies = world_size() // data_ranks()
    return tuple(count // copies for count in total(*counts))


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
        count: number of trained tokens of the step, in all parts of the data.
    """
    return count if world_size() == 1 else torch.full((), count / data_ranks(), device=device)
