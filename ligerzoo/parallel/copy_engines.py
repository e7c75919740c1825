"""All-gathers and reduce-scatters of FSDP2 by the copy engines of the GPUs of one host.

NCCL's kernels hold multiprocessors while data is on its way, and a matrix product that starts meanwhile waits for them:
most have a thread block for each multiprocessor. Here the copy engines, which are separate hardware, read and write the
memory of the other GPUs (torch's symmetric memory), and processes wait for each other in the hardware queues of their
streams. Kernels remain for the sums of gradients.

    all-gather       each process copies its shard to its own buffer; all read the buffers of all
    reduce-scatter   each process writes a part of its gradients into the buffer of each; all add up their own buffer

A buffer has a fixed size, and larger tensors pass through it in pieces. Gradients travel in their own dtype, are added
in fp32 in the order of the ranks, and are rounded once. That is exact like a reduction in fp32, with half the traffic
for bf16.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.add_parts import add_parts
from ligerzoo.parallel.processes import gather_objects

BUFFER_BYTES = 128 * 2**20
"""Size of the buffer of each collective."""
_WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ; the difference of both numbers may wrap around


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

    A barrier needs no multiprocessor: the stream writes the number of the barrier into the memory of all others, and
    waits until they have written it into its own (stream memory operations of the CUDA driver). It has no time limit;
    if a process stops, those of NCCL, which each training step uses too, end the others.

    Args:
        group: the processes.
        nbytes: size of each buffer, a multiple of 8.
        device: the GPU of this process.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        size = nbytes + 8 * group.size()
        # `symmetric_memory.empty` may return memory that was used before in this process only: rendezvous would hang.
        own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        own[nbytes:] = 0
        torch.cuda.synchronize(device)
        handle = symmetric_memory.rendezvous(own, group)  # waits for all processes
        self.rank = handle.rank
        self.views: Sequence[Tensor] = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
        self._handle, self._own = handle, own  # whoever drops them unmaps the memory
        self._signals = [view.data_ptr() + nbytes for view in self.views]  # a number from each process
        self._barriers = 0
        self._driver = ctypes.CDLL("libcuda.so.1")

    def barrier(self) -> None:
        if torch.cuda.is_current_stream_capturing():  # each replay would write the same number, and wait for nothing
            what = "copy engines cannot be captured in a CUDA graph"
            raise LigerzooError(what, where="barrier between GPUs", remedy="Shard with copy_engines=False.")
        self._barriers = (self._barriers + 1) % 2**32
        others = [rank for rank in range(len(self.views)) if rank != self.rank]
        for other in others:
            self._enqueue("cuStreamWriteValue32_v2", self._signals[other] + 8 * self.rank)
        for other in others:
            self._enqueue("cuStreamWaitValue32_v2", self._signals[self.rank] + 8 * other)

    def _enqueue(self, operation: str, address: int) -> None:
        """Enqueues a memory operation with the number of the barrier on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        number, flags = ctypes.c_uint32(self._barriers), ctypes.c_uint(_WAIT_UNTIL_AT_LEAST)
        if error := getattr(self._driver, operation)(stream, ctypes.c_uint64(address), number, flags):
            raise RuntimeError(f"{operation}: error {error} of the CUDA driver")


class _Collective:
    """What both collectives share.

    Args:
        buffers: through which they communicate; both need their own, since they run at once.
    """

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

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> None:
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
    """Adds what all processes have written to the own buffer; for `FSDPModule.set_custom_reduce_scatter`.

    FSDP2 allocates an input, to which it copies the gradients of a group, and then an output, both in the dtype to
    reduce in. Here they have the dtypes of what is copied to them and from them.

    Args:
        buffers: see `_Collective`.
        input_dtype: dtype of the gradients of this process; None for the one that FSDP2 asks for.
        output_dtype: dtype of the reduced gradients; None for the one that FSDP2 asks for.
    """

    def __init__(
        self, buffers: PeerBuffers, input_dtype: torch.dtype | None = None, output_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(buffers)
        self.input_dtype, self.output_dtype = input_dtype, output_dtype
        self._input_length: int | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        length = math.prod(size)
        is_output = length * len(self._buffers.views) == self._input_length  # else an input, also after an error
        self._input_length = None if is_output else length
        own_dtype = self.output_dtype if is_output else self.input_dtype
        return torch.empty(size, dtype=own_dtype or dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        """Fills `output_tensor`, (n,), with part r of the reduced `input_tensor`, (P n,), in the process of rank r."""
        rank, count = self._buffers.rank, len(self._buffers.views)
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            what, remedy = "cannot be computed by copy engines", "Shard with copy_engines=False."
            raise LigerzooError(what, where="reduction of gradients", got=op, expected="AVG or SUM", remedy=remedy)
        inputs = input_tensor.view(count, -1)
        size = self._buffers.views[rank].nbytes // count // 8 * 8 // input_tensor.element_size()
        buffers = [view.view(input_tensor.dtype)[: count * size].view(count, size) for view in self._buffers.views]
        for start in range(0, len(output_tensor), size):
            piece = slice(start, min(start + size, len(output_tensor)))
            length = piece.stop - piece.start
            self._buffers.barrier()  # all have added up the last piece
            buffers[rank][rank, :length].copy_(inputs[rank, piece])
            for other in self._others():
                buffers[other][rank, :length].copy_(inputs[other, piece])
            self._buffers.barrier()
            add_parts(buffers[rank][:, :length], output_tensor[piece], 1 / count if op == dist.ReduceOp.AVG else 1.0)


def use_copy_engines(
    groups: Mapping[FSDPModule, torch.dtype | None], mesh: DeviceMesh, param_dtype: torch.dtype | None
) -> tuple[CopyEngineReduceScatter, ...]:
    """Makes groups of FSDP2 communicate by copy engines, if their processes have GPUs of one host that can.

    All processes must call it.

    Args:
        groups: modules that `fully_shard` has sharded, of one model: each collective waits for the one before. With the
            dtypes of their trainable parameters; None without any.
        mesh: the mesh that they are sharded over, by its last dimension.
        param_dtype: dtype of the computation, if it is not that of the parameters.

    Returns:
        The reductions of the groups; none if they use the backend of the process group instead.
    """
    group = mesh.get_group(mesh.ndim - 1)
    if mesh.device_type != "cuda" or group.size() == 1 or not _reach_each_other(group):
        return ()
    device = torch.device("cuda", torch.cuda.current_device())
    gathering, reducing = (SymmetricBuffers(group, BUFFER_BYTES, device) for _ in range(2))
    all_gather, reductions = CopyEngineAllGather(gathering), []
    for module, dtype in groups.items():
        output_dtype = dtype if mesh.ndim == 1 else None  # replicas still add theirs
        reductions.append(CopyEngineReduceScatter(reducing, param_dtype or dtype, output_dtype))
        module.set_custom_all_gather(all_gather)  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(reductions[-1])  # type: ignore[arg-type]
    return tuple(reductions)


def _reach_each_other(group: dist.ProcessGroup) -> bool:
    """Whether in all processes the GPU reads and writes the memory of all others of its group."""
    own = torch.cuda.current_device()
    everywhere = gather_objects((Path("/proc/sys/kernel/random/boot_id").read_text(), own))
    hosts, gpus = zip(*(everywhere[rank] for rank in dist.get_process_group_ranks(group)), strict=True)
    is_one_host = len(set(hosts)) == 1 and len(set(gpus)) == len(gpus)
    return all(
        gather_objects(is_one_host and all(torch.cuda.can_device_access_peer(own, gpu) for gpu in {*gpus} - {own}))
    )
