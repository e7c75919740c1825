"""`MeshSizes`: over how many processes each axis of a mesh goes. This module does not import torch."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields, replace
from typing import Self

from ligerzoo.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class MeshSizes:
    """Processes along each axis of a mesh. `replicate * shard * context * tensor` is the number of all processes.

    Attributes:
        replicate: copies of the sharded model, with other samples; usually the number of hosts.
        shard: processes with other samples that shard weights, gradients and optimizer states (FSDP2); None for all
            that remain.
        context: processes that each have a part of every sequence.
        tensor: processes that each have a part of every layer, and the same samples.
        expert: processes over which the experts of MoE layers are split; taken from those of `shard` and `context`, and
            times `tensor`.

    Raises:
        ConfigError: A size is not positive.
    """

    replicate: int = 1
    shard: int | None = None
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if size is not None and size < 1:
                raise ConfigError("not a size of an axis", where=f"mesh {axis.name}", got=size, expected="1 or more")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads sizes such as "replicate=2 shard=4"; an axis that is not named has its default.

        Raises:
            ConfigError: An axis is unknown or repeated, or its size is not a positive integer.
        """
        names = [axis.name for axis in fields(cls)]
        sizes: dict[str, int] = {}
        for item in text.replace(",", " ").split():
            name, _, size = item.partition("=")
            expected, remedy = f"{', '.join(names)}, each once", None
            if name not in names:
                what, remedy = "an unknown axis", did_you_mean(name, names)
            elif name in sizes:
                what = "an axis twice"
            elif not (size.isascii() and size.isdigit()):
                what, expected = "not a size of an axis", f"{name}=N, such as {name}=2"
            else:
                sizes[name] = int(size)
                continue
            raise ConfigError(what, where="mesh", got=repr(item), expected=expected, remedy=remedy)
        return cls(**sizes)

    @classmethod
    def of_engine(cls, replicate: int, shard: int, context: int, tensor: int, experts: int, where: str) -> Self:
        """Returns the sizes for another engine's, whose experts are divided over the processes of `tensor`, too.

        Args:
            replicate: copies.
            shard: processes that shard weights.
            context: processes that divide rows.
            tensor: processes that divide layers.
            experts: processes that divide experts.
            where: the engine's option for `experts`.

        Raises:
            ConfigError: `experts` is neither 1 nor a multiple of `tensor`.
        """
        if experts > 1 and experts % tensor:
            what, expected = "experts are divided over all processes of a tensor group", f"1, or a multiple of {tensor}"
            raise ConfigError(what, where=where, got=experts, expected=expected)
        return cls(replicate, shard, context, tensor, max(1, experts // tensor))

    def over(self, processes: int) -> Self:
        """Returns the sizes for a number of processes, with that of `shard`.

        Raises:
            ConfigError: The product of the axes is not the number of processes, or `expert` does not divide
                `shard * context`.
        """
        given = math.prod(size for size in astuple(self)[:4] if size)
        if processes % given or (self.shard and processes != given):
            expected = f"{'' if self.shard else 'a divisor of '}{processes}, the number of processes"
            remedy = f"Start {given}, such as with torchrun --nproc-per-node {given}, or change the sizes."
            got = f"{self}, whose product is {given}"
            raise ConfigError("the sizes do not fit", where="mesh", got=got, expected=expected, remedy=remedy)
        sizes = replace(self, shard=self.shard or processes // given)
        if sizes.shard * sizes.context % sizes.expert:  # type: ignore[operator]
            what, expected = "experts are split within these axes", f"a divisor of {sizes.shard} * {sizes.context}"
            raise ConfigError(what, where="mesh shard * context", got=f"expert={self.expert}", expected=expected)
        return sizes

    def __str__(self) -> str:
        sizes = {axis.name: getattr(self, axis.name) for axis in fields(self)}
        return " ".join(f"{axis.name}={sizes[axis.name]}" for axis in fields(self) if sizes[axis.name] != axis.default)
