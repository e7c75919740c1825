"""Peak memory of training steps: predicted by counting (`ligerzoo.memory`) against measured on the GPU.

    python -m benchmarks.memory

bf16 weights and fused AdamW states, random weights and tokens. Each configuration runs two steps: the first compiles
kernels and creates states, the second is measured by `torch.cuda.max_memory_allocated`. Nothing is fitted.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import save_result
from benchmarks.training_step import LLAMA_1B
from ligerzoo import models
from ligerzoo.memory import (
    ActivationPlan,
    Recompute,
    StepMemory,
    TrainingSetting,
    apply_activation_plan,
    on_meta,
    simulate_step,
)
from ligerzoo.memory.plan import choose_plan

GIB = 2**30

LLAMA_8B: dict[str, Any] = LLAMA_1B | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip

QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_hidden_layers": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A configuration.

    Attributes:
        batch_size, seq_length: shape of a batch.
        plan: the level of all blocks, or GiB for a plan that fits.
        accumulate: whether gradients of an earlier microbatch exist.
    """

    batch_size: int
    seq_length: int
    plan: Recompute | float = Recompute.NOTHING
    accumulate: bool = False

    def __str__(self) -> str:
        plan = self.plan.name.lower() if isinstance(self.plan, Recompute) else f"budget {self.plan:g} GiB"
        return f"{self.batch_size} x {self.seq_length}, {plan}" + (", accumulated" if self.accumulate else "")


def train_queries_and_values(model: models.CausalLM) -> None:
    """Freezes all other weights, as with small adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "v_proj" in name)


LEVELS = tuple(Recompute)
FAMILIES: dict[str, tuple[Callable[[], models.CausalLM], Callable[[models.CausalLM], Any], list[Case]]] = {
    "Llama-3.2-1B": (
        lambda: models.Llama(models.LlamaConfig(**LLAMA_1B), device="cuda", dtype=torch.bfloat16),
        lambda model: None,
        [*(Case(8, 2048, level) for level in LEVELS), Case(4, 8192), Case(1, 2048), Case(8, 2048, accumulate=True),
         Case(8, 8192, 40.0)],
    ),
    "Qwen3-30B-A3B, 4 layers": (
        lambda: models.Qwen3Moe(models.Qwen3MoeConfig(**QWEN3_30B_A3B), device="cuda", dtype=torch.bfloat16),
        lambda model: None,
        [*(Case(4, 8192, level) for level in LEVELS), Case(1, 4096)],
    ),
    "Llama-3-8B, queries and values": (
        lambda: models.Llama(models.LlamaConfig(**LLAMA_8B), device="cuda", dtype=torch.bfloat16),
        train_queries_and_values,
        [Case(1, 8192), Case(2, 8192, Recompute.ELEMENTWISE), Case(4, 8192, Recompute.MLP)],
    ),
    "Llama-3-8B": (
        lambda: models.Llama(models.LlamaConfig(**LLAMA_8B), device="cuda", dtype=torch.bfloat16),
        lambda model: None,
        [*(Case(1, 8192, level) for level in LEVELS), Case(2, 8192), Case(4, 8192, 130.0), Case(4, 8192, 80.0)],
    ),
}  # fmt: skip


def choose(meta: models.CausalLM, case: Case) -> ActivationPlan:
    """Returns the plan of a case, with its prediction."""
    blocks = len(meta.model.layers)

    def simulate(levels: Any) -> StepMemory:
        return simulate_step(meta, case.batch_size, case.seq_length, levels, accumulate=case.accumulate)

    if not isinstance(case.plan, Recompute):
        setting = TrainingSetting(batch_size=case.batch_size, seq_length=case.seq_length, accumulate=case.accumulate)
        return choose_plan(meta, setting, int(case.plan * GIB))
    levels = (case.plan,) * blocks
    return ActivationPlan(
        levels=levels, batch_size=case.batch_size, seq_length=case.seq_length, step=simulate(levels), extra_flops=0.0,
        budget=None,
    )  # fmt: skip


def measure(model: models.CausalLM, optimizer: torch.optim.Optimizer, case: Case) -> dict[str, float]:
    """Returns the peak of the second step."""
    ids = torch.randint(model.config.vocab_size, (case.batch_size, case.seq_length), device="cuda")

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        if not case.accumulate:
            optimizer.zero_grad(set_to_none=True)

    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated()
    optimizer.zero_grad(set_to_none=True)
    return {"measured_gib": peak / GIB}


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (build, prepare, cases) in FAMILIES.items():
        model = build().train()
        prepare(model)
        meta = on_meta(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
        for case in cases:
            plan = choose(meta, case)
            apply_activation_plan(model, plan)
            gc.collect()
            torch.cuda.empty_cache()
            try:
                figures = measure(model, optimizer, case)
            except torch.OutOfMemoryError as error:
                figures = {"error": str(error)[:200]}  # type: ignore[dict-item]
                optimizer.zero_grad(set_to_none=True)
            predicted = plan.step.peak / GIB
            row = {"predicted_gib": predicted, **figures, "parts": str(plan.step)}
            if "measured_gib" in figures:
                row["error_percent"] = 100 * (predicted / figures["measured_gib"] - 1)
            print(f"{name}, {case}: {row}", flush=True)
            yield f"{name}, {case}", row
        del model, optimizer, meta
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory.json"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    cases: dict[str, Any] = {}
    for name, row in rows():
        cases[name] = row
        errors = [abs(row["error_percent"]) for row in cases.values() if "error_percent" in row]
        largest = {"cases": len(cases), "measured": len(errors), "largest_error_percent": max(errors, default=math.nan)}
        save_result(arguments.out, {"what": __doc__, "cases": cases, **largest}, {**largest, "cases": cases})


if __name__ == "__main__":
    main()
