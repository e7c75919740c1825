"""`DividedLayer`: base class of layers of which this process has a part, see `ligerzoo.parallel.tensor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.layers.tensor_plan import DividedParameter


class _Share(FusedFunction):
    """x, of which each process computes a part of the gradient: the parts are added up."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor, None]:
        return _summed(dy, ctx.group), None


class _AddParts(FusedFunction):
    """The sum of the parts of all processes; each gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Once(FusedFunction):
    """x in the first process and 0 in the others: a term of the sum of all. Its gradient is equal in all."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return x.view_as(x) if dist.get_rank(group) == 0 else torch.zeros_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class TensorShard(NamedTuple):
    """The part of a layer in this process.

    Attributes:
        parameters: the parameters of the layer and of its children.
        group: the processes.
    """

    parameters: tuple[DividedParameter, ...]
    group: dist.ProcessGroup

    @contextmanager
    def replaced(self, value_of: Callable[[DividedParameter], Tensor]) -> Iterator[None]:
        """In this context, the parameters of the layer are these tensors."""
        values = [(one.module._parameters, one.name, one.value) for one in self.parameters]
        try:
            for one, (parameters, name, _) in zip(self.parameters, values, strict=True):
                parameters[name] = value_of(one)  # type: ignore[assignment]
            yield
        finally:
            for parameters, name, value in values:
                parameters[name] = value  # type: ignore[assignment]

    def local(self, one: DividedParameter) -> Tensor:
        """Returns what this process computes its part with: a plain tensor."""
        if one.dim is not None:
            return cast(DTensor, one.value).to_local()
        if one.is_added_once:
            return self.once(one.value)
        whole, rank = self.share(one.value), dist.get_rank(self.group)
        if not one.parts:
            return whole
        parts = whole.split_with_sizes([heads.features for heads in one.parts])
        own = [heads.own(x, rank, self.group.size()) for heads, x in zip(one.parts, parts, strict=True)]
        return torch.cat(own)

    def whole(self, one: DividedParameter) -> Tensor:
        """Returns all of a parameter, with which each process computes all."""
        return one.value if one.dim is None else cast(DTensor, one.value).full_tensor()

    def share(self, x: Tensor) -> Tensor:
        """Returns x, whose gradient is the sum of those of all processes."""
        if x.requires_grad and torch.is_grad_enabled():
            x = _Share.apply(x, self.group)
        return x

    def add_parts(self, x: Tensor) -> Tensor:
        """Returns the sum of the parts of all processes."""
        total: Tensor = _AddParts.apply(x, self.group)
        return total

    def once(self, x: Tensor) -> Tensor:
        """Returns x in the first process, and 0 in the others."""
        term: Tensor = _Once.apply(x, self.group)
        return term


class DividedLayer(nn.Module):
    """Base class of layers of which this process has a part; `divide` makes their classes, as FSDP2 does."""

    tensor_shard: TensorShard

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if name in self._modules:  # by an adapter, say, which would compute with whole weights
            what, remedy = "processes have parts of this layer", "Change the model before it is distributed."
            raise LigerzooError(what, where=f"{type(self).__name__}.{name}", got=type(value).__name__, remedy=remedy)
        super().__setattr__(name, value)
