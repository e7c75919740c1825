"""Activation plans: what backward recomputes of each block, so that a training step fits a memory budget.

A plan recomputes as little as it must. Levels of `Recompute` are tried from the cheapest; within a level, blocks from
the first to the last: the last block's backward runs while most activations exist, and recomputation would add to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Literal

import torch
from torch import nn

from ligerzoo.checks import AT_LEAST_1, POSITIVE, check
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory.simulation import StepMemory, gib, on_meta, simulate
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.training_setting import TrainingSetting

RESERVE = 2**30
"""Bytes of a GPU that `budget="auto"` leaves free, for fragmentation and libraries."""

RESERVED_SHARE = 0.02
"""Further share of the GPU's memory that `budget="auto"` leaves free."""

_FLOPS, _BANDWIDTH = 700e12, 4e12
"""Operations and bytes per second of an H200, to compare recomputation by products and by elementwise kernels."""

WORDS = {
    Recompute.NOTHING: "nothing recomputed",
    Recompute.ELEMENTWISE: "norm outputs recomputed",
    Recompute.MLP: "norm outputs, gate and up recomputed",
    Recompute.BLOCK: "everything recomputed",
}


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """What backward recomputes of each block. `str(plan)` is a table.

    Attributes:
        levels: one for each block.
        batch_size: rows of a microbatch on one GPU.
        seq_length: tokens of a row.
        step: memory and work of a training step.
        extra_flops: share of `step.flops` that is recomputation.
        budget: bytes per GPU that the step must fit; None for no limit.
        keeps_gathered: whether weights that several GPUs share stay gathered from forward to backward.
    """

    levels: tuple[Recompute, ...]
    batch_size: int
    seq_length: int
    step: StepMemory
    extra_flops: float
    budget: int | None
    keeps_gathered: bool = False

    def __str__(self) -> str:
        within = "" if self.budget is None else f", within {gib(self.budget)} GiB"
        lines = [f"activation plan for {self.batch_size} x {self.seq_length:,} tokens per GPU{within}"]
        first = 0
        for level, group in groupby(self.levels):
            end = first + len(list(group))
            name = f"block {first}" if first == end - 1 else f"blocks {first} to {end - 1}"
            kept = sum(self.step.kept[first:end])
            lines.append(f"  {name:<17}{WORDS[level]:<38}{gib(kept):>8} GiB kept")
            first = end
        if self.keeps_gathered:
            lines.append("  weights          gathered from forward to backward")
        lines.append(f"  recomputation    {self.extra_flops:.1%} of the matrix products")
        lines.append(f"  peak             {self.step}")
        return "\n".join(lines)


def plan_activations(
    model: CausalLM,
    *,
    batch_size: int,
    seq_length: int,
    budget: float | Literal["auto"] | None = "auto",
    optimizer: str = "adamw",
    accumulate: bool = False,
    gpus: int = 1,
    device: torch.device | None = None,
    reserved: int = 0,
) -> ActivationPlan:
    """Chooses what backward recomputes of each block, as little as the budget allows.

    If several GPUs share the weights, and nothing needs to be recomputed within the budget, the weights of blocks also
    stay gathered from forward to backward if that fits: it saves a third of the communication.

    Simulates training steps on the meta device (about 0.2 s each for 32 blocks, at most 11); nothing runs on the GPU.
    Plan before the optimizer has states, and before the weights are sharded.

    Args:
        model: the model to train, on any device, with frozen parameters and adapters as they will be trained.
        batch_size: rows of a microbatch on one GPU.
        seq_length: tokens of a row.
        budget: GiB of the GPU's memory for the whole step: weights, optimizer states, gradients and activations.
            "auto": what is free on the model's GPU, minus a reserve; on other devices, no limit. None: no limit.
        optimizer: a name in `ligerzoo.optimizer_table.OPTIMIZERS`.
        accumulate: whether gradients accumulate over several microbatches.
        gpus: number of GPUs that share weights, gradients and optimizer states (FSDP2).
        device: where the step will run, if the model is on the meta device; only for "auto". Default: the model's.
        reserved: bytes of the budget for other tensors, such as averaged weights.

    Raises:
        LigerzooError: the step does not fit even if all blocks are recomputed, a layer does not run on the meta device,
            or an argument is invalid.
    """
    check(None, AT_LEAST_1, batch_size=batch_size, seq_length=seq_length, gpus=gpus)
    limit = budget_bytes(model, budget, device)
    limit = None if limit is None else limit - reserved
    setting = TrainingSetting(
        batch_size=batch_size, seq_length=seq_length, optimizer=optimizer, accumulate=accumulate, gpus=gpus
    )
    return choose_plan(on_meta(model), setting, limit)


def plan_checkpointing(model: CausalLM, setting: TrainingSetting) -> ActivationPlan:
    """Returns the plan of a model whose blocks are all recomputed, with `gradient_checkpointing_enable`.

    Args:
        model: the model to train, on any device, as it will be trained.
        setting: how.
    """
    simulated = on_meta(model)
    whole = simulate(simulated, setting, ())
    simulated.gradient_checkpointing_enable()
    step = simulate(simulated, setting, ())
    return ActivationPlan(
        levels=(Recompute.BLOCK,) * len(model.model.layers),
        batch_size=setting.batch_size,
        seq_length=setting.seq_length,
        step=step,
        extra_flops=1 - whole.flops / step.flops,
        budget=None,
    )


def choose_plan(
    model: CausalLM, setting: TrainingSetting, limit: int | None, step_of: Callable[..., StepMemory] | None = None
) -> ActivationPlan:
    """Returns the first of `_candidates` that fits, with gathered weights if they fit too.

    Args:
        model: on meta, as it is trained.
        setting: how.
        limit: bytes; None for no limit.
        step_of: returns the step for levels of blocks and `keeps_gathered`; None to simulate the model.

    Raises:
        LigerzooError: none fits.
    """
    blocks, step_of = len(model.model.layers), step_of or partial(simulate, model, setting)
    nothing = [Recompute.NOTHING] * blocks
    whole = step_of(nothing)

    def plan(levels: Sequence[Recompute], step: StepMemory, keeps_gathered: bool = False) -> ActivationPlan:
        return ActivationPlan(
            levels=tuple(levels),
            batch_size=setting.batch_size,
            seq_length=setting.seq_length,
            step=step,
            extra_flops=1 - whole.flops / step.flops,
            budget=limit,
            keeps_gathered=keeps_gathered,
        )

    if limit is None or whole.peak <= limit:
        if limit is not None and setting.gpus > 1:
            gathered = step_of(nothing, keeps_gathered=True)
            if gathered.peak <= limit:
                return plan(nothing, gathered, keeps_gathered=True)
        return plan(nothing, whole)
    uniform = {level: step_of([level] * blocks) for level in Recompute}
    least = min(uniform.values(), key=lambda step: step.peak)
    if least.peak > limit:
        what = f"a training step of {setting.batch_size} x {setting.seq_length:,} tokens does not fit"
        got, expected = f"{least} with everything recomputed", f"at most {gib(limit)} GiB"
        remedy = "Use a smaller batch or shorter rows, adapters (LoRA), an 8-bit optimizer, or more GPUs."
        raise LigerzooError(what, where="activation budget", got=got, expected=expected, remedy=remedy)
    candidates = _candidates(blocks, uniform)
    low, high = 0, len(candidates) - 1  # the first candidate that fits is in low..high
    while low < high:
        middle = (low + high) // 2
        if step_of(candidates[middle]).peak <= limit:
            high = middle
        else:
            low = middle + 1
    return plan(candidates[low], step_of(candidates[low]))


def _candidates(blocks: int, uniform: dict[Recompute, StepMemory]) -> list[list[Recompute]]:
    """Returns plans by increasing recomputation: the first blocks at one level, the others at the level before."""
    plans = [[Recompute.NOTHING] * blocks]
    levels = efficient_levels(uniform)
    for before, level in pairwise(levels):
        plans += [[level] * count + [before] * (blocks - count) for count in range(1, blocks + 1)]
    return plans


def efficient_levels(uniform: Mapping[Recompute, StepMemory]) -> list[Recompute]:
    """Returns the levels worth using: those with the least time per byte saved, the lower convex hull.

    Args:
        uniform: a step in which all blocks have the level.
    """

    def point(level: Recompute) -> tuple[int, float]:
        step, whole = uniform[level], uniform[Recompute.NOTHING]
        saved = sum(whole.kept) - sum(step.kept)
        # Elementwise recomputation reads and writes about what it saves.
        return saved, (step.flops - whole.flops) / _FLOPS + 2 * saved / _BANDWIDTH

    levels = [Recompute.NOTHING]
    while True:
        saved, seconds = point(levels[-1])
        cheaper = {
            level: (point(level)[1] - seconds) / (point(level)[0] - saved)
            for level in Recompute
            if level > levels[-1] and point(level)[0] > saved
        }
        if not cheaper:
            return levels
        levels.append(min(cheaper, key=lambda level: cheaper[level]))


def budget_bytes(
    model: nn.Module, budget: float | Literal["auto"] | None, device: torch.device | None = None
) -> int | None:
    """Returns a budget in bytes, see `plan_activations`; None for no limit.

    Raises:
        LigerzooError: the budget is neither "auto", None nor a positive number.
    """
    if budget is None:
        return None
    if budget == "auto":
        device = next(model.parameters()).device if device is None else device
        return _free_bytes(model, device) if device.type == "cuda" else None
    check(None, POSITIVE._replace(expected='a positive number of GiB, "auto" or None'), budget=budget)
    return int(budget * 2**30)


def _free_bytes(model: nn.Module, device: torch.device) -> int:
    """Returns what this process may use on the GPU for this model: free memory, and what PyTorch holds already."""
    free, total = torch.cuda.mem_get_info(device)
    own = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    others = max(0, torch.cuda.memory_allocated(device) - own)
    available = free + torch.cuda.memory_reserved(device) - others
    return int(available - RESERVE - RESERVED_SHARE * total)


def apply_activation_plan(model: CausalLM, plan: ActivationPlan) -> None:
    """Makes backward recompute what a plan says. Switches `gradient_checkpointing` of the decoder off.

    Args:
        model: the model that was planned for, or the same model sharded.
        plan: from `plan_activations`.

    Raises:
        LigerzooError: the plan is for another number of blocks.
    """
    decoder = model.model
    if len(plan.levels) != len(decoder.layers):
        what = "an activation plan for another model"
        raise LigerzooError(what, where="plan", got=f"{len(plan.levels)} blocks", expected=len(decoder.layers))
    decoder.gradient_checkpointing = False
    decoder.activation_plan = plan.levels
