"""What the GPUs of a mesh send to each other in a training step, and how long it takes.

Sent are, by a GPU of n that communicate about a tensor of b bytes:

    all-gather, reduce-scatter, all-to-all   b (n - 1) / n
    all-reduce                               2 b (n - 1) / n

Neighbours of a mesh are neighbours on a host. A ring over hosts enters and leaves each host once for every GPU that the
group has there, so its GPUs share the network; an all-to-all sends each part on its own way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ligerzoo.memory.sharding import REDUCED_BYTES, Sharding, ShardingGroup
from ligerzoo.memory.tracker import Collective, CollectiveKind
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.training_setting import GPURates

NVLINK_SHARE, NETWORK_SHARE = 0.75, 0.9
"""Shares of the bandwidths of data sheets that large collectives reach."""

EXPERTS_SHARE = 0.25
"""That of NVLink which the all-to-all of experts reaches: its parts are uneven, and each process waits for the slowest
one, and for its host, which reads how many tokens each part has."""

START_SECONDS, HOP_SECONDS = 20e-6, 3e-6
"""Seconds that a collective takes without data, and for each further process of a ring."""

_PASSES = {"all-reduce": 2}
When = Literal["forward", "backward", ""]


class Members(NamedTuple):
    """The processes of an axis.

    Attributes:
        size: n.
        per_host: how many of them are on one host.
    """

    size: int
    per_host: int

    @property
    def hosts(self) -> int:
        return self.size // self.per_host


def members_of(sizes: MeshSizes, gpus_per_host: int) -> dict[str, Members]:
    """Returns the processes of each axis; "shard" has those of `context`, too, and "expert shard" the same experts."""
    shards, parts = (sizes.shard or 1) * sizes.context, sizes.expert * sizes.tensor
    count_and_stride = {
        "replicate": (sizes.replicate, shards * sizes.tensor),
        "shard": (shards, sizes.tensor),
        "context": (sizes.context, sizes.tensor),
        "tensor": (sizes.tensor, 1),
        "expert": (parts if sizes.expert > 1 else 1, 1),
        "expert shard": (shards // sizes.expert, parts),
    }
    return {
        axis: Members(count, max(1, min(count, gpus_per_host // stride)))
        for axis, (count, stride) in count_and_stride.items()
    }


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The collectives of one kind over one axis in a step.

    Attributes:
        axis: of the mesh.
        kind: what the collectives do.
        when: "forward", "backward", or "" for those of divided layers, which wait for each one.
        nbytes: size of the tensors, of whole ones for all-gather and reduce-scatter.
        calls: number of collectives.
        members: the processes.
    """

    axis: str
    kind: CollectiveKind
    when: When
    nbytes: int
    calls: int
    members: Members

    @property
    def sent(self) -> float:
        """Bytes that a GPU sends."""
        return _PASSES.get(self.kind, 1) * self.nbytes * (self.members.size - 1) / self.members.size

    def seconds(self, rates: GPURates) -> float:
        """Returns how long the collectives take one after the other."""
        count, per_host = self.members
        share = EXPERTS_SHARE if self.axis == "expert" else NVLINK_SHARE
        nvlink, network = share * rates.nvlink * 1e9, NETWORK_SHARE * rates.network * 1e9 / 8
        crossing = 0.0
        if self.members.hosts > 1 and self.kind == "all-to-all":
            crossing = self.nbytes * (count - per_host) / count
        elif self.members.hosts > 1:
            crossing = self.sent / per_host
        inside = self.sent if per_host > 1 else 0.0
        waits = START_SECONDS + HOP_SECONDS * (count - 1) * _PASSES.get(self.kind, 1)
        return max(inside / nvlink, crossing / network) + self.calls * waits


def transfers_of(
    collectives: Iterable[Collective],
    axes: Mapping[str, str],
    sharding: Sharding | None,
    members: Mapping[str, Members],
    copy_engines: bool,
) -> tuple[Transfer, ...]:
    """Returns what a step sends.

    Args:
        collectives: those of divided layers.
        axes: the axis of each process group, by its name.
        sharding: the groups of FSDP2; None without.
        members: the processes of each axis.
        copy_engines: whether gradients travel in their own dtype.
    """
    sums: dict[tuple[str, CollectiveKind, When], tuple[int, int]] = {}

    def add(axis: str, kind: CollectiveKind, when: When, nbytes: int) -> None:
        if nbytes and members[axis].size > 1:
            before, calls = sums.get((axis, kind, when), (0, 0))
            sums[axis, kind, when] = before + nbytes, calls + 1

    for one in collectives:
        add(axes[one.group], one.kind, "", one.nbytes)
    for group in sharding or ():
        axis = "expert shard" if group.of_experts else "shard"
        add(axis, "all-gather", "forward", group.nbytes)
        add(axis, "all-gather", "backward", group.nbytes * (group.gathers - 1))
        add(axis, "reduce-scatter", "backward", reduced_bytes(group, copy_engines))
        add("replicate", "all-reduce", "backward", REDUCED_BYTES * group.numbers // group.count)
    return tuple(
        Transfer(axis=axis, kind=kind, when=when, nbytes=nbytes, calls=calls, members=members[axis])
        for (axis, kind, when), (nbytes, calls) in sums.items()
    )


def reduced_bytes(group: ShardingGroup, copy_engines: bool) -> int:
    """Returns the bytes of the gradients of a group on their way to other processes."""
    return group.trained if copy_engines else REDUCED_BYTES * group.numbers


def uses_copy_engines(sizes: MeshSizes, gpus_per_host: int) -> bool:
    """Returns whether FSDP2 communicates by the copy engines of the GPUs of one host."""
    members = members_of(sizes, gpus_per_host)["shard"]
    return members.size > 1 and members.hosts == 1
