"""Saves and loads tensors that may be DTensors, such as averaged weights, in a directory of safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ligerzoo.convert.tensor_slices import TensorSlice, within
from ligerzoo.errors import CheckpointError, first_names
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.files.checkpoint_writer import write_checkpoint
from ligerzoo.hub.sharding import full, is_sharded, largest_mesh, shard_of, write_gathered


def save_tensors(tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Writes tensors to a directory, which is replaced in one step.

    If some are DTensors, all processes must call it. The main process writes; one tensor at a time is whole.

    Args:
        tensors: by name; equal in all processes unless they are DTensors.
        directory: created if it does not exist.

    Raises:
        CheckpointError: The directory cannot be written.
    """
    if is_sharded(tensors):
        gathered = _Gathered(tensors)
        write_gathered(directory, gathered, {}, meta=gathered.meta, mesh=largest_mesh(tensors.values()))
    else:
        write_checkpoint(directory, tensors, {})


@torch.no_grad()
def load_tensors(tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Copies what `save_tensors` wrote into tensors of the same names. Each process reads its part.

    Args:
        tensors: by name; sharded over any number of processes, or not sharded.
        directory: as written by `save_tensors`.

    Raises:
        CheckpointError: Files are missing or damaged, or a name or shape differs.
    """
    with Checkpoint(directory) as checkpoint:
        stored = {name: info.shape for name, info in checkpoint.tensors.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if different := sorted(name for name in {**stored, **expected} if stored.get(name) != expected.get(name)):
            what = "the stored tensors have other names or shapes"
            remedy = "Load them with the options with which they were saved."
            raise CheckpointError(what, where=directory, got=first_names(different, 3), remedy=remedy)
        for name, tensor in tensors.items():
            box = shard_of(tensor)
            part = within(TensorSlice(name, expected[name], name), box)
            if part is not None:
                own = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
                own.copy_(checkpoint.read(name)[part.stored_index])


class _Gathered(Mapping[str, Tensor]):
    """Tensors, of which DTensors are gathered at each access, by all processes in the same order."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.meta = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return full(self._tensors[name]).detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
