"""Tensor parallelism (Shoeybi et al. 2019): each process of a group computes its part of every layer.

Layers say how they are divided (`TensorPlan`). Their parameters become DTensors over the group, so that loading,
saving, optimizers and FSDP2 see whole parameters of which a process holds a part. A forward computes with the local
parts, by the kernels of one process, and the outputs of all processes are put together:

    attention, MLPs  own heads or features   x is shared; the outputs are added up
    experts          own experts             of the slots of all tokens; the outputs are added up
    embedding        own tokens              the other rows are 0; the outputs are added up
    head             own tokens              the loss exchanges a few numbers per token; logits are gathered
    the rest         all of it               of own tokens in blocks, see `sequence_parallel`; elsewhere of all

The gradient of a shared input is the sum of those of all processes, and so is that of a parameter which is whole in
every process but used for its own part, such as a norm of heads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ligerzoo.dtensors import is_dtensor
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import accumulation_dtype, cdiv
from ligerzoo.kernels.rms_norm import norm_output
from ligerzoo.layers.embedding import Embedding
from ligerzoo.layers.head import LMHead
from ligerzoo.layers.norm import AllHeadsRMSNorm
from ligerzoo.layers.plain import is_plain_tensor
from ligerzoo.layers.tensor_plan import DividedParameter, Kind, TensorPlan
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.parallel.divided_layer import DividedLayer, TensorShard, TokenwiseBlock
from ligerzoo.parallel.expert import ExpertParallelExperts, TensorParallelExperts
from ligerzoo.parallel.processes import device_of
from ligerzoo.parallel.sequence_parallel import ResidualParts
from ligerzoo.parallel.vocab_parallel import vocab_parallel_linear_cross_entropy

# torch says that it gathers over one axis of the mesh after the other, for each parameter that FSDP2 shards, too.
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(lambda record: "sequential" not in record.msg)


class _Gather(FusedFunction):
    """The parts of the last dimension of all processes, of `sizes` features; each gets the gradient of its part."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
        ctx.rank, ctx.sizes = dist.get_rank(group), sizes
        padded = x.new_zeros(*x.shape[:-1], max(sizes))
        padded[..., : x.shape[-1]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor, None, None]:
        return torch.split(dy, ctx.sizes, -1)[ctx.rank], None, None


class _Sum(DividedLayer):
    """Adds up the outputs of all processes."""

    def forward(self, x: Tensor, *args: object, **options: object) -> Tensor:
        part = self.tensor_shard
        for context in args:
            if getattr(context, "attentions", None) is not None:
                what, remedy = "attention probabilities of own heads only", "Use a mesh without tensor."
                raise LigerzooError(what, where="output_attentions", got=True, expected=False, remedy=remedy)
        with part.replaced(part.local_values()):
            return part.own_tokens(super().forward(part.all_tokens(x), *args, **options))


class _AllHeadsNorm(DividedLayer, AllHeadsRMSNorm):
    """Normalizes the heads of this process by the mean square of those of all processes."""

    def forward(self, x: Tensor) -> Tensor:
        part = self.tensor_shard
        heads = x.flatten(-2).to(accumulation_dtype(x.dtype))
        squares = part.share(part.add_parts(heads.square().sum(-1, keepdim=True)))
        features = heads.shape[-1] * part.group.size()  # heads of several processes count several times
        normalized = heads * torch.rsqrt(squares / features + self.eps)
        return norm_output(normalized, x.dtype, self.weight, self.weight_offset, self.round_before_scale).view_as(x)


class _Embedding(DividedLayer, Embedding):
    """Adds up the rows of own tokens of all processes."""

    def forward(self, input: Tensor) -> Tensor:
        part = self.tensor_shard
        first = dist.get_rank(part.group) * cdiv(self.num_embeddings, part.group.size())
        with part.replaced(part.local_values()):
            ids, rows = input - first, len(self.weight)
            is_own = (ids >= 0) & (ids < rows)
            return part.add_parts(super().forward(ids.where(is_own, 0)) * is_own[..., None])


class _Head(DividedLayer, LMHead):
    """Computes the loss or the logits of own tokens.

    Other objectives than the cross entropy, biases and adapters gather the weight.
    """

    def logits(self, hidden: Tensor) -> Tensor:
        part = self.tensor_shard
        vocabulary, size = len(self.weight), part.group.size()
        step = cdiv(vocabulary, size)
        sizes = [max(0, min(step, vocabulary - step * rank)) for rank in range(size)]
        with part.replaced(part.local_values()):
            logits: Tensor = _Gather.apply(super().logits(part.share(hidden)), part.group, sizes)
            return logits

    def loss(self, hidden: Tensor, target: Tensor, num_items: Any = None, objective: Any = None) -> Any:
        part = self.tensor_shard
        if objective is None and len(part.parameters) == 1:
            return vocab_parallel_linear_cross_entropy(
                hidden,
                self.weight,
                target,
                num_items=num_items,
                softcap=self.softcap,
                logit_scale=self.logit_scale,
                logits_budget=self.logits_budget,
                backend=self.backend,
            )
        with part.replaced(part.whole):
            return super().loss(hidden, target, num_items, objective)


Axis = Literal["tensor", "expert"]
"""An axis that divides layers."""

_CLASSES: dict[Kind, type[DividedLayer]] = {
    "sum": _Sum,
    "experts": TensorParallelExperts,
    "embedding": _Embedding,
    "head": _Head,
}


def divide(model: LanguageModel, mesh: DeviceMesh, *, but_experts: bool = False) -> None:
    """Divides the decoder's layers, the embedding and the head over a mesh, in place, as their plans say.

    Args:
        model: a model on any device, also meta, which `check_divisible` accepts.
        mesh: the dimension "tensor" of a mesh.
        but_experts: leave experts whole, which `divide_experts` divides.
    """
    _divide(_layers_over(model, "tensor", but_experts), mesh)
    _divide_tokens(model, mesh.get_group())


def _divide_tokens(model: LanguageModel, group: dist.ProcessGroup) -> None:
    """Divides the tokens between divided layers, unless a block may mix tokens in a layer that is whole."""
    divided = {module for layer in planned_layers(model).values() for module in layer.modules()}
    mixers = {mixer for block in model.decoder_layers for mixer in _mixers(block)}
    if not mixers <= divided:
        return
    for block in model.decoder_layers:
        modules = [module for module in block.modules() if module not in divided]
        named = [(module, name) for module in modules for name, one in module._parameters.items() if one is not None]
        parameters = tuple([DividedParameter(module, name, None) for module, name in named])
        _become(TokenwiseBlock, block, TensorShard(parameters, group))
    model.residual_parts = ResidualParts.over(group)


def _mixers(block: nn.Module) -> set[nn.Module]:
    """Returns the layers of a block in which tokens may see others: itself, if it does not say which."""
    cached = (layer for layer in block.modules() if layer is not block and hasattr(layer, "new_cache"))
    return {*getattr(block, "mixers", (block,)), *cached}


def divide_experts(model: LanguageModel, mesh: DeviceMesh, shards: DeviceMesh, copies: dist.ProcessGroup) -> None:
    """Divides the experts of MoE layers over a mesh, in place. Its processes have different tokens, but for copies.

    Args:
        model: a model on any device, also meta, which `check_divisible` accepts.
        mesh: the dimension "expert" of a mesh.
        shards: the mesh over which FSDP2 shards the experts of a process.
        copies: the processes that have the tokens of this one, those of tensor parallelism.
    """
    layers = _layers_over(model, "expert")
    _divide(layers, mesh)
    for layer in layers.values():
        layer.shards, layer.copies = shards, ResidualParts.over(copies)  # type: ignore[assignment]


def check_divisible(model: LanguageModel, axis: Axis, processes: int, *, but_experts: bool = False) -> None:
    """Raises ConfigError if this number of processes cannot divide a layer of a model, or the model has no such layer.

    Args:
        model: a model on any device, also meta.
        axis: the axis of the mesh.
        processes: those that divide a layer.
        but_experts: see `divide`.
    """
    layers = _layers_over(model, axis, but_experts)
    if not layers:
        what, remedy = f"{type(model).__name__} has no layers to divide", f"Use a mesh without {axis}."
        raise ConfigError(what, where=f"mesh {axis}", got=processes, expected=1, remedy=remedy)
    for name, layer in layers.items():
        if (obstacle := next(_obstacles(layer, processes), None)) is not None:
            others = f"with a smaller {axis}, or " if next(_obstacles(layer, 1), None) is None else ""
            where, remedy = f"mesh {axis}, {name}", f"Use a mesh {others}without {axis}."
            raise ConfigError(obstacle, where=where, got=f"{processes} processes", remedy=remedy)


def _layers_over(model: LanguageModel, axis: Axis, but_experts: bool = False) -> dict[str, nn.Module]:
    """Returns the layers that an axis divides, by name."""
    layers = planned_layers(model).items()
    if axis == "expert":
        return {name: layer for name, layer in layers if _plan(layer).kind == "experts"}
    return {name: layer for name, layer in layers if not (but_experts and _plan(layer).kind == "experts")}


def _divide(layers: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    [axis] = mesh.mesh_dim_names or ()
    divided: dict[Tensor, nn.Parameter] = {}
    for layer in layers.values():
        plan = _plan(layer)
        parameters = tuple(plan.parameters(layer, mesh.size()))
        for one in parameters:
            if one.dim is not None:
                if one.value not in divided:
                    divided[one.value] = _divided(one.value, one.dim, mesh)
                one.module._parameters[one.name] = divided[one.value]
        part = TensorShard(parameters, mesh.get_group())
        base = ExpertParallelExperts if axis == "expert" else _CLASSES[plan.kind]
        _become(base, layer, part)
        for name in plan.norms:
            _become(_AllHeadsNorm, layer.get_submodule(name), part)


_DERIVED: dict[tuple[type[DividedLayer], type[nn.Module]], type[nn.Module]] = {}


def _become(base: type[DividedLayer], layer: nn.Module, part: TensorShard) -> None:
    """Makes a layer compute its part, by a class that derives from its own: the same one each time."""
    key = base, type(layer)
    if key not in _DERIVED:
        _DERIVED[key] = type(f"Divided{key[1].__name__}", key, {})
    layer.__class__ = _DERIVED[key]
    layer.tensor_shard = part  # type: ignore[assignment]


def _plan(layer: nn.Module) -> TensorPlan:
    return layer.tensor_plan()  # type: ignore[operator, no-any-return]


def planned_layers(model: LanguageModel) -> dict[str, nn.Module]:
    """Returns the layers that have a plan, by name: those of the decoder's blocks, the embedding and the head."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    layers = {*ends, *(module for block in model.decoder_layers for module in block.modules())}
    return {name: one for name, one in model.named_modules() if one in layers and hasattr(one, "tensor_plan")}


def _obstacles(layer: nn.Module, processes: int) -> Iterator[str]:
    """Yields why this number of processes cannot divide a layer."""
    plan = _plan(layer)
    yield from plan.obstacles(processes)
    for one in plan.parameters(layer, processes):
        options = getattr(one.module, "lora", {}).values()
        if any(option.dropout for option in options):
            yield "drops inputs of an adapter, which would differ between processes"
        if one.name == "lora_magnitude_vector" and one.dim is None and not one.parts:
            yield "has DoRA's norms of rows that are divided"
        if not (is_plain_tensor(one.value) or is_dtensor(one.value)):
            yield f"has a {type(one.value).__name__}, {one.name}"


def _divided(weight: Tensor, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    """Returns a parameter of which this process holds its part."""
    shards, rank = weight.detach().chunk(mesh.size(), dim), mesh.get_local_rank()
    own = shards[rank] if rank < len(shards) else weight.detach().narrow(dim, 0, 0)
    if not own.is_meta:
        own = own.to(device_of(mesh), copy=True, memory_format=torch.contiguous_format)
    whole = weight.shape, weight.stride()
    placed = DTensor.from_local(own.contiguous(), mesh, [Shard(dim)], run_check=False, shape=whole[0], stride=whole[1])
    return nn.Parameter(placed, weight.requires_grad)
