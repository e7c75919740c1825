"""Predicts the parameters, FLOPs and memory of training a model, and the setting that fits a GPU."""

from __future__ import annotations

from dataclasses import replace

from ligerzoo.adapters import add_lora
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory.plan import WORDS, ActivationPlan, choose_plan, efficient_levels
from ligerzoo.memory.simulation import COUNTS, StepMemory, gib, on_meta, simulate, with_unit
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.training_setting import TrainingSetting

FLOPS = (" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP", " PFLOP", " EFLOP")


def predict_training(model: CausalLM, setting: TrainingSetting, gpu_memory: float | None = None) -> str:
    """Returns a page of text: parameters, FLOPs, memory per GPU with each level of recomputation, and what fits.

    Args:
        model: on any device; only shapes and dtypes are read.
        setting: what to train, and how.
        gpu_memory: GiB of a GPU that the step may use; None to show the memory only.

    Raises:
        LigerzooError: an argument is invalid.
    """
    if setting.method not in ("full", "lora"):
        raise LigerzooError("unknown method", where="method", got=repr(setting.method), expected="full or lora")
    simulated = on_meta(model)
    if setting.method == "lora":
        add_lora(simulated, setting.lora_rank)
    blocks = len(simulated.model.layers)

    uniform = {level: simulate(simulated, setting, [level] * blocks) for level in Recompute}
    lines = _describe_model(simulated, setting, uniform[Recompute.NOTHING])
    lines += _describe_memory(uniform)
    if gpu_memory is not None:
        plan = _largest_fit(simulated, setting, int(gpu_memory * 2**30))
        lines += ["", *_describe_fit(plan, setting, uniform, gpu_memory)]
    return "\n".join(lines)


def _describe_model(model: CausalLM, setting: TrainingSetting, step: StepMemory) -> list[str]:
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tokens = setting.batch_size * setting.seq_length
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    gpus = "1 GPU" if setting.gpus == 1 else f"{setting.gpus} GPUs (FSDP2)"
    return [
        f"training with {setting.batch_size} x {setting.seq_length:,} tokens per GPU, {gpus}, {setting.method}, "
        f"{setting.optimizer}, {' and '.join(dtypes)}",
        f"  {'parameters':<16}{parameters:,} ({with_unit(parameters, COUNTS)})",
        f"  {'trained':<16}{trained:,} ({trained / parameters:.3%})",
        f"  {'per token':<16}{with_unit(step.flops / tokens, FLOPS)}",
        f"  {'per step':<16}{with_unit(step.flops, FLOPS)} per GPU, for {tokens:,} tokens",
    ]


def _describe_memory(uniform: dict[Recompute, StepMemory]) -> list[str]:
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


def _largest_fit(model: CausalLM, setting: TrainingSetting, limit: int) -> ActivationPlan | None:
    """Returns a plan for the batch of the setting, or else for the largest smaller one that fits; None if none does."""
    sizes, blocks = range(1, setting.batch_size + 1), len(model.model.layers)

    def fits(batch_size: int) -> bool:
        tried = replace(setting, batch_size=batch_size)
        return any(simulate(model, tried, [level] * blocks).peak <= limit for level in reversed(Recompute))

    low, high = 0, len(sizes)  # the first `low` sizes fit
    if fits(setting.batch_size):
        low = high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return choose_plan(model, replace(setting, batch_size=low), limit) if low else None


def _describe_fit(
    plan: ActivationPlan | None, setting: TrainingSetting, uniform: dict[Recompute, StepMemory], gpu_memory: float
) -> list[str]:
    if plan is None:
        return [
            f"does not fit {gpu_memory:g} GiB, even with batch size 1 and everything recomputed; use shorter rows, "
            "LoRA, an 8-bit optimizer, or more GPUs"
        ]
    smaller = plan.batch_size < setting.batch_size
    fitting = f"batch size {plan.batch_size} fits {gpu_memory:g} GiB"
    if smaller:
        least = min(step.peak for step in uniform.values())
        fitting = f"batch size {setting.batch_size} needs at least {gib(least)} GiB; {fitting}"
    return [f"{fitting} with activation budget {gpu_memory:g}:", *str(plan).splitlines()]
