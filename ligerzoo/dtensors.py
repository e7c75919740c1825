"""Parameters that are DTensors, as those of FSDP2 and tensor parallel models: their shards, gathered and placed.

All ranks must call `full` and `shard_like` with the same parameters in the same order, because they may communicate.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


background_group: ContextVar[Any] = ContextVar("background_group", default=None)
"""The gloo group of a thread that saves copies of tensors behind the training; None in other threads."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box of elements of a tensor, such as the shard that one process holds.

    Attributes:
        offset: index of its first element in each dimension.
        shape: its size in each dimension.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in the tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.offset, self.shape, strict=True))


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Returns whether a tensor is a DTensor, without the import of torch.distributed, which takes a second."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_divided(tensor: Tensor) -> bool:
    """Returns whether a tensor is a part with which its layer computes: a DTensor over an axis of layers alone."""
    return is_dtensor(tensor) and tensor.device_mesh.mesh_dim_names in (("tensor",), ("expert",))


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Returns whether a tensor is a DTensor."""
    return any(map(is_dtensor, tensors))


def largest_mesh(tensors: Iterable[Tensor]) -> DeviceMesh:
    """Returns the largest mesh of the DTensors among some tensors."""
    return max((tensor.device_mesh for tensor in tensors if is_dtensor(tensor)), key=lambda mesh: mesh.size())


def local(tensor: Tensor) -> Tensor:
    """Returns this process's shard of a DTensor, and other tensors unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Returns all of a tensor: gathers a DTensor, on the device of its mesh.

    In a thread with a `background_group`, the main process gathers it, on the CPU; others return a meta tensor.
    """
    if not is_dtensor(tensor):
        return tensor
    if (group := background_group.get()) is not None:
        return _full_in_main_process(tensor, group)
    on_mesh: Any = tensor.detach().to(tensor.device_mesh.device_type)  # the shards may be offloaded to the CPU
    gathered: Tensor = on_mesh.full_tensor()
    return gathered


def _full_in_main_process(tensor: DTensor, group: Any) -> Tensor:
    """Sends shards to the main process, by their offset and shape, and replicas of them once."""
    import torch.distributed as dist

    own, box, empty = local(tensor).detach().contiguous(), shard_of(tensor), torch.empty(0, dtype=torch.uint8)
    coordinates = zip(tensor.device_mesh.get_coordinate() or [], tensor.placements, strict=True)
    is_replica = any(coordinate for coordinate, placement in coordinates if placement.is_replicate())
    if dist.get_rank() > 0:
        dist.send(torch.tensor([not is_replica and own.numel() > 0, *box.offset, *box.shape]), 0, group)
        if not is_replica and own.numel():
            dist.send(own.flatten().view(torch.uint8), 0, group)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    whole[box.slices] = own
    for rank in range(1, dist.get_world_size()):
        header = torch.empty(1 + 2 * tensor.ndim, dtype=torch.int64)
        dist.recv(header, rank, group)
        sends, *numbers = header.tolist()
        if sends:
            other = Box(tuple(numbers[: tensor.ndim]), tuple(numbers[tensor.ndim :]))
            part = empty.new_empty(math.prod(other.shape) * tensor.element_size())
            dist.recv(part, rank, group)
            whole[other.slices] = part.view(tensor.dtype).view(other.shape)
    return whole


def with_local(tensor: Tensor, own: Tensor) -> Tensor:
    """Returns a DTensor with the mesh and the placements of another one, and a shard that may be on another device.

    Of other tensors, returns `own`.
    """
    if not is_dtensor(tensor):
        return own
    dtensor: Any = type(tensor)
    copied: Tensor = dtensor(own, tensor._spec, requires_grad=False)
    return copied


def shard_of(parameter: Tensor) -> Box:
    """Returns which elements of a parameter this rank holds: all of them unless it is a DTensor."""
    if not is_dtensor(parameter):
        return Box((0,) * parameter.ndim, tuple(parameter.shape))
    return shard_at(parameter.shape, parameter.device_mesh, parameter.placements)


def shard_at(shape: Iterable[int], mesh: DeviceMesh, placements: tuple[Any, ...]) -> Box:
    """Returns which elements of a DTensor this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return Box(tuple(offset), tuple(sizes))


def as_shard_of(parameter: Tensor, local: Tensor) -> Tensor:
    """Returns a DTensor like the parameter with this rank's elements; `local` itself unless it is a DTensor."""
    if not is_dtensor(parameter):
        return local
    placed, layout = (parameter.device_mesh, parameter.placements), (parameter.shape, parameter.stride())
    return type(parameter).from_local(local, *placed, run_check=False, shape=layout[0], stride=layout[1])


def shard_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Returns a DTensor like the parameter with this rank's elements of `whole`; `whole` unless it is a DTensor."""
    if not is_dtensor(parameter):
        return whole
    box = shard_of(parameter)
    own = whole.detach()[box.slices]
    device_type = parameter.device_mesh.device_type
    return as_shard_of(parameter, own.to(device_type, memory_format=torch.contiguous_format))
