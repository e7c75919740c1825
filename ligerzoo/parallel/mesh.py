"""One mesh of all processes, and a model over it.

The dimensions of the mesh, from the outermost to the innermost, are `replicate`, `shard`, `context` and `tensor`, see
`MeshSizes`. Neighbours in `tensor` are neighbours on a host, which communicate most.

    axis        a process has                    communicates
    replicate   all shards of another copy       sums of gradients, once a step
    shard       a part of all weights, FSDP2     weights of each block before it runs, sums of gradients
    context     a part of every row              heads of attention
    tensor      a part of every layer, and of    tokens, and sums of the outputs of attention and MLPs
                the tokens between them
    expert      some of the experts              tokens of the experts
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ligerzoo.mesh_sizes import MeshSizes as MeshSizes
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.parallel.context_parallel import check_exchanged_heads, context_parallel
from ligerzoo.parallel.fsdp import shard_model
from ligerzoo.parallel.processes import default_device_type
from ligerzoo.parallel.tensor import check_divisible, divide, divide_experts

Model = TypeVar("Model", bound=LanguageModel)

AXES = ("replicate", "shard", "context", "tensor")
EXPERT_AXES = ("replicate", "expert_shard", "expert")


def make_mesh(sizes: MeshSizes | str = "", device_type: str | None = None) -> DeviceMesh:
    """Returns the mesh of all processes, with the dimensions "replicate", "shard", "context" and "tensor".

    Args:
        sizes: sizes of its axes, also as text such as "replicate=2 shard=4".
        device_type: "cuda" or "cpu". Default: "cuda" if the process group uses NCCL.

    Raises:
        ConfigError: The process group is missing, or the sizes do not fit the number of processes.
    """
    device_type = device_type or default_device_type()
    sizes = MeshSizes.parse(str(sizes)).over(dist.get_world_size())
    mesh = init_device_mesh(device_type, tuple(getattr(sizes, axis) for axis in AXES), mesh_dim_names=AXES)
    if sizes.expert > 1:
        group = sizes.expert * sizes.tensor
        shape = sizes.replicate, mesh.size() // (sizes.replicate * group), group
        mesh.of_experts = init_device_mesh(device_type, shape, mesh_dim_names=EXPERT_AXES)  # type: ignore[attr-defined]
    return mesh


def expert_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Returns the mesh of experts: "replicate", "expert_shard" and "expert"; None if they are not divided.

    The last two have the processes of "shard", "context" and "tensor".
    """
    return getattr(mesh, "of_experts", None)


def as_mesh(mesh: DeviceMesh | MeshSizes | str | None) -> DeviceMesh:
    """Returns the mesh of these sizes, or the given one."""
    return mesh if isinstance(mesh, DeviceMesh) else make_mesh(mesh or "")


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh over which FSDP2 shards, and over which it replicates if there are replicas.

    Processes that divide rows shard the weights, too.
    """
    if mesh.mesh_dim_names != AXES:
        return mesh
    name, sharded = "shard", mesh["shard"]
    if mesh["context"].size() > 1:
        name = "shard_context"
        sharded = mesh["shard", "context"]._flatten(name)
    return sharded if mesh["replicate"].size() == 1 else mesh["replicate", name]


def check_mesh(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Checks that a mesh of `make_mesh` can divide a model, which may be on the meta device.

    Raises:
        ConfigError: The processes along an axis cannot share the parts of a layer; the message names the layer.
        LigerzooError: As `context_parallel`.
    """
    context, tensor, experts = mesh["context"].size(), mesh["tensor"].size(), expert_mesh(mesh)
    if tensor > 1:
        check_divisible(model, "tensor", tensor, but_experts=experts is not None)
    if experts is not None:
        check_divisible(model, "expert", experts["expert"].size())
    check_exchanged_heads(model, context, tensor)


def parallelize(
    model: Model,
    mesh: DeviceMesh | MeshSizes | str | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    **options: Any,
) -> Model:
    """Distributes a model over a mesh, in place.

    Call it before the optimizer is created. Processes with the same coordinates in `replicate` and `shard` need equal
    samples.

    Args:
        model: a model of ligerzoo.models or a subclass, on any device, also meta; see `load_sharded`.
        mesh: see `make_mesh`; also one for `shard_model`. Default: shards over all processes.
        param_dtype: see `shard_model`, as for `options`.

    Raises:
        LigerzooError: As `shard_model` and `context_parallel`.
        ConfigError: As `make_mesh` and `check_mesh`.
    """
    mesh = as_mesh(mesh)
    if mesh.mesh_dim_names == AXES:
        divide_layers(model, mesh)
    return shard_model(model, fsdp_mesh(mesh), param_dtype=param_dtype, **options)


def divide_layers(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Divides the layers of a model over `tensor` and `expert`, and its tokens over `context`, in place.

    Raises:
        LigerzooError: As `check_mesh`.
    """
    check_mesh(model, mesh)
    experts = expert_mesh(mesh)
    if mesh["tensor"].size() > 1:
        divide(model, mesh["tensor"], but_experts=experts is not None)
    if experts is not None:
        has_replicas = mesh["replicate"].size() > 1
        shards = experts["replicate", "expert_shard"] if has_replicas else experts["expert_shard"]
        divide_experts(model, experts["expert"], shards, mesh["tensor"].get_group())
    context_parallel(model, mesh["context"].get_group())
