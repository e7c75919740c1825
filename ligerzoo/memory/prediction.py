"""Predicts what training a model takes: memory, FLOPs, communication and time; and the setting that fits GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from ligerzoo.adapters import add_lora
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory.divided import divided
from ligerzoo.memory.mesh_plan import MeshPlan, Rejected, SimulatedSteps, named, plan_mesh, propose_mesh
from ligerzoo.memory.plan import WORDS, efficient_levels
from ligerzoo.memory.simulation import COUNTS, StepMemory, gib, on_meta, with_unit
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.training_setting import GPURates, TrainingSetting

H100_GIB = 76.0
"""GiB of an H100 with 80 GB that a step may use, see `ligerzoo.memory.plan.RESERVE`."""

FLOPS = (" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP", " PFLOP", " EFLOP")


def predict_training(
    model: CausalLM, setting: TrainingSetting, gpu_memory: float | None = None, rates: GPURates | None = None
) -> str:
    """Returns a page of text: parameters, FLOPs, memory per GPU with each level of recomputation, and what fits.

    With several GPUs also what they send to each other, and how long a step takes. See `plan_training`.
    """
    return str(plan_training(model, setting, gpu_memory, rates))


def plan_training(
    model: CausalLM, setting: TrainingSetting, gpu_memory: float | None = None, rates: GPURates | None = None
) -> TrainingPlan:
    """Plans training: the memory of a GPU, what it sends, and the time of a step; and the mesh of several GPUs.

    Args:
        model: on any device; only shapes and dtypes are read.
        setting: what to train, and how. Without a mesh, that of several GPUs is the fastest that fits.
        gpu_memory: GiB of a GPU that the step may use. None for 76 with several GPUs, which an H100 has, and no limit
            with one.
        rates: of the GPUs; None for those of an H100.

    Raises:
        LigerzooError: an argument is invalid, a layer cannot be divided over the mesh, or this process has a process
            group and the mesh has `context`, `tensor` or `expert`.
    """
    if setting.method not in ("full", "lora"):
        raise LigerzooError("unknown method", where="method", got=repr(setting.method), expected="full or lora")
    rates, simulated = rates or GPURates(), on_meta(model)
    if setting.method == "lora":
        add_lora(simulated, setting.lora_rank)
    if gpu_memory is None and setting.gpus > 1:
        gpu_memory = H100_GIB
    limit = None if gpu_memory is None else int(gpu_memory * 2**30)
    rejected: list[Rejected] = []
    if setting.gpus > 1 and setting.mesh is None and limit is not None:
        best, rejected = propose_mesh(simulated, setting, limit, rates)
        setting = replace(setting, mesh="") if best is None else best.setting
    with divided(simulated, setting.sizes) as one:
        steps = SimulatedSteps(one, setting, rates)
        uniform = {level: steps.uniform(setting, level).step for level in Recompute}
    fitting = setting if limit is None else _largest_fit(simulated, setting, limit, rates)
    step = None if fitting is None else plan_mesh(simulated, fitting, limit, rates)
    return TrainingPlan(
        setting=setting,
        gpu_memory=gpu_memory,
        parameters=sum(p.numel() for p in simulated.parameters()),
        trained=sum(p.numel() for p in simulated.parameters() if p.requires_grad),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in simulated.parameters()})),
        uniform=uniform,
        step=step,
        rejected=tuple(rejected),
    )


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What training a model takes, for one GPU. `str(plan)` is a page.

    Attributes:
        setting: what is trained, and how.
        gpu_memory: GiB of a GPU that a step may use; None for no limit.
        parameters: their number.
        trained: the number of those that train.
        dtypes: of the parameters.
        uniform: the memory of a step in which backward recomputes one level of all blocks.
        step: the step that fits, with a smaller batch if that of the setting does not; None if none does.
        rejected: the meshes that were tried and are not proposed.
    """

    setting: TrainingSetting
    gpu_memory: float | None
    parameters: int
    trained: int
    dtypes: tuple[str, ...]
    uniform: Mapping[Recompute, StepMemory]
    step: MeshPlan | None
    rejected: tuple[Rejected, ...]

    def __str__(self) -> str:
        lines = [*self._describe_model(), *_describe_memory(self.uniform)]
        if self.gpu_memory is not None:
            lines += ["", *_describe_fit(self.step, self.setting, self.uniform, self.gpu_memory)]
        if self.step is not None:
            lines += ["", str(self.step)]
        if self.rejected:
            lines += ["", "other meshes:", *(f"  {named(one.sizes):<42}{one.reason}" for one in self.rejected)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Returns the plan as numbers, texts, lists and dicts, for JSON."""
        return {
            "setting": asdict(self.setting),
            "gpu_memory_gib": self.gpu_memory,
            "parameters": self.parameters,
            "trained": self.trained,
            "peak_bytes": {level.name: step.peak for level, step in self.uniform.items()},
            "step": None if self.step is None else self.step.as_dict(),
            "other_meshes": {named(one.sizes): one.reason for one in self.rejected},
        }

    def _describe_model(self) -> list[str]:
        setting, flops = self.setting, self.uniform[Recompute.NOTHING].flops
        sizes = setting.sizes
        parts = sizes.context * sizes.tensor
        tokens = setting.batch_size * setting.seq_length
        gpus = "1 GPU" if setting.gpus == 1 else f"{setting.gpus:,} GPUs (mesh {named(sizes)})"
        per = "GPU" if parts == 1 else f"{parts} GPUs"
        return [
            f"training with {setting.batch_size} x {setting.seq_length:,} tokens per {per}, {gpus}, {setting.method}, "
            f"{setting.optimizer}, {' and '.join(self.dtypes)}",
            f"  {'parameters':<16}{self.parameters:,} ({with_unit(self.parameters, COUNTS)})",
            f"  {'trained':<16}{self.trained:,} ({self.trained / self.parameters:.3%})",
            f"  {'per token':<16}{with_unit(flops * parts / tokens, FLOPS)}",
            f"  {'per step':<16}{with_unit(flops, FLOPS)} per GPU, for {tokens:,} tokens",
        ]


def _describe_memory(uniform: Mapping[Recompute, StepMemory]) -> list[str]:
    """Returns a table: a row for each level that saves memory."""
    whole = uniform[Recompute.NOTHING]
    columns = ("weights", "states", "gradients", "activations", "workspace", "peak")
    lines = ["", f"  {'GiB per GPU':<38}" + "".join(f"{name:>12}" for name in columns) + f"{'recomputed':>12}"]
    for level in efficient_levels(uniform):
        step = uniform[level]
        sizes = step.weights, step.optimizer_states, step.gradients, step.activations, step.workspace, step.peak
        cells = "".join(f"{gib(size):>12}" for size in sizes)
        lines.append(f"  {WORDS[level]:<38}{cells}{1 - whole.flops / step.flops:>12.1%}")
    return [*lines, "  (each at its own peak; recomputed: share of the matrix products)"]


def _largest_fit(model: CausalLM, setting: TrainingSetting, limit: int, rates: GPURates) -> TrainingSetting | None:
    """Returns the setting with its batch, or else with the largest smaller one that fits; None if none does."""
    with divided(model, setting.sizes) as one:

        def fits(batch_size: int) -> bool:
            tried = replace(setting, batch_size=batch_size)
            steps = SimulatedSteps(one, tried, rates)
            return any(steps.uniform(tried, level).step.peak <= limit for level in reversed(Recompute))

        low, high = 0, setting.batch_size  # the first `low` sizes fit
        if fits(high):
            low = high
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return replace(setting, batch_size=low) if low else None


def _describe_fit(
    step: MeshPlan | None, setting: TrainingSetting, uniform: Mapping[Recompute, StepMemory], gpu_memory: float
) -> list[str]:
    if step is None:
        return [
            f"does not fit {gpu_memory:g} GiB, even with batch size 1 and everything recomputed; use shorter rows, "
            "LoRA, an 8-bit optimizer, or more GPUs"
        ]
    plan = step.activations
    smaller = plan.batch_size < setting.batch_size
    fitting = f"batch size {plan.batch_size} fits {gpu_memory:g} GiB"
    if smaller:
        least = min(step.peak for step in uniform.values())
        fitting = f"batch size {setting.batch_size} needs at least {gib(least)} GiB; {fitting}"
    return [f"{fitting} with activation budget {gpu_memory:g}:", *str(plan).splitlines()]
