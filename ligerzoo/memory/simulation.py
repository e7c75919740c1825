"""Runs a training step on the meta device, and counts the memory, the work and the communication of one GPU.

Every tensor that a GPU would hold exists on meta too, without data, and is freed at the same time. So the peak is
counted, not fitted. Stated as constants are only `CUBLAS_WORKSPACE`, the bytes per parameter of optimizers
(`ligerzoo.optimizer_table`), and how many blocks FSDP2 holds. Not counted: fragmentation, the CUDA context, and buffers
for communication.

A step is counted once for all ways to shard its weights with FSDP2: `count_step` runs it, and `step_memory` adds what
FSDP2 holds.
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
from ligerzoo.memory.sharding import Sharding, ShardingGroup, divided_experts, sharding_of, shared_by
from ligerzoo.memory.tracker import Collective, Tracker, Work, allocated_bytes
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
        parts = ("weights", "optimizer_states", "gradients", "activations", "workspace")
        listed = ", ".join(f"{name.replace('_', ' ')} {gib(getattr(self, name))}" for name in parts)
        return f"{gib(self.peak)} GiB ({listed})"


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
    return step_memory(model, setting, count_step(model, setting, levels), keeps_gathered=keeps_gathered)


class Moment(NamedTuple):
    """The most memory between two gradients.

    Attributes:
        dynamic: bytes that exist, without weights and finished gradients.
        activations: those that blocks keep for backward.
        gradients: bytes of finished gradients before they are sharded.
        of_experts: those of experts that are divided over processes.
    """

    dynamic: int
    activations: int
    gradients: int
    of_experts: int


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """A training step of one process, before FSDP2 shards its weights.

    Attributes:
        moments: the most memory between gradients.
        kept: what each block keeps for backward, its input included.
        forward: work of the forward, and of the fused loss head with its gradients.
        backward: work of the backward.
        collectives: those of divided layers.
    """

    moments: tuple[Moment, ...]
    kept: tuple[int, ...]
    forward: Work
    backward: Work
    collectives: tuple[Collective, ...]


def count_step(model: CausalLM, setting: TrainingSetting, levels: Sequence[Recompute]) -> StepCount:
    """Runs a step on meta.

    Args:
        model: on meta, as it is trained, and divided as on the mesh of the setting.
        setting: how.
        levels: what backward recomputes of each block; empty for nothing.

    Raises:
        SimulationError: a layer does not run on the meta device.
    """
    model.model.activation_plan = tuple(levels)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = _Count(divided_experts(model), trained if setting.accumulate else ())
    existing = (*model.parameters(), *model.buffers())
    with simulated_gpu(HOPPER), Tracker(existing, count.on_peak) as tracker:
        count.tracker = tracker
        handles = [model.model.register_forward_hook(lambda *_: tracker.mark())]
        handles += [layer.register_forward_pre_hook(count.enter_block) for layer in model.model.layers]
        handles += [model.model.norm.register_forward_pre_hook(count.enter_block)]
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
    live = count.live[: len(model.model.layers) + 1]  # checkpointed blocks run again
    return StepCount(
        moments=tuple(count.moments),
        kept=tuple(after - before for before, after in pairwise(live)),
        forward=forward,
        backward=tracker.work - forward,
        collectives=tuple(tracker.collectives),
    )


def step_memory(
    model: CausalLM,
    setting: TrainingSetting,
    count: StepCount,
    *,
    keeps_gathered: bool = False,
    copy_engines: bool | None = None,
) -> StepMemory:
    """Returns the memory of a step whose weights FSDP2 shards over the mesh of the setting.

    Args:
        model: as for `count_step`.
        setting: how it is trained.
        count: of a setting that may differ in `replicate` and `shard`.
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
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def finished(moment: Moment) -> int:
        return (moment.gradients - moment.of_experts) // weights + moment.of_experts // of_experts

    peak = max(count.moments, key=lambda moment: moment.dynamic + finished(moment))
    gradients, activations = finished(peak), peak.activations
    workspace = peak.dynamic - activations
    all_gradients = sum(_allocated(one) // shares[one] for one in trained)
    largest = max((local(one).numel() // shares[one] for one in trained), default=0)
    temporaries = OPTIMIZERS[setting.optimizer].temporaries * largest
    own, gathered = _nbytes((*model.parameters(), *model.buffers())), 0
    if setting.gpus > 1:
        sharding = sharding_of(model, sizes, keeps_gathered)
        reduced = partial(reduced_bytes, copy_engines=copy_engines)
        embedding = [one for one in model.get_input_embeddings().parameters() if one.requires_grad]
        last = ShardingGroup(
            nbytes=0,
            trained=_nbytes(embedding),
            numbers=sum(local(one).numel() for one in embedding),
            count=1,
            gathers=0,
        )
        temporaries = max(temporaries, last.trained + reduced(last))  # whole gradients, and a copy that is reduced
        own = sum(group.nbytes // group.count for group in sharding) + _nbytes(model.buffers())
        own += sharding.ends[0].nbytes if model.shares_head else 0  # gathered for the whole step
        gathered = _gathered_bytes(sharding, keeps_gathered, max(map(reduced, map(_whole, sharding.blocks))))
    if all_gradients + temporaries > peak.dynamic + gradients + gathered:  # the peak is the end of backward or later
        gradients, activations, workspace, gathered = all_gradients, 0, temporaries, 0
    work = count.forward + count.backward
    return StepMemory(
        weights=own + gathered,
        optimizer_states=optimizer_bytes(model, setting.optimizer, shares),
        gradients=gradients,
        activations=activations,
        workspace=workspace + CUBLAS_WORKSPACE,
        flops=work.flops,
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

    Attributes:
        moments: those that have ended.
        live: bytes that existed before each block ran, and after the last one.
    """

    tracker: Tracker

    def __init__(self, experts: Iterable[Tensor], accumulated: Iterable[Tensor]) -> None:
        self.experts = set(experts)
        self.gradients = {False: 0, True: 0}
        for parameter in accumulated:
            self.gradients[parameter in self.experts] += _allocated(parameter)
        self.adds = not any(self.gradients.values())
        self.moments: list[Moment] = []
        self.live: list[int] = []
        self.marked = 0

    def on_peak(self) -> None:
        self.marked = self.tracker.marked

    def enter_block(self, *_: object) -> None:
        self.live.append(self.tracker.live)

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
    ahead = (FSDP_BLOCKS - 2) * max(blocks) + reduced
    return ahead + (sum(blocks) if keeps_gathered else max(blocks))


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
