"""Steps of transformers' Trainer: transformers alone, with liger-kernel, with our `apply`, and with our `wrap`.

    python -m benchmarks.trainer
    python -m benchmarks.trainer --model qwen3_30b_a3b_4_layers

"wrap, plain loop" and "bare" train without the Trainer: the wrapped model, and our own. bf16 weights and fused AdamW
states, random tokens, no gradient clipping. liger-kernel's experts run without autotuning, which takes minutes. Every
measurement runs in a new process, since liger-kernel patches transformers' modules, and all providers run once per
round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.measure import write_result
from benchmarks.training_step import LLAMA_1B
from ligerzoo import AutoModel, models
from ligerzoo.train.optimizers import make_optimizer

QWEN3_30B_A3B_4_LAYERS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Attributes:
        config: config of the model.
        patch: the function of liger-kernel that patches transformers.
        batch, length: size of the batch in rows and tokens.
        optimizer: name for `make_optimizer`, of the plain loop.
    """

    config: Any
    patch: str
    batch: int
    length: int
    optimizer: str = "adamw"


WORKLOADS = {
    "llama_1b": Workload(models.LlamaConfig(**LLAMA_1B), "apply_liger_kernel_to_llama", 8, 2048),
    "qwen3_30b_a3b_4_layers": Workload(
        models.Qwen3MoeConfig(**QWEN3_30B_A3B_4_LAYERS), "apply_liger_kernel_to_qwen3_moe", 8, 2048
    ),
    "tiny": Workload(models.LlamaConfig(**TINY), "apply_liger_kernel_to_llama", 2, 16),
}
PLAIN_LOOP = ("wrap, plain loop", "bare")
ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "LIGER_FUSED_MOE_AUTOTUNE": "0"}
"""Of the processes that measure."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def of_transformers(workload: Workload, checkpoint: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", attn_implementation="sdpa")
    return model.to(DEVICE)


def patched_by_liger(model: nn.Module, workload: Workload) -> nn.Module:
    import liger_kernel.transformers

    getattr(liger_kernel.transformers, workload.patch)(model=model)
    return model


def with_liger(workload: Workload, checkpoint: Path) -> nn.Module:
    return patched_by_liger(of_transformers(workload, checkpoint), workload)


def with_apply(workload: Workload, checkpoint: Path) -> nn.Module:
    from ligerzoo.integrations import apply

    model = of_transformers(workload, checkpoint)
    report = apply(model)
    print(report, file=sys.stderr)
    return model


def with_wrap(workload: Workload, checkpoint: Path) -> nn.Module:
    from ligerzoo.integrations.transformers import wrap

    return wrap(AutoModel.from_pretrained(checkpoint, device=DEVICE))


def bare(workload: Workload, checkpoint: Path) -> nn.Module:
    return AutoModel.from_pretrained(checkpoint, device=DEVICE)


PROVIDERS: dict[str, Callable[[Workload, Path], nn.Module]] = {
    "transformers": of_transformers,
    "transformers + liger-kernel": with_liger,
    "transformers + apply": with_apply,
    "wrap": with_wrap,
    "wrap, plain loop": with_wrap,
    "bare": bare,
}


def rows(workload: Workload, count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(workload.config.vocab_size, (count, workload.length))
    return [{"input_ids": row, "labels": row} for row in ids]


def now() -> float:
    """Seconds, after the device has finished."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train_in_trainer(model: nn.Module, workload: Workload, steps: int) -> list[float]:
    """Returns the time at the end of each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            ends.append(now())

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory, per_device_train_batch_size=workload.batch, max_steps=steps, max_grad_norm=0.0,
            learning_rate=1e-5, optim="adamw_torch_fused", save_strategy="no", report_to=[], disable_tqdm=True,
            logging_steps=10 * steps, use_cpu=DEVICE == "cpu",
        )  # fmt: skip
        data: Any = rows(workload, workload.batch * steps)
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    return ends


def train_in_plain_loop(model: nn.Module, workload: Workload, steps: int, **options: Any) -> list[float]:
    """Returns the time at the end of each step. `options` are those of the optimizer."""
    data = rows(workload, workload.batch * steps)
    optimizer = make_optimizer(list(model.train().parameters()), workload.optimizer, lr=1e-5, **options)
    ends = []
    for i in range(steps):
        ids = torch.stack([row["input_ids"] for row in data[i * workload.batch : (i + 1) * workload.batch]]).to(DEVICE)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(now())
    return ends


def measure(provider: str, workload: Workload, checkpoint: Path, steps: int, warmup: int) -> dict[str, Any]:
    """Returns the median step time after `warmup` steps, the peak memory, and the loss before the first step."""
    model = PROVIDERS[provider](workload, checkpoint)
    ids = torch.stack([row["input_ids"] for row in rows(workload, workload.batch)]).to(DEVICE)
    with torch.no_grad():
        first_loss = float(model(input_ids=ids[:1], labels=ids[:1]).loss)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ends = (train_in_plain_loop if provider in PLAIN_LOOP else train_in_trainer)(model, workload, steps)
    seconds = statistics.median(b - a for a, b in zip(ends[warmup:], ends[warmup + 1 :], strict=False))
    return {
        "ms": seconds * 1e3,
        "tokens_per_s": workload.batch * workload.length / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0,
        "first_loss": first_loss,
    }


def measured_apart(arguments: argparse.Namespace, provider: str, checkpoint: Path) -> dict[str, Any]:
    """`measure` in a new process."""
    output = checkpoint.parent / "measured.json"
    command = [sys.executable, "-m", "benchmarks.trainer", "--model", arguments.model, "--steps", str(arguments.steps)]
    command += ["--provider", provider, "--checkpoint", str(checkpoint), "--out", str(output)]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else str(done.returncode)}
    measured: dict[str, Any] = json.loads(output.read_text())
    return measured


def medians(results: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    good = [result for result in results if "error" not in result]
    if not good:
        yield "error", results[0]["error"]
        return
    for key in good[0]:
        yield key, statistics.median(result[key] for result in good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="llama_1b")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/trainer_MODEL.json")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16, help="training steps of each measurement")
    parser.add_argument("--only", nargs="+", choices=PROVIDERS, default=list(PROVIDERS), help="default: all")
    parser.add_argument("--provider", choices=PROVIDERS, help="measure this one, in this process")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint of --provider")
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.model]
    out = arguments.out or Path(f"benchmarks/results/trainer_{arguments.model}.json")
    if arguments.provider:
        result = measure(arguments.provider, workload, arguments.checkpoint, arguments.steps, arguments.steps // 4)
        out.write_text(json.dumps(result))
        return

    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "checkpoint"
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        model = AutoModel.from_config(workload.config, device=DEVICE, dtype=dtype)
        model.save_pretrained(checkpoint)
        del model
        results: dict[str, list[dict[str, Any]]] = {provider: [] for provider in arguments.only}
        for provider in tqdm(arguments.only * arguments.rounds, unit="measurement"):
            results[provider].append(measured_apart(arguments, provider, checkpoint))
    shape = {"batch": workload.batch, "length": workload.length}
    figures = {provider: dict(medians(rounds)) for provider, rounds in results.items()}
    write_result(out, {"what": __doc__, "shape": shape, "rounds": results}, {"shape": shape, "providers": figures})


if __name__ == "__main__":
    main()
