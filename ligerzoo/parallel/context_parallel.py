"""Context parallelism: the tokens of each row are divided over the processes of a group.

Each process has the same rows, as token ids, and computes a consecutive part of their tokens. Layers that mix tokens
exchange tokens for heads (DeepSpeed-Ulysses; Jacobs et al. 2023): a process attends with some heads, over whole rows.
Compared with an exchange of keys and values:

- masks, windows, documents, sinks, soft caps and the states of linear attention are those of one process, and so are
  the kernels and the order of their sums;
- causal attention takes each process as long, though their parts are consecutive;
- no process holds the keys of all tokens and heads: it sends and holds 1 / n of queries, keys and values.

Fewer key heads than processes are repeated, and heads of zeros are added where n does not divide the query heads.

Gradients are averaged over the processes, as in data parallelism, with the same rows in each process of a group. So
what a process counts of its rows is a share of n; ratios of sums over all processes are those of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.parallel.divided_tokens import DividedTokens, pad
from ligerzoo.token_parts import objective_parts

Model = TypeVar("Model", bound=LanguageModel)
Result = TypeVar("Result")


def context_parallel(model: Model, group: dist.ProcessGroup) -> Model:
    """Divides the tokens of each row over the processes of a group, in place.

    All processes of the group call the model with the same inputs, whole rows of any length. Each gets the results of
    one process: the loss, and logits and hidden states of all tokens. Average the gradients over the group, as FSDP2
    does if its mesh has these processes; or DDP. Calls with a KV cache, such as in `generate`, are not divided.

    A loss without an objective is computed by parts. Objectives get the gathered hidden states of the rows, and each
    process computes their loss; those of `ligerzoo.losses` compute log-probabilities by parts.

    Args:
        model: any model whose blocks mix tokens by `Attention`, `LatentAttention`, `GatedDeltaNet` or `Mamba2Mixer`.
        group: such as `mesh["context"].get_group()`.

    Returns:
        The model.

    Raises:
        LigerzooError: A block mixes tokens by another layer, or n does not divide the key heads of its delta rule,
            or the groups of Mamba-2.
    """
    count = dist.get_world_size(group)
    if count == 1:
        return model
    check_exchanged_heads(model, count)
    model.row_parts = DividedRows.over(group)
    return model


def check_exchanged_heads(model: LanguageModel, count: int, tensor: int = 1) -> None:
    """Raises LigerzooError if `count` processes cannot exchange tokens for heads in a block, see `context_parallel`.

    Args:
        model: the model.
        count: n.
        tensor: number of processes that will divide the heads of each layer, each of which exchanges its own.
    """
    if count == 1:
        return
    blocks = model.model.layers.named_children()
    for name, mixer in ((name, mixer) for name, block in blocks for mixer in getattr(block, "mixers", (block,))):
        heads, where = getattr(mixer, "exchanged_heads", None), f"context_parallel, block {name}"
        if heads is None:
            expected = "Attention, LatentAttention, GatedDeltaNet, Mamba2Mixer, or a layer with exchanged_heads"
            raise LigerzooError(
                "a layer that cannot exchange heads", where=where, got=type(mixer).__name__, expected=expected
            )
        part = getattr(mixer, "tensor_shard", None)
        own = -(-heads // (tensor if part is None else part.group.size()))  # several processes may have the same one
        if own % count:
            what, expected = "heads that cannot be divided", f"a multiple of {count}, the processes that share them"
            remedy = f"Choose a divisor of the heads of all blocks, such as {math.gcd(own, count)}."
            raise LigerzooError(what, where=where, got=f"{own} heads", expected=expected, remedy=remedy)


class DividedRows(DividedTokens):
    """Rows that context parallelism divides."""

    def gather(self, x: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(x, self)
        return gathered.transpose(0, 1).flatten(1, 2)[:, : self.tokens]

    def loss(
        self, head: Callable[..., Tensor], hidden: Tensor, target: Tensor, num_items: int | Tensor | None
    ) -> Tensor:
        items = (target != -100).sum().clamp(min=1) if num_items is None else num_items
        own = head(hidden, self.own(target, fill=-100), items / self.count)
        return cast(Tensor, _Mean.apply(own, self))

    def objective(
        self,
        head: Callable[..., Result],
        hidden: Tensor,
        target: Tensor,
        num_items: int | Tensor | None,
        objective: Callable[..., object],
    ) -> Result:
        token = objective_parts.set(self)
        try:
            return head(self.gather(hidden), target, num_items, objective)
        finally:
            objective_parts.reset(token)

    def to_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        most = max(x.shape[2] for x in parts)
        parts = tuple([self._divisible(x, most) for x in parts])
        shapes = [(x.shape[2] // self.count, *x.shape[3:]) for x in parts]
        # For each process its heads of all parts, one after the other: then one row needs no copy after the exchange.
        sent = [x.unflatten(2, (self.count, -1)).flatten(3).permute(2, 0, 1, 3) for x in parts]  # type: ignore[no-untyped-call]
        received = self._exchange(torch.cat(sent, 3))
        rows = received.transpose(0, 1).flatten(1, 2)[:, : self.tokens]
        features = rows.split_with_sizes([math.prod(shape) for shape in shapes], 2)
        return tuple([x.unflatten(2, shape) for x, shape in zip(features, shapes, strict=True)])  # type: ignore[no-untyped-call]

    def to_tokens(self, x: Tensor, heads: int) -> Tensor:
        x = self.padded(x)
        received = self._exchange(x.unflatten(1, (self.count, -1)).transpose(0, 1))  # type: ignore[no-untyped-call]
        return received.movedim(0, 2).flatten(2, 3)[:, :, :heads]

    def own_heads(self, weight: Tensor) -> Tensor:
        return pad(weight, 0, -len(weight) % self.count).chunk(self.count)[self.rank]

    def _exchange(self, x: Tensor) -> Tensor:
        """(n, ...), one part for each process -> (n, ...), one part of each process."""
        return cast(Tensor, _AllToAll.apply(x.contiguous(), self.group))

    def _divisible(self, x: Tensor, most: int) -> Tensor:
        """Repeats heads so that n divides their number, and groups of the `most` heads share them as before."""
        heads = x.shape[2]
        repeats = self.count // math.gcd(heads, self.count)
        if most % (heads * repeats):
            repeats = most // heads
        x = x if repeats == 1 else x.repeat_interleave(repeats, 2)
        return pad(x, 2, -x.shape[2] % self.count)


class _AllToAll(FusedFunction):
    """(n, ...), one part for each process -> (n, ...), one part of each process. Its own transpose."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient.contiguous(), ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


class _Gather(FusedFunction):
    """(B, c, ...) -> (n, B, c, ...).

    The gradient of a token is the sum of those of all processes. They compute the same loss with the result, so it
    counts n times, as it has to: the gradients of the weights are averaged. What they compute by parts counts once,
    with the n-fold gradient that `gather` of the parts gives.
    """

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, parts: DividedRows) -> Tensor:
        ctx.parts = parts
        return _all_to_all(x.expand(parts.count, *x.shape).contiguous(), parts.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient.contiguous(), ctx.parts.group).sum(0), None


class _Mean(FusedFunction):
    """The mean of a 0-d tensor over the processes, of which each differentiates its own: gradients are averaged."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, parts: DividedRows) -> Tensor:
        mean = x.clone()
        dist.all_reduce(mean, group=parts.group)
        return mean / parts.count

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None
