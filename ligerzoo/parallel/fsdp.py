"""Shards models with FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al. 2023; Rajbhandari et al. 2020).

Each process holds a part of every parameter, its gradient and its optimizer state. The parameters of a group are
gathered before the group runs and freed after it; its gradients are summed and scattered when its backward has run.

The groups, in the order of the forward:

    embedding   freed after its forward, and not gathered for backward, which does not read it
    each block  of the decoder and of vision towers; freed after forward, gathered again for backward, except the last
                one of the decoder: its backward comes right after the head's
    head        kept until its backward, which comes first. Its gradients exist after the forward (`LMHead`), so their
                reduction overlaps with the backward of the blocks. A model may gather other modules with it
    root        the rest, such as the final norm; also embedding and head if they share their weight

In one group with the root, embedding and head would be gathered before the first kernel, and reduced after the last
one, without any computation to overlap with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ligerzoo.dtensors import is_divided, is_dtensor
from ligerzoo.errors import LigerzooError, first_names
from ligerzoo.layers.plain import find_modules
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.parallel.copy_engines import CopyEngineReduceScatter, use_copy_engines
from ligerzoo.parallel.expert import ExpertParallelExperts
from ligerzoo.parallel.processes import control_group, default_mesh

Model = TypeVar("Model", bound=LanguageModel)


@dataclass
class _Sharding:
    """How a model was sharded. Does not keep the model alive.

    Attributes:
        resharded: whether each group is freed after its forward.
        reductions: of the groups that communicate by copy engines.
        is_gathered: whether all parameters are gathered, by `unsharded`.
    """

    resharded: WeakKeyDictionary[FSDPModule, bool] = field(default_factory=WeakKeyDictionary)
    reductions: tuple[CopyEngineReduceScatter, ...] = ()
    is_gathered: bool = False


_SHARDINGS: WeakKeyDictionary[nn.Module, _Sharding] = WeakKeyDictionary()


def shard_model(
    model: Model,
    mesh: DeviceMesh | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool = True,
    prefetch: int | None = None,
    copy_engines: bool = True,
) -> Model:
    """Shards a model in place with FSDP2: every block, the embedding, the head, and the rest.

    Call it before the optimizer is created. Gradients are averaged over the processes, see `items_per_process`.
    Activation checkpointing is enabled as on one device: it recomputes a block between its gathering and its freeing,
    so it adds no communication. `save_pretrained` and `hf_state_dict` work as before, called by all processes.

    Args:
        model: a model of ligerzoo.models or a subclass, on any device, also meta; see `load_sharded`.
        mesh: one dimension: shards over it. Two with names: shards over the second and replicates over the first.
            Default: all processes, on their GPUs if the process group uses NCCL.
        param_dtype: dtype of gathered parameters and of the computation, such as bfloat16 for weights that the
            optimizer updates in fp32. None for that of the weights.
        reduce_dtype: dtype in which gradients are summed over processes, and accumulated without reduction. None for
            that of the gradients, which halves the communication of bf16 weights.
        reshard_after_forward: free the parameters of a block after its forward, and gather them again in backward.
            False keeps all gathered until backward: 2 instead of 3 transfers of the model per step.
        prefetch: number of following groups whose gathering starts before a group runs. More takes more memory. None
            leaves it to torch: one group in backward, and in forward as far as the host runs ahead of the GPU.
        copy_engines: GPUs of one host communicate by their copy engines, which leaves all multiprocessors to the
            computation. False for the kernels of NCCL, which all others use.

    Returns:
        The model, whose parameters are now DTensors.

    Raises:
        LigerzooError: The model is sharded already, has no blocks, or has trainable parameters of several dtypes in a
            group; or the mesh has other dimensions, or `prefetch` is negative.
        ConfigError: The process group is missing.
    """
    if prefetch is not None and prefetch < 0:
        raise LigerzooError("not a number of groups", where="prefetch", got=prefetch, expected="0 or more, or None")
    if sharded := [name for name, one in model.named_parameters() if is_dtensor(one) and not is_divided(one)]:
        got = f"DTensors in {first_names(sharded, 3)}"
        raise LigerzooError("the model is sharded already", where="shard_model", got=got)
    mesh = default_mesh() if mesh is None else mesh
    if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        expected = "one dimension, or two with names"
        remedy = 'Such as init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard")).'
        raise LigerzooError("not a mesh to shard over", where="mesh", got=mesh, expected=expected, remedy=remedy)
    sharding = _Sharding()
    trained_dtypes: dict[FSDPModule, torch.dtype | None] = {}

    def apply(modules: list[nn.Module], mesh: DeviceMesh, reshard: bool, policy: MixedPrecisionPolicy) -> FSDPModule:
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        group = modules[0]
        assert isinstance(group, FSDPModule)
        sharding.resharded[group] = reshard
        return group

    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)

    def shard(reshard: bool, *modules: nn.Module) -> FSDPModule:
        trained_dtype = _trained_dtype(model, modules)
        group = apply([*modules], mesh, reshard, policy)
        trained_dtypes[group] = trained_dtype
        return group

    stacks = list(block_stacks(model))
    if not stacks:
        expected = "an nn.ModuleList of blocks in a module with the attribute gradient_checkpointing"
        raise LigerzooError("no blocks", where=type(model).__name__, expected=expected)
    for experts in find_modules(model, ExpertParallelExperts):  # groups within those of their blocks
        apply([experts], experts.shards, reshard_after_forward, replace(policy, cast_forward_inputs=False))
    for stack in stacks:
        is_decoder = stack is getattr(model, "decoder_layers", None)
        groups = [shard(reshard_after_forward and not (is_decoder and block is stack[-1]), block) for block in stack]
        if is_decoder:
            groups = _shard_ends(model, groups, shard)
        if prefetch is not None:
            _prefetch(groups, prefetch)
    shard(False, model)
    if copy_engines:
        sharding.reductions = use_copy_engines(trained_dtypes, mesh, param_dtype)
    if model.modalities and dist.get_world_size() > 1:
        control_group()  # all processes must create it at once
        model.register_forward_pre_hook(_refuse_different_modalities, with_kwargs=True)
    _SHARDINGS[model] = sharding
    return model


def block_stacks(model: nn.Module) -> Iterator[nn.ModuleList]:
    """Yields the lists of blocks that activation checkpointing recomputes: the decoder's and those of vision towers."""
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            yield from (child for child in module.children() if isinstance(child, nn.ModuleList) and len(child))


def _shard_ends(model: LanguageModel, blocks: Sequence[FSDPModule], shard: Any) -> list[FSDPModule]:
    """Shards embedding and head, unless they share their weight; returns all groups in the order of the forward."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if model.shares_head:
        return list(blocks)
    groups = [shard(True, embedding), *blocks]
    groups[0].set_unshard_in_backward(len(list(embedding.parameters())) > 1)  # backward reads an adapter only
    return groups if head is None else [*groups, shard(False, *model.gathered_with_head, head)]


def _prefetch(groups: Sequence[FSDPModule], depth: int) -> None:
    """Makes each group start gathering the next ones, in forward and in backward."""
    for index, group in enumerate(groups):
        group.set_modules_to_forward_prefetch(list(groups[index + 1 : index + 1 + depth]))
        group.set_modules_to_backward_prefetch(list(reversed(groups[max(0, index - depth) : index])))


def _trained_dtype(model: nn.Module, modules: Iterable[nn.Module]) -> torch.dtype | None:
    """Returns the dtype of the trainable parameters of a group, None without any.

    Raises:
        LigerzooError: They differ in dtype: their gradients are reduced in one buffer.
    """
    names = {weight: name for name, weight in model.named_parameters()}
    by_dtype: dict[torch.dtype, str] = {}
    for weight in (one for module in modules for one in module.parameters()):
        if weight.requires_grad and (is_divided(weight) or not is_dtensor(weight)):
            by_dtype.setdefault(weight.dtype, names[weight])
    if len(by_dtype) > 1:
        what = "trainable parameters of several dtypes in one group"
        got = ", ".join(f"{name} in {dtype}" for dtype, name in by_dtype.items())
        remedy = "Convert the trainable parameters to one dtype, and give the dtype to compute in as param_dtype."
        raise LigerzooError(what, where="shard_model", got=got, expected="one dtype", remedy=remedy)
    return next(iter(by_dtype), None)


def _refuse_different_modalities(module: LanguageModel, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    """Raises ValueError in all processes if only some have images: the others would wait for their tower forever."""
    if _SHARDINGS[module].is_gathered:
        return
    given = torch.tensor([inputs.get(name) is not None for name in module.modalities], dtype=torch.int32)
    extremes = torch.stack([given, -given])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=control_group())
    differing = [
        name for name, most, least in zip(module.modalities, extremes[0], -extremes[1], strict=True) if most != least
    ]
    if differing:
        what = "given in some processes only"
        expected = "inputs of the same kinds in all processes, since all gather the weights of the vision tower"
        remedy = "Give each process a batch with images in the same steps."
        raise LigerzooError(what, where=" and ".join(differing), expected=expected, remedy=remedy)


def _sharding_of(model: nn.Module, where: str) -> _Sharding:
    if model not in _SHARDINGS:
        expected = "a model that shard_model has sharded"
        raise LigerzooError("not sharded", where=where, got=type(model).__name__, expected=expected)
    return _SHARDINGS[model]


def keep_gathered(model: LanguageModel) -> None:
    """Keeps the weights of blocks gathered from forward to backward: two instead of three transfers per step.

    Each process then holds the whole model in the dtype of the computation; see `reshard_after_forward`. Call it in all
    processes or in none: those that still gather in backward would wait for the others.

    Raises:
        LigerzooError: The model is not sharded.
    """
    sharding = _sharding_of(model, "keep_gathered")
    for stack in block_stacks(model):
        for block in stack:
            assert isinstance(block, FSDPModule)
            block.set_reshard_after_forward(False, recurse=False)
            sharding.resharded[block] = False


@contextmanager
def accumulating(model: LanguageModel) -> Iterator[None]:
    """Accumulates gradients without communication in this block, for all microbatches of a step but the last.

    Each process then holds the gradients of the whole model, in `reduce_dtype`, until the backward after the block.
    Without it, each microbatch reduces its gradients, which takes time instead of memory.

    Raises:
        LigerzooError: The model is not sharded.
    """
    for reduction in _sharding_of(model, "accumulating").reductions:
        reduction.input_dtype = None  # that of the accumulated gradients
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def reshard(model: LanguageModel) -> None:
    """Frees the parameters that a forward without a backward leaves gathered: those of the root and the last block.

    Within `unsharded`, they stay.

    Raises:
        LigerzooError: The model is not sharded.
    """
    sharding = _sharding_of(model, "reshard")
    for group in () if sharding.is_gathered else sharding.resharded:
        group.reshard()


@contextmanager
def unsharded(model: LanguageModel) -> Iterator[None]:
    """Gathers all parameters in this block, such as for `generate`: forwards then need no other process.

    Each process holds the whole model in the dtype of the computation. Gradients are off in the block.

    Raises:
        LigerzooError: The model is not sharded.
    """
    sharding = _sharding_of(model, "unsharded")
    try:
        for group in sharding.resharded:
            group.set_reshard_after_forward(False, recurse=False)
            group.unshard()
        sharding.is_gathered = True
        with torch.no_grad():
            yield
    finally:
        sharding.is_gathered = False
        for group, reshard in sharding.resharded.items():
            group.set_reshard_after_forward(reshard, recurse=False)
            group.reshard()
