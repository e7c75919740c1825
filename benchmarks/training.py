"""Training steps of whole models: tokens per second and peak memory, in full and with LoRA, and the predicted memory.

    python -m benchmarks.training --workloads 'llama_8b_*' --providers ligerzoo 'transformers + liger-kernel'
    python -m benchmarks.training --workloads llama_8b_lora_1x8192
    python -m benchmarks.training --merge results/of/another/machine.json

Random bf16 weights and tokens, fused AdamW, no gradient clipping; two steps to warm up and three measured ones. As in
`ligerzoo train`, our AdamW rounds bf16 weights stochastically; that of the peers is torch's. gpt-oss-20b has our
`Fp8AdamW`. LoRA has rank 16 on all linear layers of the blocks, of Nemotron Nano 30B-A3B on experts too; of
Qwen3-30B-A3B, on those of attention. ligerzoo trains with the activation plan of a budget, and its LoRA updates are in
fp32. Its peers recompute nothing, or all blocks if that does not fit; PEFT's updates are in bf16, its fastest setting.
The setting that was measured is in the results.

Each provider measures the workloads of a model in a separate process. The file of results is written after each
measurement; errors are results too. A measurement replaces that of the same workload and provider, and drops those of
the workload that were measured with another GPU or other versions of packages.

transformers trains Qwen3.5 with flash-linear-attention's kernels where that is installed and works (0.6 refuses Triton
before 3.7.1 on Hopper, where its backward pass would be wrong), else in plain torch.

Needs, for the peers, transformers, accelerate, liger-kernel 0.8.5 and PEFT 0.21. Where there is no network:

    pip download --no-deps --dest .whl liger-kernel==0.8.5 peft==0.21
    pip install --no-deps --no-index .whl/*.whl --target /tmp/site && export PYTHONPATH=/tmp/site
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks import trainer
from benchmarks.decoding import CONFIGS, build, build_transformers, clean_up
from benchmarks.measure import compact_json, synchronize
from benchmarks.processes import Json, measured_apart
from benchmarks.row import OURS, reason
from benchmarks.trainer import DEVICE, ENVIRONMENT, patched_by_liger, train_in_plain_loop, train_in_trainer
from benchmarks.workloads import WorkloadResults, select
from ligerzoo.adapters import add_lora
from ligerzoo.convert import architecture_for_config
from ligerzoo.layers.flex_attention import flex_tiles
from ligerzoo.memory import apply_activation_plan, plan_activations
from ligerzoo.memory.allocator import let_segments_grow
from ligerzoo.train.optimizer_step import trains_bfloat16

WARMUP, STEPS = 2, 3
RANK, ALPHA = 16, 32
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEARS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
HYBRID_LINEARS = (*ATTENTION, "in_proj", "out_proj", "up_proj", "down_proj")
LIGER_NAMES = {"qwen3_5_text": "qwen3_5"}
"""liger-kernel's names of model types, where they differ from transformers'."""
GIB = 2**30


@dataclass(frozen=True)
class Workload:
    """A model, what of it trains, and the batch.

    Attributes:
        model: name of a config in `benchmarks.decoding.CONFIGS`.
        batch, length: rows and tokens per row.
        adapted: names of the linear layers with LoRA; empty to train all weights.
        optimizer: name for `make_optimizer`.
    """

    model: str
    batch: int
    length: int
    adapted: tuple[str, ...] = ()
    optimizer: str = "adamw"

    @property
    def in_trainer(self) -> trainer.Workload:
        config = CONFIGS[self.model]
        model_type = architecture_for_config(type(config)).model_type
        patch = f"apply_liger_kernel_to_{LIGER_NAMES.get(model_type, model_type)}"
        return trainer.Workload(config, patch, self.batch, self.length, self.optimizer)


WORKLOADS = {
    "llama_1b_8x2048": Workload("llama_1b", 8, 2048),
    "llama_8b_1x8192": Workload("llama_8b", 1, 8192),
    "llama_8b_2x8192": Workload("llama_8b", 2, 8192),
    "llama_8b_4x8192": Workload("llama_8b", 4, 8192),
    "llama_8b_lora_1x8192": Workload("llama_8b", 1, 8192, LINEARS),
    "llama_8b_lora_4x8192": Workload("llama_8b", 4, 8192, LINEARS),
    "qwen3_30b_a3b_lora_1x8192": Workload("qwen3_30b_a3b", 1, 8192, ATTENTION),
    "gpt_oss_20b_1x8192": Workload("gpt_oss_20b", 1, 8192, optimizer="adamw-fp8"),
    "qwen3_5_4b_1x8192": Workload("qwen3_5_4b", 1, 8192),
    "gemma4_e4b_1x4096": Workload("gemma4_e4b", 1, 4096),
    "gemma4_e4b_1x8192": Workload("gemma4_e4b", 1, 8192),
    "nemotron_nano_30b_lora_1x8192": Workload("nemotron_nano_30b", 1, 8192, HYBRID_LINEARS),
    "tiny_2x16": Workload("tiny", 2, 16),
    "tiny_1x8": Workload("tiny", 1, 8),
    "tiny_lora_2x16": Workload("tiny", 2, 16, LINEARS),
    "tiny_hybrid_2x16": Workload("tiny_hybrid", 2, 16),
    "tiny_moe_lora_2x16": Workload("tiny_moe", 2, 16, ATTENTION),
    "tiny_gemma4_2x16": Workload("tiny_gemma4", 2, 16),
    "tiny_nemotron_lora_2x16": Workload("tiny_nemotron", 2, 16, HYBRID_LINEARS),
}

# Models


def build_ours(workload: Workload) -> nn.Module:
    model = build(CONFIGS[workload.model])
    if workload.adapted:
        add_lora(model, RANK, ALPHA, workload.adapted)
    return model


def train_ours(model: nn.Module, workload: trainer.Workload, steps: int) -> list[float]:
    is_stochastic = workload.optimizer == "adamw" and trains_bfloat16(model)
    return train_in_plain_loop(model, workload, steps, stochastic_rounding=is_stochastic)


def build_peer(workload: Workload, attention: str = "sdpa") -> nn.Module:
    """transformers' model with liger-kernel's layers and loss; without them and with SDPA on a CPU."""
    is_on_gpu = DEVICE == "cuda"
    model: Any = build_transformers(CONFIGS[workload.model], attention if is_on_gpu else "sdpa")
    model.config.use_cache = False
    return patched_by_liger(model, workload.in_trainer) if is_on_gpu else model


def build_flex_peer(workload: Workload) -> nn.Module:
    """`build_peer` with FlexAttention, in tiles that fit: its own exceed the shared memory for heads of 512."""
    from transformers import AttentionInterface
    from transformers.integrations.flex_attention import flex_attention_forward

    def attend(module: nn.Module, q: Tensor, *arguments: Any, **options: Any) -> Any:
        return flex_attention_forward(module, q, *arguments, **options, kernel_options=flex_tiles(q))

    AttentionInterface.register("flex_attention", attend)
    torch._dynamo.config.recompile_limit = 128  # above it, torch would run FlexAttention without a kernel
    return build_peer(workload, "flex_attention")


def build_peft(workload: Workload) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(workload.adapted), task_type="CAUSAL_LM")
    model: Any = build_peer(workload)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


# Settings, the fastest first. The first that fits is measured.

Budget = float | str


def our_settings(model: Any, workload: Workload, budgets: Sequence[Budget]) -> Iterator[Json]:
    """Applies the activation plan of each budget, and yields its description with the predicted peak."""
    for budget in budgets:
        plan = plan_activations(
            model, batch_size=workload.batch, seq_length=workload.length, budget=budget, optimizer=workload.optimizer
        )
        apply_activation_plan(model, plan)
        levels = {level.name.lower(): plan.levels.count(level) for level in sorted(set(plan.levels))}
        blocks = ", ".join(f"{count} blocks {level}" for level, count in levels.items())
        limit = "" if plan.budget is None else f" ({plan.budget / GIB:.1f} GiB)"
        yield {"setting": f"budget {budget}{limit}: {blocks}", "predicted_gib": plan.step.peak / GIB}


def peer_settings(model: Any, workload: Workload, budgets: Sequence[Budget]) -> Iterator[Json]:
    model.gradient_checkpointing_disable()
    yield {"setting": "nothing recomputed"}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    yield {"setting": "all blocks recomputed"}


def peft_settings(model: Any, workload: Workload, budgets: Sequence[Budget]) -> Iterator[Json]:
    for setting in peer_settings(model, workload, budgets):
        yield {"setting": f"{setting['setting']}, updates in bf16", "peft": metadata.version("peft")}


@dataclass(frozen=True)
class Provider:
    """A way to train.

    Attributes:
        build: returns the model.
        settings: applies settings to the model, and yields the description of each.
        train: trains and returns the time at the end of each step.
        methods: what it trains: "full", "lora" or both.
    """

    build: Callable[[Workload], nn.Module]
    settings: Callable[[Any, Workload, Sequence[Budget]], Iterator[Json]]
    train: Callable[[nn.Module, trainer.Workload, int], list[float]]
    methods: tuple[str, ...]


PROVIDERS = {
    OURS: Provider(build_ours, our_settings, train_ours, ("full", "lora")),
    "transformers + liger-kernel": Provider(build_peer, peer_settings, train_in_plain_loop, ("full",)),
    "transformers + liger-kernel, FlexAttention": Provider(
        build_flex_peer, peer_settings, train_in_plain_loop, ("full",)
    ),
    "transformers + PEFT + liger-kernel": Provider(build_peft, peft_settings, train_in_plain_loop, ("lora",)),
    "Trainer + PEFT + liger-kernel": Provider(build_peft, peft_settings, train_in_trainer, ("lora",)),
}


# Measuring


@dataclass(frozen=True)
class Start:
    """Builds a provider's model in a new process; see `benchmarks.processes.measured_apart`.

    Attributes:
        provider: its name.
        first: a workload; all that are measured in the process have its model and train the same of it.
        budgets: activation budgets of ligerzoo, in GiB or "auto". A smaller one is used if a step runs out of memory.
    """

    provider: str
    first: str
    budgets: tuple[Budget, ...]

    def __call__(self) -> Callable[[str], Json]:
        provider, begin = PROVIDERS[self.provider], time.perf_counter()
        torch.manual_seed(0)
        model = provider.build(WORKLOADS[self.first])
        synchronize(DEVICE)
        built = {"build_s": time.perf_counter() - begin}
        return lambda name: measure(provider, model, WORKLOADS[name], self.budgets) | built


def measure(provider: Provider, model: nn.Module, workload: Workload, budgets: Sequence[Budget]) -> Json:
    """Measures one workload with the first setting that fits.

    Returns:
        setting: what was recomputed.
        tokens_per_s, ms: of the median step.
        all_ms: milliseconds of each measured step.
        peak_gib: peak memory, weights and optimizer states included.
        predicted_gib, error_percent: our prediction of the peak, and its error; of ligerzoo only.
    """
    failed = ""
    release(model)
    for setting in provider.settings(model, workload, budgets):
        try:
            return setting | figures(provider.train(model, workload.in_trainer, WARMUP + STEPS), workload, setting)
        except torch.OutOfMemoryError as error:
            failed = reason(error)
        release(model)
    return {"error": failed}


def release(model: nn.Module) -> None:
    """Frees all but the model's weights, and starts a new peak."""
    model.zero_grad(set_to_none=True)
    clean_up()


def figures(ends: list[float], workload: Workload, setting: Json) -> Json:
    """What `measure` adds to a setting, from the times at the ends of all steps."""
    all_ms = [1e3 * (end - begin) for begin, end in zip(ends[WARMUP - 1 :], ends[WARMUP:], strict=False)]
    ms = statistics.median(all_ms)
    peak = torch.cuda.max_memory_allocated() / GIB if DEVICE == "cuda" else 0.0
    found = {"tokens_per_s": workload.batch * workload.length / ms * 1e3, "ms": ms, "all_ms": all_ms, "peak_gib": peak}
    if peak and "predicted_gib" in setting:
        found["error_percent"] = 100 * (setting["predicted_gib"] / peak - 1)
    return found


def measured(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Json]]:
    """Yields (workload, provider, result)."""
    names = select(arguments.workloads, tuple(WORKLOADS))
    for (_, adapted), group in groupby(names, lambda name: (WORKLOADS[name].model, WORKLOADS[name].adapted)):
        workloads = list(group)
        for provider in arguments.providers:
            if ("lora" if adapted else "full") in PROVIDERS[provider].methods:
                start = Start(provider, workloads[0], tuple(arguments.budgets))
                for name, result in measured_apart(start, workloads, arguments.limit):
                    yield name, provider, result


def facts(workload: str) -> Json:
    """What the report needs to know about a workload."""
    return vars(WORKLOADS[workload])


def budget(text: str) -> Budget:
    return text if text == "auto" else float(text)


Results = partial(WorkloadResults, workloads=tuple(WORKLOADS), providers=tuple(PROVIDERS), facts=facts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", default=[], help=f"names or patterns of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS), help="default: all")
    parser.add_argument(
        "--budgets", nargs="+", type=budget, metavar="GIB", default=["auto", 130.0, 124.0],
        help='activation budgets of ligerzoo, GiB or "auto"; the next is used if a step runs out of memory. '
        "Default: auto 130 124",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training.json"))
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds that a provider may take for a workload; default: 120"
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", default=[], help="add the results of files; measure nothing"
    )
    arguments = parser.parse_args(argv)

    results = Results(arguments.out)
    if arguments.merge:
        results.merge(*arguments.merge)
        return
    os.environ.update(ENVIRONMENT)
    let_segments_grow()
    for workload, provider, result in tqdm(measured(arguments), unit="measurement"):
        results.add(workload, provider, result)
        tqdm.write(f"{workload}, {provider}: {compact_json(result, 0)}")


if __name__ == "__main__":
    main()
