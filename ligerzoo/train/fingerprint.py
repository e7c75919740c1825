"""Fingerprints of states: equal for equal bits, different for a value that was changed, lost or moved."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ligerzoo.dtensors import is_dtensor, is_sharded, local, shard_of
from ligerzoo.parallel.processes import default_mesh, gather_objects

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes, the dtype whose values are the bits of an element."""

_CHUNK = 2**18
"""Elements with increasing weights in the checksum of a tensor, as int64: what the cache of a CPU holds."""
_AT_ONCE_ON_GPU = 2**22
_FACTOR = 1_000_003
"""What the weights of a chunk are multiplied by for each chunk that follows."""


def fingerprint(state: object) -> str:
    """Returns the fingerprint of nested mappings and lists of tensors, numbers and texts. Waits for the GPU once.

    Devices, the order of mappings and the processes that share a tensor have no influence. If there are DTensors, all
    processes must call it.
    """
    return _fingerprint(_leaves(state, ""))


def fingerprint_of_shards(state: object, *, as_on_gpu: bool = False) -> str:
    """Returns the fingerprint of what this process holds, as checkpoints of earlier versions have it.

    Args:
        as_on_gpu: whether tensors on the CPU were on a GPU, where the fingerprint was another one.
    """
    sizes = {"cpu": _AT_ONCE_ON_GPU if as_on_gpu else _CHUNK}
    mesh = repr(default_mesh()) if dist.is_initialized() else ""
    leaves = _leaves(state, "", _Repr(mesh))
    return _fingerprint(leaves, lambda device: sizes.get(device.type, _AT_ONCE_ON_GPU))


def _fingerprint(
    leaves: Iterator[tuple[str, object]], size_on: Callable[[torch.device], int] = lambda device: _CHUNK
) -> str:
    digest, tensors = hashlib.blake2b(digest_size=16), []
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            leaf = f"{leaf.dtype}{tuple(leaf.shape)}"
        digest.update(f"{path}={leaf!r}\n".encode())
    if tensors:
        digest.update(str(_checksums(tensors, size_on)).encode())
    return digest.hexdigest()


@dataclass(frozen=True, repr=False)
class _Repr:
    """Something with a given `repr`."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _leaves(state: object, path: str, mesh: _Repr | None = None) -> Iterator[tuple[str, object]]:
    """Yields the tensors and values of a state with their paths; of DTensors the shards, if `mesh` is given."""
    match state:
        case Mapping():
            entries = sorted((repr(key), value) for key, value in state.items())
        case list() | tuple():
            entries = [(str(index), value) for index, value in enumerate(state)]
        case Tensor() if mesh is None and is_dtensor(state):
            yield path, state
            return
        case object(__tensor_flatten__=flatten):  # a quantized tensor
            replaced = {"device_mesh": mesh} if mesh else {}  # a run had one mesh of all processes, without names
            entries = [(name, replaced.get(name, getattr(state, name))) for name in flatten()[0]]
        case _:
            yield path, state
            return
    yield path, f"{len(entries)} entries"
    for name, value in entries:
        yield from _leaves(value, f"{path}/{name}", mesh)


def _checksums(tensors: Sequence[Tensor], size_on: Callable[[torch.device], int]) -> list[int]:
    """Returns a number for each tensor that depends on all bits and their order: sums of bits by weights, in int64.

    So the sum of a tensor is that of its shards, each of which counts once.
    """
    sums = [
        _weighted_shard(tensor) if is_dtensor(tensor) else _weighted_sum(tensor, size_on(tensor.device))
        for tensor in tensors
    ]
    own = torch.stack([one.to(sums[-1].device) for one in sums]).tolist()
    if not is_sharded(tensors):
        return own
    boxes = [shard_of(tensor) for tensor in tensors]
    shards = gather_objects([((box.offset, box.shape), value) for box, value in zip(boxes, own, strict=True)])
    return [_signed(sum(dict(parts).values())) for parts in zip(*shards, strict=True)]


@torch.no_grad()
def _weighted_sum(tensor: Tensor, size: int) -> Tensor:
    """Returns the sum of the bits x of a whole tensor, sum of x_i (i mod size + 1) f^(chunks after that of i), 0-d."""
    bits = _bits(tensor)
    at_once = size if bits.device.type == "cpu" else _AT_ONCE_ON_GPU
    weights = torch.arange(1, 1 + min(size, len(bits)), device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for several in bits.split(at_once):  # type: ignore[no-untyped-call]
        full = len(several) // size * size
        sums = (several[:full].view(-1, size) * weights).sum(1) if full else several.new_empty(0, dtype=torch.int64)
        if full < len(several):
            rest = several[full:]
            sums = torch.cat([sums, (rest * weights[: len(rest)]).sum(0, keepdim=True)])
        factors = torch.tensor(_factors(len(sums)), dtype=torch.int64, device=bits.device)
        total = total * _signed(_FACTOR ** len(sums)) + (sums * factors).sum()
    return total


@torch.no_grad()
def _weighted_shard(tensor: Tensor) -> Tensor:
    """Returns the part of the weighted sum of a DTensor that this process's shard has, 0-d."""
    bits, box, shape = _bits(local(tensor)), shard_of(tensor), tuple(tensor.shape)
    total, first = torch.zeros((), dtype=torch.int64, device=bits.device), 0
    if not len(bits):
        return total
    factors = torch.tensor(_factors(-(-prod(shape) // _CHUNK)), device=bits.device)
    for several in bits.split(_CHUNK if bits.device.type == "cpu" else _AT_ONCE_ON_GPU):  # type: ignore[no-untyped-call]
        position = torch.arange(first, first := first + len(several), device=bits.device)
        index, stride = torch.zeros_like(position), 1
        for offset, own, size in zip(*map(reversed, (box.offset, box.shape, shape)), strict=True):
            index += (position % own + offset) * stride
            position, stride = position // own, stride * size
        total += (several * (index % _CHUNK + 1) * factors[index // _CHUNK]).sum()
    return total


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])


def _factors(count: int) -> list[int]:
    """Returns f^(count - 1), ..., f, 1."""
    factors = [1]
    for _ in range(count - 1):
        factors.append(_signed(factors[-1] * _FACTOR))
    return factors[::-1] if count else []


def _signed(value: int) -> int:
    """Returns a number modulo 2^64 as an int64."""
    return (value + 2**63) % 2**64 - 2**63
