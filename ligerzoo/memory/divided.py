"""A model on meta as one process of a mesh has it, without other processes.

The process group is a fake one of torch.distributed, in which this process is alone, and the model is divided over it
by the code that divides it in training. So layers, also new ones, are predicted as they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from ligerzoo.errors import ConfigError
from ligerzoo.memory.simulation import on_meta
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.models.causal_lm import CausalLM


class DividedModel(NamedTuple):
    """A model as one process has it.

    Attributes:
        model: on meta.
        axes: the axis of each process group, by its name.
    """

    model: CausalLM
    axes: Mapping[str, str]


@contextmanager
def divided(model: CausalLM, sizes: MeshSizes) -> Iterator[DividedModel]:
    """Within this context, a copy of the model is divided over the axes `context`, `tensor` and `expert`.

    Args:
        model: on meta.
        sizes: of the axes of the mesh.

    Raises:
        ConfigError: A layer cannot be divided, or this process has a process group.
        LigerzooError: A layer cannot be divided.
    """
    copy = on_meta(model)
    if sizes.context == sizes.tensor == sizes.expert == 1:
        yield DividedModel(copy, {})
        return
    import torch.distributed as dist

    if dist.is_initialized():
        remedy = "Predict before start_processes, or in another process."
        raise ConfigError("a mesh cannot be predicted in a process of a process group", where="mesh", remedy=remedy)
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # which keeps meshes of other groups
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    from ligerzoo.parallel.mesh import divide_layers, expert_mesh, make_mesh

    shard = 2 * sizes.expert // math.gcd(sizes.expert, sizes.context)  # no axis has all: it would share their group
    smallest = replace(sizes, replicate=1, shard=shard)
    count = shard * sizes.context * sizes.tensor
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    try:
        mesh = make_mesh(smallest, "cpu")
        divide_layers(copy, mesh)
        axes = {str(mesh[axis].get_group().group_name): axis for axis in ("context", "tensor")}
        if (experts := expert_mesh(mesh)) is not None:
            axes[str(experts["expert"].get_group().group_name)] = "expert"
        yield DividedModel(copy, axes)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
