"""Runs a training step on the meta device, and counts the memory, the work and the communication of one GPU.

Every tensor that a GPU would hold exists on meta too, without data, and is freed at the same time. So the peak is
counted, not fitted. Stated as constants are only `CUBLAS_WORKSPACE`, the bytes per parameter of optimizers
(`ligerzoo.optimizer_table`), and how many blocks FSDP2 holds. Not counted: fragmentation, the CUDA context, and buffers
for communication.

A step is counted once for all ways to shard its weights with FSDP2: `count_step` runs it, and `step_memory` adds what
FSDP2 holds, `held_memory`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ligerzoo.dtensors import is_dtensor, local
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import HOPPER, simulated_gpu
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory.network import reduced_bytes, uses_copy_engines
from ligerzoo.memory.repetition import (
    Boundary,
    Gap,
    Moment,
    StepCount,
    filled,
    find_gaps,
    kinds_of,
    leaving_out,
    run_values,
)
from ligerzoo.memory.sharding import Sharding, ShardingGroup, divided_experts, sharding_of, shared_by
from ligerzoo.memory.tracker import Tracker, allocated_bytes
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.language_model import LanguageModelWithHead
from ligerzoo.optimizer_table import OPTIMIZERS, check_optimizer, imported
from ligerzoo.training_setting import GPURates, TrainingSetting

WithHead = TypeVar("WithHead", bound=LanguageModelWithHead)

CUBLAS_WORKSPACE = 2 * 32 * 2**20
"""Bytes; PyTorch gives cuBLAS 32 MiB on Hopper GPUs for each thread: that of the forward and that of autograd."""

FSDP_BLOCKS = 3
"""Blocks of unsharded weights or gradients that FSDP2 holds: one that computes, one gathered ahead, one in a buffer."""


class SimulationError(LigerzooError):
    """A layer of the model does not run on the meta device, so that the memory of a step is not known."""


def optimizer_bytes(model: nn.Module, optimizer: str, shares: Mapping[Tensor, int] | None = None) -> int:
    """Returns the bytes of an optimizer's states for all parameters that require gradients.

    Args:
        model: on meta.
        optimizer: its name.
        shares: processes that share each parameter; None if this one has all.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return 0
    row, adamw = OPTIMIZERS[optimizer], OPTIMIZERS["adamw"]
    total = 0.0
    for group in imported(row.groups)(model, 0.0):
        used = row if group.get("muon", True) else adamw
        for _, p in group["params"]:
            numel = local(p).numel() / (1 if shares is None else shares[p])
            total += numel * (used.tensors * p.element_size() + used.quantized)
    return round(total)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes per GPU at the peak of a training step, by kind of tensor, and the work of the step.

    Attributes:
        weights: parameters and buffers; with several GPUs, this GPU's shard and the unsharded ones that it needs.
        optimizer_states: states of the optimizer.
        gradients: gradients that exist at the peak.
        activations: what blocks keep for backward and has not been freed yet.
        workspace: everything else: temporary tensors, the loss head's logits and gradients, cuBLAS.
        flops: operations of the matrix products and attention of forward and backward, recomputation included.
        kept: what each block keeps for backward, its input included.
    """

    weights: int
    optimizer_states: int
    gradients: int
    activations: int
    workspace: int
    flops: int
    kept: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Bytes in all, as `torch.cuda.max_memory_allocated` counts them."""
        return self.weights + self.optimizer_states + self.gradients + self.activations + self.workspace

    def __str__(self) -> str:
        parts = ["weights", "optimizer_states", "gradients", "activations", "workspace"]
        if not self.activations:
            parts.remove("activations")
        listed = ", ".join(f"{name.replace('_', ' ')} {gib(getattr(self, name))}" for name in parts)
        when = "" if self.activations else ", after backward, which has freed the activations"
        return f"{gib(self.peak)} GiB ({listed}){when}"


def gib(nbytes: float) -> str:
    """Formats bytes in GiB."""
    return f"{nbytes / 2**30:,.2f}"


COUNTS = ("", " k", " M", " B", " T")


def with_unit(number: float, units: tuple[str, ...]) -> str:
    """Formats a number with three digits and a unit: 1_234_567 with COUNTS is "1.23 M"."""
    power = 0
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{units[power]}"


def on_meta(model: WithHead) -> WithHead:
    """Returns a copy of the model on the meta device, with the same modules and trained parameters, but no data.

    Raises:
        LigerzooError: the model has no language-model head, or sharded weights.
    """
    if not isinstance(model, LanguageModelWithHead):
        expected = "a model of ligerzoo.models with a language-model head"
        raise LigerzooError("not a language model", where="model", got=type(model).__name__, expected=expected)
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_dtensor(tensor):
            remedy = "Plan before sharding; apply_activation_plan works on both."
            raise LigerzooError("the weights are sharded", where="model", remedy=remedy)
        memo[id(tensor)] = _meta_tensor(tensor)
    return copy.deepcopy(model, memo).train()


def _meta_tensor(tensor: Tensor) -> Tensor:
    meta = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def simulate_step(
    model: CausalLM,
    batch_size: int,
    seq_length: int,
    levels: Sequence[Recompute] = (),
    *,
    optimizer: str = "adamw",
    accumulate: bool = False,
    gpus: int = 1,
    keeps_gathered: bool = False,
) -> StepMemory:
    """Counts the memory of a training step on an H100 or H200: forward, loss, backward and optimizer.

    Gradients are assumed to be freed after each step (`zero_grad(set_to_none=True)`), and the optimizer to update
    parameters in place (`fused=True`).

    Args:
        model: on meta, see `on_meta`.
        batch_size: rows of a microbatch on one GPU, B.
        seq_length: tokens of a row, T, all of them trained.
        levels: what backward recomputes of each block; empty for nothing.
        optimizer: a name in `ligerzoo.optimizer_table.OPTIMIZERS`.
        accumulate: whether gradients of earlier microbatches exist.
        gpus: shards of the weights, gradients and optimizer states (FSDP2 within one host).
        keeps_gathered: whether the weights of all blocks stay gathered from forward to backward.

    Raises:
        LigerzooError: the optimizer is unknown, or cannot update weights that several GPUs share.
    """
    setting = TrainingSetting(
        batch_size=batch_size, seq_length=seq_length, optimizer=optimizer, accumulate=accumulate, gpus=gpus
    )
    return simulate(model, setting, levels, keeps_gathered=keeps_gathered)


def simulate(
    model: CausalLM, setting: TrainingSetting, levels: Sequence[Recompute], *, keeps_gathered: bool = False
) -> StepMemory:
    """Counts the memory of a training step of a model as it is trained, see `simulate_step`.

    The model is divided as on the mesh of the setting, see `ligerzoo.memory.divided`.
    """
    return step_memory(count_step(model, setting, levels), held_memory(model, setting, keeps_gathered=keeps_gathered))


def count_step(
    model: CausalLM, setting: TrainingSetting, levels: Sequence[Recompute], kinds: Sequence[int] | None = None
) -> StepCount:
    """Runs a step on meta, or the part of it that `ligerzoo.memory.repetition` cannot derive.

    Args:
        model: on meta, as it is trained, and divided as on the mesh of the setting.
        setting: how.
        levels: what backward recomputes of each block; empty for nothing.
        kinds: of the blocks, see `kinds_of`; None to find them.

    Raises:
        SimulationError: a layer does not run on the meta device.
    """
    kinds = kinds_of(list(model.model.layers)) if kinds is None else kinds
    levels = tuple(levels) or (Recompute.NOTHING,) * len(model.model.layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    accumulated = trained if setting.accumulate else []
    if gaps := find_gaps(kinds, levels):
        count = _Count(divided_experts(model), accumulated, gaps)
        with leaving_out(model.model, gaps):
            found = _run_step(model, setting, run_values(levels, gaps), count)
        if (whole := filled(found, gaps, count.entered, count.left)) is not None:
            return whole
    return _run_step(model, setting, levels, _Count(divided_experts(model), accumulated))


def _run_step(model: CausalLM, setting: TrainingSetting, levels: Sequence[Recompute], count: _Count) -> StepCount:
    """Runs a step on meta of the blocks that a model has."""
    model.model.activation_plan = tuple(levels)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    existing = (*model.parameters(), *model.buffers())
    with simulated_gpu(HOPPER), Tracker(existing, count.on_peak) as tracker:
        count.tracker = tracker
        handles = [model.model.register_forward_hook(lambda *_: tracker.mark())]
        parts = *model.model.layers, model.model.norm
        handles += [part.register_forward_pre_hook(partial(count.enter, i)) for i, part in enumerate(parts)]
        if setting.gpus > 1 and not model.shares_head:  # the head is gathered until its backward
            handles.append(model.get_output_embeddings().register_forward_pre_hook(partial(_hold_head, tracker)))
        handles += [
            parameter.register_post_accumulate_grad_hook(count.add_gradient)  # type: ignore[no-untyped-call]
            for parameter in trained
        ]
        if _trains_tower(model, trained):  # its gradients pass through all blocks
            embedding = model.get_input_embeddings()
            handles.append(embedding.register_forward_hook(lambda *call: call[-1].requires_grad_()))
        try:
            ids = torch.zeros(setting.batch_size, setting.seq_length, dtype=torch.int64, device="meta")
            loss = model(input_ids=ids, labels=ids).loss
            forward = tracker.work
            loss.backward()
        except RuntimeError as error:  # also NotImplementedError; of layers that read values, or lack a meta kernel
            what, got = "does not run on the meta device, so its memory is not predicted", str(error).split(". ")[0]
            raise SimulationError(what, where=type(model).__name__, got=got) from error
        finally:
            for handle in handles:
                handle.remove()
            model.model.activation_plan = ()
            for parameter in trained:
                parameter.grad = None
        count.end_moment()
    return StepCount(
        moments=tuple(count.moments),
        kept=tuple(after.live - before.live for before, after in pairwise(count.entered)),
        forward=forward,
        backward=tracker.work - forward,
        collectives=tuple(tracker.collectives),
    )


class HeldMemory(NamedTuple):
    """Bytes of a GPU that do not depend on what backward recomputes, with FSDP2 over a mesh.

    Attributes:
        shares: processes that share weights, and those that share divided experts.
        own: this GPU's parameters and buffers.
        gathered: blocks that FSDP2 has gathered.
        gradients: all gradients.
        temporaries: what the optimizer, or the reduction of the last gradients, needs.
        optimizer_states: states of the optimizer.
        sharding: the groups of FSDP2; None with one GPU.
    """

    shares: tuple[int, int]
    own: int
    gathered: int
    gradients: int
    temporaries: int
    optimizer_states: int
    sharding: Sharding | None


def held_memory(
    model: CausalLM, setting: TrainingSetting, *, keeps_gathered: bool = False, copy_engines: bool | None = None
) -> HeldMemory:
    """Counts what a step holds whose weights FSDP2 shards over the mesh of the setting.

    Args:
        model: as for `count_step`.
        setting: how it is trained.
        keeps_gathered: whether the weights of all blocks stay gathered from forward to backward.
        copy_engines: whether gradients travel in their own dtype between the GPUs of one host; NCCL adds them in fp32.
            None if the mesh fits hosts of 8.
    """
    sizes = setting.sizes
    if copy_engines is None:
        copy_engines = uses_copy_engines(sizes, GPURates.gpus_per_host)
    check_optimizer(setting.optimizer, setting.gpus)
    weights, of_experts = shared_by(sizes) if setting.gpus > 1 else (1, 1)
    experts = divided_experts(model)
    shares: dict[Tensor, int] = {one: of_experts if one in experts else weights for one in model.parameters()}
    trained = [parameter for parameter in shares if parameter.requires_grad]
    largest = max((local(one).numel() // shares[one] for one in trained), default=0)
    temporaries = OPTIMIZERS[setting.optimizer].temporaries * largest
    own, gathered, sharding = _nbytes((*shares, *model.buffers())), 0, None
    if setting.gpus > 1:
        sharding = sharding_of(model, sizes, keeps_gathered)
        reduced = partial(reduced_bytes, copy_engines=copy_engines)
        embedding = [one for one in model.get_input_embeddings().parameters() if one.requires_grad]
        numbers = sum(local(one).numel() for one in embedding)
        last = ShardingGroup(nbytes=0, trained=_nbytes(embedding), numbers=numbers, count=1, gathers=0)
        temporaries = max(temporaries, last.trained + reduced(last))  # whole gradients, and a copy that is reduced
        own = sum(group.nbytes // group.count for group in sharding) + _nbytes(model.buffers())
        own += sharding.ends[0].nbytes if model.shares_head else 0  # gathered for the whole step
        gathered = _gathered_bytes(sharding, keeps_gathered, max(map(reduced, map(_whole, sharding.blocks))))
    return HeldMemory(
        shares=(weights, of_experts),
        own=own,
        gathered=gathered,
        gradients=sum(_allocated(one) // shares[one] for one in trained),
        temporaries=temporaries,
        optimizer_states=optimizer_bytes(model, setting.optimizer, shares),
        sharding=sharding,
    )


def step_memory(count: StepCount, held: HeldMemory) -> StepMemory:
    """Returns the memory of a step.

    Args:
        count: of a setting that may differ in `replicate` and `shard`.
        held: on the mesh of the step.
    """
    weights, of_experts = held.shares

    def finished(moment: Moment) -> int:
        return (moment.gradients - moment.of_experts) // weights + moment.of_experts // of_experts

    peak = max(count.moments, key=lambda moment: moment.dynamic + finished(moment))
    gradients, activations, gathered = finished(peak), peak.activations, held.gathered
    workspace = peak.dynamic - activations
    if held.gradients + held.temporaries > peak.dynamic + gradients + gathered:  # the end of backward or later
        gradients, activations, workspace, gathered = held.gradients, 0, held.temporaries, 0
    return StepMemory(
        weights=held.own + gathered,
        optimizer_states=held.optimizer_states,
        gradients=gradients,
        activations=activations,
        workspace=workspace + CUBLAS_WORKSPACE,
        flops=(count.forward + count.backward).flops,
        kept=count.kept,
    )


def _trains_tower(model: CausalLM, trained: Sequence[nn.Parameter]) -> bool:
    """Returns whether parameters train that are not those of the language model."""
    own = {id(parameter) for part in (model.model, model.get_output_embeddings()) for parameter in part.parameters()}
    return any(id(parameter) not in own for parameter in trained)


class _Count:
    """Counts gradients, and remembers what existed between them.

    Args:
        experts: parameters of divided experts.
        accumulated: parameters that have gradients of earlier microbatches.
        gaps: blocks that do not run, whose memory is held.

    Attributes:
        moments: those that have ended.
        entered: before each block ran, and after the last one.
        left: after the backward of some blocks, by index.
    """

    tracker: Tracker

    def __init__(self, experts: Iterable[Tensor], accumulated: Iterable[Tensor], gaps: Sequence[Gap] = ()) -> None:
        self.gaps = {gap.block: gap for gap in gaps}
        self.watched = {gap.block - repeat * gap.period for gap in gaps for repeat in range(3)}
        self.held: dict[int, int] = {}
        self.experts = set(experts)
        self.gradients = {False: 0, True: 0}
        for parameter in accumulated:
            self.gradients[parameter in self.experts] += _allocated(parameter)
        self.adds = not any(self.gradients.values())
        self.moments: list[Moment] = []
        self.entered: list[Boundary] = []
        self.left: dict[int, Boundary] = {}
        self.marked = 0

    def on_peak(self) -> None:
        self.marked = self.tracker.marked

    def boundary(self) -> Boundary:
        tracker = self.tracker
        live = tracker.live - sum(self.held.values())
        return Boundary(live, len(self.moments), tracker.work, len(tracker.collectives))

    def enter(self, index: int, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Before a block runs; what blocks of a gap before it keep exists then."""
        if index < len(self.entered):  # a checkpointed block runs again
            return
        self.entered.append(self.boundary())
        if (gap := self.gaps.get(index)) is not None:
            kept = self.entered[index].live - self.entered[index - gap.period].live
            self.held[index] = gap.repeats * kept
            self.tracker.hold(self.held[index])
        if index in self.watched and inputs[0].requires_grad:
            inputs[0].register_hook(partial(self.leave, index))  # type: ignore[no-untyped-call]

    def leave(self, index: int, _: Tensor) -> None:
        """When the gradient of the input of a block exists."""
        self.left[index] = self.boundary()
        if (nbytes := self.held.pop(index, 0)) != 0:
            self.tracker.hold(-nbytes)
            self.tracker.unmark(nbytes)

    def end_moment(self) -> None:
        peak = self.tracker.peak
        self.moments.append(Moment(peak, min(self.marked, peak), sum(self.gradients.values()), self.gradients[True]))

    def add_gradient(self, parameter: Tensor) -> None:
        self.end_moment()
        parameter.grad = None
        self.tracker.peak = 0
        self.tracker.hold(0)
        if self.adds:
            self.gradients[parameter in self.experts] += _allocated(parameter)


def _whole(groups: Sequence[ShardingGroup]) -> ShardingGroup:
    """Returns the groups of a block as one."""
    return ShardingGroup(
        nbytes=sum(group.nbytes for group in groups),
        trained=sum(group.trained for group in groups),
        numbers=sum(group.numbers for group in groups),
        count=groups[0].count,
        gathers=groups[0].gathers,
    )


def _gathered_bytes(sharding: Sharding, keeps_gathered: bool, reduced: int) -> int:
    """Returns the bytes of blocks that FSDP2 has gathered at a time, or whose gradients it has not yet scattered."""
    blocks = [_whole(groups).nbytes for groups in sharding.blocks]
    freed = [_whole(groups).nbytes - groups[0].nbytes for groups in sharding.blocks]  # experts, after each use
    kept = sum(blocks) - sum(freed) + max(freed) if keeps_gathered else max(blocks)
    return (FSDP_BLOCKS - 2) * max(blocks) + reduced + kept


def _hold_head(tracker: Tracker, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Counts the gathered head from now until the gradient of its input exists."""
    nbytes = _nbytes(head.parameters())
    tracker.hold(nbytes)
    if inputs[0].requires_grad:
        inputs[0].register_hook(lambda _: tracker.hold(-nbytes))  # type: ignore[no-untyped-call]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(_allocated, tensors))


def _allocated(tensor: Tensor) -> int:
    own = local(tensor)
    return allocated_bytes(own.numel() * own.element_size())
