"""Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): tensor parallelism that divides tokens, too.

A layer that they divide needs all tokens, and so do its outputs to be added up. What is between such layers (norms,
residual sums, routers) computes a token alone, so that each process does it for its part of the tokens, and keeps that
part for backward:

    hidden states    of own tokens, from the first block to the last
    divided layer    gathers its input (all-gather); adds up the outputs of all for own tokens (reduce-scatter)
    backward         the transpose: adds up the gradients of the input for own tokens, gathers those of the output

Both send as much as the all-reduce that they replace. A weight between divided layers sees own tokens only: its
gradient is the sum of those of all processes, once for each block. A call with a KV cache, such as in `generate`, is
not divided.

Shapes: T tokens of all rows, as one row; n processes, c tokens of each, T / n rounded up. What follows the last token
is 0 in the input of the first block, and dropped wherever tokens are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.recompute import is_recording, recomputable
from ligerzoo.parallel.divided_tokens import DividedTokens

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the second one before torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Share(FusedFunction):
    """Tensors of which each process computes a part of the gradient: the parts are added up, in one collective."""

    @staticmethod
    def forward(ctx: FusedContext, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple([x.view_as(x) for x in tensors])

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sums = torch.cat([dy.flatten() for dy in gradients])
        dist.all_reduce(sums, group=ctx.group)
        parts = sums.split_with_sizes([dy.numel() for dy in gradients])
        return None, *[part.view(dy.shape).to(dy.dtype) for part, dy in zip(parts, gradients, strict=True)]


def share(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the tensors, whose gradients are the sums of those of all processes."""
    trained = [x for x in tensors if x.requires_grad and torch.is_grad_enabled()]
    shared = dict(zip(trained, _Share.apply(group, *trained), strict=True)) if trained else {}
    return [shared.get(x, x) for x in tensors]


class _Gather(FusedFunction):
    """(1, c, ...) -> (1, n * c, ...), the tokens of all processes.

    With `sums`, each process computes a part of the gradient; else all of it, equal in all processes.
    """

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, group: dist.ProcessGroup, sums: bool) -> Tensor:
        ctx.group, ctx.sums = group, sums
        return _gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _divided(dy, ctx.group, ctx.sums), None, None


class _Divide(FusedFunction):
    """(1, n * c, ...) -> (1, c, ...), the tokens of this process: with `sums`, of the sum of all processes' tensors."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, group: dist.ProcessGroup, sums: bool) -> Tensor:
        ctx.group = group
        return _divided(x, group, sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(dy, ctx.group), None, None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.new_empty(1, group.size() * x.shape[1], *x.shape[2:])
    _all_gather(whole[0], x[0].contiguous(), group=group)
    return whole


def _divided(x: Tensor, group: dist.ProcessGroup, sums: bool) -> Tensor:
    own = x.chunk(group.size(), 1)[dist.get_rank(group)]
    if not sums:
        return own.clone()
    total = own.new_empty(own.shape)
    _reduce_scatter(total[0], x[0].contiguous(), group=group)
    return total


@dataclass(frozen=True, kw_only=True)
class ResidualParts(DividedTokens):
    """Hidden states between divided layers, of which each process has some consecutive tokens.

    Attributes:
        rows: B, rows in which divided layers get the T tokens.
    """

    rows: int = 1

    def own(self, x: Tensor, dim: int = 1, fill: int = 0) -> Tensor:
        own: Tensor = _Divide.apply(self.padded(x), self.group, False) if x.requires_grad else super().own(x, dim, fill)
        return own

    def share(self, x: Tensor) -> Tensor:
        return share([x], self.group)[0]

    def gather(self, x: Tensor) -> Tensor:
        return self._gather(x, False)

    def gather_input(self, x: Tensor) -> Tensor:
        """Returns the input of a divided layer, (..., F) with c tokens -> (B, T / B, F).

        Each process computes a part of its gradient.
        """
        return self._gather(x.view(1, -1, x.shape[-1]), True).view(self.rows, -1, x.shape[-1])

    def add_outputs(self, x: Tensor) -> Tensor:
        """Returns the sum of the outputs of all processes, (..., F) with T tokens -> (1, c, F)."""
        own: Tensor = _Divide.apply(self.padded(x.reshape(1, -1, x.shape[-1])), self.group, True)
        return own

    def _gather(self, x: Tensor, sums: bool) -> Tensor:
        whole: Tensor = _Gather.apply(x, self.group, sums)
        if is_recording():
            recomputable((whole,), partial(_gathered, group=self.group), x, in_checkpoints=False)
        return whole[:, : self.tokens]


block_parts: ContextVar[ResidualParts | None] = ContextVar("block_parts", default=None)
"""The tokens of the block that runs, if processes divide them."""
