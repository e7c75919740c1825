"""What FSDP2 holds and sends in a training step, see `ligerzoo.parallel.fsdp`.

A group of parameters is gathered before it runs, and its gradients are summed and scattered when its backward has run.
All sizes are those of one GPU, after tensor and expert parallelism have divided the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ligerzoo.dtensors import is_dtensor, local
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.models.causal_lm import CausalLM

REDUCED_BYTES = 4
"""Bytes of a number in the sums of gradients by NCCL, fp32."""


@dataclass(frozen=True, kw_only=True)
class ShardingGroup:
    """Parameters that FSDP2 gathers together.

    Attributes:
        nbytes: of the whole parameters, padded so that all processes have equal parts.
        trained: bytes of those that train.
        numbers: numbers of those that train.
        count: processes that share them.
        gathers: how often they are gathered in a step, in forward and in backward.
        of_experts: whether they are experts that are divided over processes.
    """

    nbytes: int
    trained: int
    numbers: int
    count: int
    gathers: int
    of_experts: bool = False


@dataclass(frozen=True)
class Sharding:
    """The groups of a model on a mesh, in the order of the forward.

    Attributes:
        ends: the groups of embedding, head and the rest; all in one if embedding and head share their weight.
        blocks: those of the decoder's blocks, and of their divided experts.
    """

    ends: tuple[ShardingGroup, ...]
    blocks: tuple[tuple[ShardingGroup, ...], ...]

    def __iter__(self) -> Iterator[ShardingGroup]:
        yield from self.ends
        for groups in self.blocks:
            yield from groups


def shared_by(sizes: MeshSizes) -> tuple[int, int]:
    """Returns the processes that share the weights of a model, and those that share divided experts."""
    weights = (sizes.shard or 1) * sizes.context
    return weights, weights // sizes.expert


def divided_experts(model: nn.Module) -> set[Tensor]:
    """Returns the parameters of experts that are divided over processes with other tokens."""
    return {one for one in model.parameters() if is_dtensor(one) and one.device_mesh.mesh_dim_names == ("expert",)}


def sharding_of(model: CausalLM, sizes: MeshSizes, keeps_gathered: bool = False) -> Sharding:
    """Returns the groups that `ligerzoo.parallel.shard_model` makes.

    Args:
        model: on meta, divided as on the mesh.
        sizes: of the axes of the mesh.
        keeps_gathered: whether the weights of all blocks stay gathered from forward to backward.
    """
    count, of_experts = shared_by(sizes)
    experts = divided_experts(model)
    seen: set[nn.Parameter] = set()

    def group(parameters: Iterable[nn.Parameter], gathers: int, count: int, of_experts: bool = False) -> ShardingGroup:
        own = [one for one in dict.fromkeys(parameters) if one not in seen]
        seen.update(own)
        padded = {one: _padded_numel(local(one), count) for one in own}
        trained = [one for one in own if one.requires_grad]
        return ShardingGroup(
            nbytes=sum(numel * one.element_size() for one, numel in padded.items()),
            trained=sum(padded[one] * one.element_size() for one in trained),
            numbers=sum(padded[one] for one in trained),
            count=count,
            gathers=gathers,
            of_experts=of_experts,
        )

    again, blocks = 1 if keeps_gathered else 2, []
    for index, block in enumerate(model.model.layers):
        divided = [one for one in block.parameters() if one in experts]
        groups = [group(divided, 2, of_experts, True)] if divided else []  # nested in the group of the block
        is_last = index == len(model.model.layers) - 1
        blocks.append((group(block.parameters(), 1 if is_last else again, count), *groups))
    ends = [] if model.shares_head else [model.get_input_embeddings(), model.get_output_embeddings()]
    found = [group(one.parameters(), 1, count) for one in (*ends, model)]
    return Sharding(tuple(found), tuple(blocks))


def _padded_numel(tensor: Tensor, count: int) -> int:
    first, *others = tensor.shape or (1,)
    return -(-first // count) * count * math.prod(others)
