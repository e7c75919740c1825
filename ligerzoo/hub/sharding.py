"""Saves parameters that are DTensors, as those of FSDP2 and tensor parallel models, gathered one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ligerzoo.convert.stored_tensors import ComputedTensors
from ligerzoo.dtensors import background_group, full, largest_mesh
from ligerzoo.errors import CheckpointError
from ligerzoo.files.checkpoint_writer import write_checkpoint, writing_order

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class GatheredTensors(ComputedTensors):
    """Stored tensors of a model with DTensors, each of which is gathered when it is accessed."""

    def compute(self, name: str) -> Tensor:
        return full(self._tensors[name])

    @property
    def mesh(self) -> DeviceMesh:
        """The largest mesh of a parameter."""
        return largest_mesh(self._tensors.values())


def write_gathered(
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, str | bytes],
    *,
    meta: Mapping[str, Tensor],
    mesh: DeviceMesh,
    folders: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
    is_main_process: bool | None = None,
) -> None:
    """Writes tensors that all ranks gather, as `write_checkpoint`. One tensor at a time is whole, on every rank.

    Returns when the main process has finished.

    Args:
        directory: as in `write_checkpoint`.
        tensors: gathers a tensor at each access, by all ranks of the mesh.
        files: as in `write_checkpoint`.
        meta: as in `write_checkpoint`.
        mesh: the ranks.
        folders: as in `write_checkpoint`.
        max_shard_size: as in `write_checkpoint`.
        is_main_process: whether this process writes the files. None means the lowest rank of the mesh.

    Raises:
        CheckpointError: As `write_checkpoint`; or, in the other processes, the main process failed.
    """
    import torch.distributed as dist

    if is_main_process is None:
        is_main_process = dist.get_rank() == (0 if background_group.get() else int(mesh.mesh.min()))
    remaining = writing_order(meta, max_shard_size, folders)
    failure: BaseException | None = None
    if is_main_process:
        try:
            stream = _Stream(tensors, remaining)
            write_checkpoint(directory, stream, files, max_shard_size=max_shard_size, meta=meta, folders=folders)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            failure = error
    for name in remaining:  # the other processes, and the main process after a failure
        tensors[name]
    if failure is not None:
        _any_rank(True, mesh)
        raise failure
    if _any_rank(False, mesh):
        raise CheckpointError("the main process could not save", where=directory, remedy="Its error says why.")


class _Stream(Mapping[str, Tensor]):
    """Accesses tensors in a given order, and removes their names from the list as they are accessed."""

    def __init__(self, tensors: Mapping[str, Tensor], remaining: list[str]) -> None:
        self._tensors, self._remaining = tensors, remaining

    def __getitem__(self, name: str) -> Tensor:
        assert name == self._remaining[0]
        del self._remaining[0]
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _any_rank(flag: bool, mesh: DeviceMesh) -> bool:
    """Returns whether the flag is True on a rank of the mesh."""
    import torch.distributed as dist

    if (group := background_group.get()) is not None:
        value = torch.tensor(int(flag))
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
        return bool(value)
    value = torch.tensor(int(flag), device=mesh.device_type)
    for dimension in range(mesh.ndim):
        dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return bool(value)
