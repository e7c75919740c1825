"""`DividedLayer`: base class of layers of which this process has a part, see `ligerzoo.parallel.tensor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.layers.cache import LayerCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.tensor_plan import DividedParameter
from ligerzoo.parallel.sequence_parallel import ResidualParts, block_parts, share


class _AddParts(FusedFunction):
    """The sum of the parts of all processes; each gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

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

    def local_values(self) -> Callable[[DividedParameter], Tensor]:
        """Returns what this process computes its part with: a plain tensor for each parameter.

        The gradients of parameters that are whole in every process are added up in one collective.
        """
        whole = [one for one in self.parameters if one.dim is None and not one.is_added_once]
        shared = share([one.value for one in whole], self.group)
        values = {one: self._own_heads(one, x) for one, x in zip(whole, shared, strict=True)}
        for one in self.parameters:
            if one.dim is not None:
                values[one] = cast(DTensor, one.value).to_local()
            elif one.is_added_once:
                values[one] = self.once(one.value)
        return values.__getitem__

    def _own_heads(self, one: DividedParameter, whole: Tensor) -> Tensor:
        """Returns the part of the heads of this process; all of a parameter without parts."""
        if not one.parts:
            return whole
        parts, rank = whole.split_with_sizes([heads.features for heads in one.parts]), dist.get_rank(self.group)
        return torch.cat([heads.own(x, rank, self.group.size()) for heads, x in zip(one.parts, parts, strict=True)])

    def whole(self, one: DividedParameter) -> Tensor:
        """Returns all of a parameter, with which each process computes all."""
        return one.value if one.dim is None else cast(DTensor, one.value).full_tensor()

    def share(self, x: Tensor) -> Tensor:
        """Returns x, whose gradient is the sum of those of all processes."""
        return share([x], self.group)[0]

    def add_parts(self, x: Tensor) -> Tensor:
        """Returns the sum of the parts of all processes."""
        total: Tensor = _AddParts.apply(x, self.group)
        return total

    def all_tokens(self, x: Tensor) -> Tensor:
        """Returns the input of a layer, of all tokens, whose gradient is the sum of those of all processes.

        Args:
            x: of all tokens, or of those of this process where a block divides them, see `Context.divide`.
        """
        parts = block_parts.get()
        return self.share(x) if parts is None else parts.gather_input(x)

    def own_tokens(self, x: Tensor) -> Tensor:
        """Returns the sum of the outputs of all processes: of all tokens, or of those of this process, (1, c, ...)."""
        parts = block_parts.get()
        return self.add_parts(x) if parts is None else parts.add_outputs(x)

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


class TokenwiseBlock(DividedLayer):
    """A block whose layers compute own tokens, but for those that processes divide, if its context divides the tokens.

    `tensor_shard` has the parameters of those layers.
    """

    def forward(self, x: Tensor, context: Context, *cache: LayerCache | None) -> Tensor:
        if context.residual_parts.count == 1:
            return super().forward(x, context, *cache)  # type: ignore[no-any-return]
        part = self.tensor_shard
        values = share([one.value for one in part.parameters], part.group)
        token = block_parts.set(replace(cast(ResidualParts, context.residual_parts), rows=context.rows))
        try:
            with part.replaced(dict(zip(part.parameters, values, strict=True)).__getitem__):
                return super().forward(x, context, *cache)  # type: ignore[no-any-return]
        finally:
            block_parts.reset(token)
