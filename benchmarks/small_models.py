"""Training steps of a 125M Llama, which Python can launch more slowly than a GPU computes them.

    python -m benchmarks.small_models

Milliseconds per step: forward, backward and AdamW, bf16 weights and states, random tokens. Providers: ligerzoo with an
eager loop, as CUDA graphs (`CapturedStep` with the optimizer of `ligerzoo train`, which also measures the norm of the
gradients and rounds stochastically), and compiled; transformers eager and compiled. The loops use torch's fused AdamW.
Before that, ligerzoo trains a few steps eagerly and captured from the same weights: with packed rows, the bits of the
weights must be equal; without, cuDNN adds gradients in an order that varies. Writes the file after each row, and starts
no row after `--seconds`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import save_result, seconds_per_call
from ligerzoo.models import Llama, LlamaConfig
from ligerzoo.train.captured_step import CapturedStep
from ligerzoo.train.optimizers import SkipNonFinite, make_optimizer

SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
SHAPES = {"8x1024": (8, 1024), "1x512": (1, 512)}

Step = Callable[[], object]


def new_ligerzoo(device: str) -> nn.Module:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**SIZES), device=device, dtype=torch.bfloat16).train()


def new_transformers(device: str) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(**SIZES, use_cache=False)
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return model.train()  # type: ignore[no-any-return]


def batch(shape: tuple[int, int], device: str, *, segments: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(SIZES["vocab_size"], shape, device=device)
    inputs = {"input_ids": ids, "labels": ids}
    if segments > 1:
        positions = torch.arange(shape[1]) % (shape[1] // segments)
        inputs["position_ids"] = positions.expand(shape).contiguous()
    return inputs


def plain_loop(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    call: Any = model

    def step() -> None:
        call(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def captured(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    optimizer = make_optimizer(model, lr=1e-5, stochastic_rounding=True)
    take_step = CapturedStep(model, optimizer, skip=SkipNonFinite(optimizer), capture="on")
    return lambda: take_step(inputs)


def compiled(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    torch._dynamo.reset()
    return plain_loop(torch.compile(model, dynamic=False), inputs)  # type: ignore[arg-type]


PROVIDERS: dict[str, tuple[Callable[[str], nn.Module], Callable[[nn.Module, dict[str, Tensor]], Step]]] = {
    "ligerzoo captured": (new_ligerzoo, captured),
    "ligerzoo eager": (new_ligerzoo, plain_loop),
    "transformers eager": (new_transformers, plain_loop),
    "ligerzoo compiled": (new_ligerzoo, compiled),
    "transformers compiled": (new_transformers, compiled),
}


def milliseconds_per_step(step: Step, device: str) -> float:
    return 1e3 * seconds_per_call(step, device=device, warmup=5, rounds=5, calls=20)


def same_bits(shape: tuple[int, int], device: str, segments: int) -> dict[str, Any]:
    """Trains 6 steps of 2 micro-batches eagerly and captured, and compares the weights."""
    weights, reason = [], None
    for capture in ("off", "on"):
        model = new_ligerzoo(device)
        optimizer = make_optimizer(model, lr=1e-3, stochastic_rounding=True)
        take_step = CapturedStep(model, optimizer, max_norm=1.0, capture=capture)  # type: ignore[arg-type]
        torch.manual_seed(1)
        for _ in range(6):
            pair = [batch(shape, device, segments=segments) for _ in range(2)]
            loss, _ = take_step(pair, 2 * shape[0] * (shape[1] - segments))
        weights.append(([parameter.detach().clone() for parameter in model.parameters()], float(loss)))
        reason = take_step.reason
    (eager, eager_loss), (graphs, graph_loss) = weights
    equal = [torch.equal(a, b) for a, b in zip(eager, graphs, strict=True)]
    return {"equal": f"{sum(equal)} of {len(equal)}", "losses": [eager_loss, graph_loss], "reason": reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/small_models.json"))
    parser.add_argument("--seconds", type=float, default=90, help="no row starts after this time")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    device, begin = arguments.device, time.perf_counter()
    results: dict[str, dict[str, Any]] = {}

    def row(group: str, name: str, measure: Callable[[], Any]) -> None:
        if time.perf_counter() - begin > arguments.seconds:
            return
        try:
            value = measure()
        except Exception as error:  # a peer that is not installed, or fails on this machine
            value = {"error": " ".join(str(error).split())[:300]}
        results.setdefault(group, {})[name] = value
        print(f"{time.perf_counter() - begin:6.1f} s  {group}  {name}: {value}", flush=True)
        save_result(arguments.out, {"what": __doc__, "results": results}, {"milliseconds per step": results})
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()

    for name, segments in (("one segment", 1), ("packed", 4)):
        row("weights after 6 steps, eager and captured", name, lambda n=segments: same_bits((2, 2048), device, n))  # type: ignore[misc]
    for provider, (load, make) in PROVIDERS.items():
        for shape_name, shape in SHAPES.items():

            def measure(load: Any = load, make: Any = make, shape: Any = shape) -> float:
                inputs = batch(shape, device)
                return milliseconds_per_step(make(load(device), inputs), device)

            row(shape_name, provider, measure)
    for provider in ("ligerzoo captured", "ligerzoo eager"):
        load, make = PROVIDERS[provider]

        def packed(load: Any = load, make: Any = make) -> float:
            return milliseconds_per_step(make(load(device), batch((8, 1024), device, segments=4)), device)

        row("8x1024 packed", provider, packed)


if __name__ == "__main__":
    main()
