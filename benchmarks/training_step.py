"""A whole training step of a Llama-3.2-1B shape: ligerzoo against transformers, with and without liger-kernel.

    python -m benchmarks.training_step --out benchmarks/results/training_step.json

bf16 weights and AdamW states, random token ids. Plain transformers runs once, before liger-kernel patches it; the
others take turns for several rounds in the same process. Each turn builds its model anew, from the same seed, so that a
turn's peak memory is its own and the first losses can be compared.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import milliseconds, write_result

LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


def ligerzoo_model() -> nn.Module:
    from ligerzoo.models import Llama, LlamaConfig

    return Llama(LlamaConfig(**LLAMA_1B), device="cuda", dtype=torch.bfloat16)


def transformers_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMA_1B, use_cache=False, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.float()
    return model


def liger_model() -> nn.Module:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = transformers_model()
    apply_liger_kernel_to_llama(rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True, model=model)
    return model


# liger-kernel replaces functions of transformers' module: plain transformers goes first and only once.
ONCE: dict[str, Callable[[], nn.Module]] = {"transformers": transformers_model}
IN_TURN: dict[str, Callable[[], nn.Module]] = {"ligerzoo": ligerzoo_model, "transformers + liger-kernel": liger_model}


def measure(build: Callable[[], nn.Module], input_ids: Tensor, weights: dict[str, Tensor]) -> dict[str, float]:
    """One turn: the median step, the peak memory, and the loss before the first step."""
    gc.collect()  # for transformers' models lie in reference cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build()
    model.load_state_dict(weights)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    losses: list[Tensor] = []

    def step() -> None:
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    time = milliseconds(step, warmup=5, repeats=20)
    memory = torch.cuda.max_memory_allocated() / 2**30
    return {
        "ms": time,
        "peak_gib": memory,
        "first_loss": float(losses[0]),
        "tokens_per_s": input_ids.numel() / time * 1e3,
    }


def profile(build: Callable[[], nn.Module], input_ids: Tensor) -> str:
    """Where the time of a step goes, by kernel."""
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for _ in range(3):
        model(input_ids=input_ids, labels=input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        model(input_ids=input_ids, labels=input_ids).loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
    return profiler.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training_step.json"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--profile", action="store_true", help="also write, beside the result, where ligerzoo's step spends its time"
    )
    arguments = parser.parse_args()

    torch.manual_seed(0)
    input_ids = torch.randint(LLAMA_1B["vocab_size"], (arguments.batch, arguments.length), device="cuda")
    weights = {name: tensor.cpu() for name, tensor in ligerzoo_model().state_dict().items()}

    turns: dict[str, list[dict[str, float]]] = {
        name: [measure(build, input_ids, weights)] for name, build in ONCE.items()
    }
    for _ in range(arguments.rounds):
        for name, build in IN_TURN.items():
            try:
                turns.setdefault(name, []).append(measure(build, input_ids, weights))
            except ImportError as error:
                print(f"{name}: {error}")
    providers = {
        name: {key: statistics.median(turn[key] for turn in results) for key in results[0]}
        | {"all_ms": [turn["ms"] for turn in results]}
        for name, results in turns.items()
        if results
    }
    ours, peer = providers["ligerzoo"], providers.get("transformers + liger-kernel")
    ratios = {key: ours[key] / peer[key] for key in ("ms", "peak_gib")} if peer else {}
    shape = {"model": LLAMA_1B, "batch": arguments.batch, "length": arguments.length}
    write_result(
        arguments.out, {"what": __doc__, "shape": shape, "providers": providers, "ligerzoo / liger-kernel": ratios}
    )
    if arguments.profile:
        arguments.out.with_suffix(".profile.txt").write_text(profile(ligerzoo_model, input_ids))


if __name__ == "__main__":
    main()
