"""Copies of tensors on the host, from which a thread saves while the training changes the tensors themselves."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ligerzoo.dtensors import local, with_local

_ALIGNED = 64


class HostCopies:
    """Memory for copies of a run's tensors, as much as this process's shards: allocated once, pinned for a GPU."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._buffer = _Buffer(0, pinned=False)

    def fits(self, tensors: Iterable[Tensor], processes_of_host: int) -> bool:
        """Returns whether the host has memory for the copies of all its processes, or has allocated it already."""
        needed = sum(own.nbytes for own in _shards(tensors).values())
        return bool(self._copies) or needed * processes_of_host < 0.9 * available_memory()

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies by name, which share memory where the tensors do, and overwrites those of an earlier call.

        Waits until a GPU has copied them.
        """
        shards = _shards(tensors.values())
        if list(map(_layout, self._copies)) != list(map(_layout, shards.values())):
            self._allocate(list(shards.values()))
        copies = dict(zip(shards, self._copies, strict=True))
        for key, own in shards.items():
            copies[key].copy_(own, non_blocking=True)
        for device in {own.device for own in shards.values() if own.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: with_local(tensor, copies[_key(tensor)]) for name, tensor in tensors.items()}

    def _allocate(self, tensors: Sequence[Tensor]) -> None:
        """Replaces the memory by contiguous memory of the shapes and dtypes of tensors."""
        self._copies, self._buffer = [], _Buffer(0, pinned=False)  # frees the memory first
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
        self._buffer = _Buffer(sum(sizes), pinned=any(tensor.is_cuda for tensor in tensors))
        parts = torch.split(self._buffer.memory, sizes)
        for tensor, part in zip(tensors, parts, strict=True):
            self._copies.append(part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))


class _Buffer:
    """Bytes on the host, pinned on request.

    They are allocated and then pinned: `pin_memory=True` takes 0.5 s per GiB, this 0.13 s, on the host of an H100.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8)
        if pinned and size > 0:
            self.memory.zero_()  # by several threads: the system provides the pages
            runtime, address = torch.cuda.cudart(), self.memory.data_ptr()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))
            weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False


def available_memory() -> float:
    """Returns the bytes of the host that can be allocated; infinity where the system does not say."""
    table = Path("/proc/meminfo")
    lines = table.read_text().splitlines() if table.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else math.inf


def _shards(tensors: Iterable[Tensor]) -> dict[tuple[object, ...], Tensor]:
    """Returns this process's shards of tensors, those with the same memory once."""
    return {_key(tensor): local(tensor).detach() for tensor in tensors}


def _key(tensor: Tensor) -> tuple[object, ...]:
    own = local(tensor)
    return own.data_ptr(), own.device, own.dtype, own.shape, own.stride()


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape
