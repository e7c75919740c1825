"""Fingerprints of states: equal for equal bits, different for a value that was changed, lost or moved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes, the dtype whose values are the bits of an element."""

_CHUNK, _CHUNK_ON_GPU = 2**18, 2**22
"""Elements that are read at once, as int64: on a CPU what its cache holds."""


def fingerprint(state: object) -> str:
    """Returns the fingerprint of nested mappings and lists of tensors, numbers and texts. Waits for the GPU once.

    Devices and the order of mappings have no influence. Of a sharded tensor, the shard of this process counts.
    """
    digest, checksums = hashlib.blake2b(digest_size=16), []
    for path, leaf in _leaves(state, ""):
        if isinstance(leaf, Tensor):
            checksums.append(_checksum(leaf))
            leaf = f"{leaf.dtype}{tuple(leaf.shape)}"
        digest.update(f"{path}={leaf!r}\n".encode())
    if checksums:
        home = checksums[-1].device
        digest.update(str(torch.stack([one.to(home) for one in checksums]).tolist()).encode())
    return digest.hexdigest()


def _leaves(state: object, path: str) -> Iterator[tuple[str, object]]:
    match state:
        case Mapping():
            entries = sorted((repr(key), value) for key, value in state.items())
        case list() | tuple():
            entries = [(str(index), value) for index, value in enumerate(state)]
        case object(__tensor_flatten__=flatten):  # a sharded or quantized tensor
            entries = [(name, getattr(state, name)) for name in flatten()[0]]
        case _:
            yield path, state
            return
    yield path, f"{len(entries)} entries"
    for name, value in entries:
        yield from _leaves(value, f"{path}/{name}")


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    """Returns a number, 0-d int64 on the tensor's device, that depends on all bits and their order."""
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    size = _CHUNK if bits.device.type == "cpu" else _CHUNK_ON_GPU
    weights = torch.arange(1, 1 + min(size, len(bits)), device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(size):  # type: ignore[no-untyped-call]
        total = total * 1_000_003 + (chunk * weights[: len(chunk)]).sum()
    return total
