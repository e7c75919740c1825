"""Runs a training step on the meta device, and counts the memory and the matrix products that it takes on a GPU.

Every tensor that a GPU would hold exists on meta too, without data, and is freed at the same time. So the peak is
counted, not fitted. Stated as constants are only `CUBLAS_WORKSPACE`, the bytes per parameter of optimizers
(`ligerzoo.optimizer_table`), and how many blocks FSDP2 holds. Not counted: fragmentation, the CUDA context, and buffers
for communication.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ligerzoo.dtensors import is_dtensor
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import HOPPER, simulated_gpu
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory.tracker import Tracker, allocated_bytes
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.optimizer_table import OPTIMIZERS, check_optimizer, imported
from ligerzoo.training_setting import TrainingSetting

CUBLAS_WORKSPACE = 2 * 32 * 2**20
"""Bytes; PyTorch gives cuBLAS 32 MiB on Hopper GPUs for each thread: that of the forward and that of autograd."""

FSDP_BLOCKS = 3
"""Blocks of unsharded weights or gradients that FSDP2 holds: one that computes, one gathered ahead, one in a buffer."""


def optimizer_bytes(model: nn.Module, optimizer: str) -> int:
    """Returns the bytes of an optimizer's states for all parameters that require gradients."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return 0
    row, adamw = OPTIMIZERS[optimizer], OPTIMIZERS["adamw"]
    total = 0.0
    for group in imported(row.groups)(model, 0.0):
        used = row if group.get("muon", True) else adamw
        total += sum(p.numel() * (used.tensors * p.element_size() + used.quantized) for _, p in group["params"])
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


def on_meta(model: CausalLM) -> CausalLM:
    """Returns a copy of the model on the meta device, with the same modules and trained parameters, but no data.

    Raises:
        LigerzooError: the model has no language-model head, or sharded weights.
    """
    if not isinstance(model, CausalLM):
        expected = "a model of ligerzoo.models with a language-model head"
        raise LigerzooError("not a causal language model", where="model", got=type(model).__name__, expected=expected)
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
    """Counts the memory of a training step of a model as it is trained, see `simulate_step`."""
    gpus, accumulate = setting.gpus, setting.accumulate
    check_optimizer(setting.optimizer, gpus)
    model.model.activation_plan = tuple(levels)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter) if accumulate and gpus == 1 else None
    count = _Count(accumulated=_nbytes(trained) if accumulate else 0, gpus=gpus)
    with simulated_gpu(HOPPER), Tracker((*model.parameters(), *model.buffers()), count.on_peak) as tracker:
        count.tracker = tracker
        tracker.hold(count.gradients)
        handles = [model.model.register_forward_hook(lambda *_: tracker.mark())]
        handles += [layer.register_forward_pre_hook(count.enter_block) for layer in model.model.layers]
        handles += [model.model.norm.register_forward_pre_hook(count.enter_block)]
        if gpus > 1 and not model.shares_head:  # the head is gathered until its backward
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
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()
            model.model.activation_plan = ()
            for parameter in trained:
                parameter.grad = None
    gradients, activations, dynamic = count.peak
    workspace = dynamic - gradients - activations
    all_gradients = _nbytes(trained) // gpus
    largest = max((parameter.numel() for parameter in trained), default=0)
    temporaries = OPTIMIZERS[setting.optimizer].temporaries * largest // gpus
    if gpus > 1:  # the last reduction, of the embedding, has whole gradients and a copy of them
        trained_embedding = [p for p in model.get_input_embeddings().parameters() if p.requires_grad]
        temporaries = max(temporaries, 2 * _nbytes(trained_embedding))
    gathered = _gathered_bytes(model, keeps_gathered) if gpus > 1 else 0
    if all_gradients + temporaries > dynamic + gathered:  # the end of backward or the optimizer's step is the peak
        gradients, activations, workspace, gathered = all_gradients, 0, temporaries, 0
    live = count.live[: len(model.model.layers) + 1]  # checkpointed blocks run again
    return StepMemory(
        weights=_weight_bytes(model, gpus) + gathered,
        optimizer_states=optimizer_bytes(model, setting.optimizer) // gpus,
        gradients=gradients,
        activations=activations,
        workspace=workspace + CUBLAS_WORKSPACE,
        flops=tracker.flops,
        kept=tuple(after - before for before, after in pairwise(live)),
    )


def _trains_tower(model: CausalLM, trained: Sequence[nn.Parameter]) -> bool:
    """Returns whether parameters train that are not those of the language model."""
    own = {id(parameter) for part in (model.model, model.get_output_embeddings()) for parameter in part.parameters()}
    return any(id(parameter) not in own for parameter in trained)


class _Count:
    """Counts gradients, and remembers what existed at the peak.

    Attributes:
        gradients: bytes that exist; with several GPUs, of this GPU's shards.
        peak: bytes of gradients, of activations and in all at the peak.
        live: bytes that existed before each block ran, and after the last one.
    """

    tracker: Tracker

    def __init__(self, accumulated: int, gpus: int) -> None:
        self.gpus, self.gradients = gpus, accumulated // gpus
        self.adds = accumulated == 0
        self.peak = (0, 0, 0)
        self.live: list[int] = []

    def on_peak(self) -> None:
        self.peak = self.gradients, min(self.tracker.marked, self.tracker.peak - self.gradients), self.tracker.peak

    def enter_block(self, *_: object) -> None:
        self.live.append(self.tracker.live)

    def add_gradient(self, parameter: Tensor) -> None:
        nbytes = allocated_bytes(parameter.numel() * parameter.element_size())
        if self.gpus > 1:
            parameter.grad = None
            self.tracker.hold(nbytes // self.gpus if self.adds else 0)
        self.gradients += nbytes // self.gpus if self.adds else 0


def _weight_bytes(model: CausalLM, gpus: int) -> int:
    """Returns the bytes of weights and buffers per GPU, and of those that FSDP2 gathers for a whole step."""
    total = _nbytes((*model.parameters(), *model.buffers()))
    if gpus == 1:
        return total
    blocks = sum(_nbytes(layer.parameters()) for layer in model.model.layers)
    return total // gpus + (total - blocks if model.shares_head else 0)


def _gathered_bytes(model: CausalLM, keeps_gathered: bool) -> int:
    """Returns the bytes of blocks that FSDP2 has gathered at a time, or whose gradients it has not yet scattered."""
    blocks = [_nbytes(layer.parameters()) for layer in model.model.layers]
    return sum(blocks) + (FSDP_BLOCKS - 1) * max(blocks) if keeps_gathered else FSDP_BLOCKS * max(blocks)


def _hold_head(tracker: Tracker, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Counts the gathered head from now until the gradient of its input exists."""
    nbytes = _nbytes(head.parameters())
    tracker.hold(nbytes)
    if inputs[0].requires_grad:
        inputs[0].register_hook(lambda _: tracker.hold(-nbytes))  # type: ignore[no-untyped-call]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(allocated_bytes(tensor.numel() * tensor.element_size()) for tensor in tensors)
