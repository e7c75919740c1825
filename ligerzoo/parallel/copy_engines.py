"""All-gathers and reduce-scatters of FSDP2 by the copy engines of the GPUs of one host.

NCCL's kernels hold multiprocessors while data is on its way. A matrix product that runs meanwhile has a thread block per
multiprocessor, and those that wait for NCCL's end make it take up to twice as long. Here the copy engines, which every
GPU has besides its multiprocessors, read and write the memory of the other GPUs (torch's symmetric memory; Rashidi et
al. 2021 describe the contention). Kernels remain for two things: the barriers, one thread block for microseconds, and
the sums of gradients.

    all-gather       each process copies its shard to its own buffer; all read the buffers of all
    reduce-scatter   each process writes a part of its gradients into the buffer of each; all average their own buffer

A buffer has a fixed size, and larger tensors pass through it in pieces. Gradients are added in fp32, or fp64 if they
have it, in the order of the ranks, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ligerzoo.parallel.processes import gather_objects

BUFFER_BYTES = 128 * 2**20
"""Size of the buffer of each collective; a multiple of the sizes of elements times the GPUs of a host."""
_TIMEOUT = timedelta(minutes=10)  # as NCCL's: a process that waits longer ends with an error


class PeerBuffers(Protocol):
    """A buffer of bytes in each process of a group, which all of them read and write.

    Attributes:
        rank: this process in the group.
        views: the buffers of all processes, by rank, as tensors of bytes.
    """

    rank: int
    views: Sequence[Tensor]

    def barrier(self) -> None:
        """Makes later work of the current stream wait until the streams of all processes are here."""


class SymmetricBuffers:
    """`PeerBuffers` in the memory of the GPUs of one host. All processes of the group must create it at once.

    Args:
        group: the processes.
        nbytes: size of each buffer.
        device: the GPU of this process.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(own, group)
        self.rank = self._handle.rank
        sizes = (nbytes,)
        self.views = [self._handle.get_buffer(rank, sizes, torch.uint8) for rank in range(self._handle.world_size)]

    def barrier(self) -> None:
        self._handle.barrier(timeout_ms=int(_TIMEOUT.total_seconds() * 1000))


class _Collective:
    """What both collectives share: the buffers, and outputs that torch allocates."""

    def __init__(self, buffers: PeerBuffers) -> None:
        self._buffers = buffers

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def _others(self) -> Iterator[int]:
        """Yields the other ranks, in another order in each process, so that no two read from one at once."""
        count, rank = len(self._buffers.views), self._buffers.rank
        yield from ((rank + step) % count for step in range(1, count))


class CopyEngineAllGather(_Collective):
    """Gathers by reading from the buffers of all processes; for `FSDPModule.set_custom_all_gather`."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Fills `output_tensor`, (P n,), with the `input_tensor`, (n,), of all P processes, on the current stream."""
        buffers = [view.view(input_tensor.dtype) for view in self._buffers.views]
        rank, outputs = self._buffers.rank, output_tensor.view(len(buffers), -1)
        if outputs[rank].data_ptr() != input_tensor.data_ptr():
            outputs[rank].copy_(input_tensor)
        for start in range(0, len(input_tensor), len(buffers[rank])):
            piece = input_tensor[start : start + len(buffers[rank])]
            buffers[rank][: len(piece)].copy_(piece)
            self._buffers.barrier()
            for other in self._others():
                outputs[other, start : start + len(piece)].copy_(buffers[other][: len(piece)])
            self._buffers.barrier()


class CopyEngineReduceScatter(_Collective):
    """Averages or adds what all processes have written to the own buffer; for `set_custom_reduce_scatter`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:  # fmt: skip
        """Fills `output_tensor`, (n,), with part r of the reduced `input_tensor`, (P n,), in the process of rank r."""
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):  # a factor of `set_gradient_divide_factor`
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
            return
        rank, count = self._buffers.rank, len(self._buffers.views)
        inputs = input_tensor.view(count, -1)
        size = self._buffers.views[rank].nbytes // count // input_tensor.element_size()  # elements from each process
        buffers = [view.view(input_tensor.dtype)[: count * size].view(count, size) for view in self._buffers.views]
        for start in range(0, len(output_tensor), size):
            piece = slice(start, min(start + size, len(output_tensor)))
            length = piece.stop - piece.start
            self._buffers.barrier()  # all have reduced the last piece
            buffers[rank][rank, :length].copy_(inputs[rank, piece])
            for other in self._others():
                buffers[other][rank, :length].copy_(inputs[other, piece])
            self._buffers.barrier()
            received = buffers[rank][:, :length]
            reduced = torch.mean if op == dist.ReduceOp.AVG else torch.sum
            reduced(received, 0, out=output_tensor[piece])


def use_copy_engines(groups: Sequence[FSDPModule], mesh: DeviceMesh) -> bool:
    """Makes groups of FSDP2 communicate by copy engines, if their processes are GPUs of one host that can.

    All processes must call it.

    Args:
        groups: modules that `fully_shard` has sharded, of one model: their collectives run one after the other.
        mesh: the mesh that they are sharded over; the last dimension, if there are two.

    Returns:
        Whether they do; else they use the backend of the process group.
    """
    group = mesh.get_group(mesh.ndim - 1)
    if mesh.device_type != "cuda" or group.size() == 1 or not _reach_each_other(group):
        return False
    device = torch.device("cuda", torch.cuda.current_device())
    all_gather = CopyEngineAllGather(SymmetricBuffers(group, BUFFER_BYTES, device))
    reduce_scatter = CopyEngineReduceScatter(SymmetricBuffers(group, BUFFER_BYTES, device))
    for module in groups:
        module.set_custom_all_gather(all_gather)  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
    return True


def _reach_each_other(group: dist.ProcessGroup) -> bool:
    """Whether in all processes the GPU reads and writes the memory of all others of its group."""
    own = torch.cuda.current_device()
    everywhere = gather_objects((Path("/proc/sys/kernel/random/boot_id").read_text(), own))
    hosts, gpus = zip(*(everywhere[rank] for rank in dist.get_process_group_ranks(group)), strict=True)
    is_one_host = len(set(hosts)) == 1 and len(set(gpus)) == len(gpus)
    return all(gather_objects(is_one_host and all(torch.cuda.can_device_access_peer(own, gpu) for gpu in {*gpus} - {own})))
