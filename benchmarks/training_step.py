"""A training step of a whole model: ligerzoo against transformers, with and without liger-kernel.

    python -m benchmarks.training_step
    python -m benchmarks.training_step --model qwen2_vl_2b

bf16 weights and AdamW states, random tokens and images. Plain transformers runs once, before liger-kernel patches it;
the other providers alternate for several rounds in the same process. Each round reloads the same checkpoint, so that
peak memory is per provider and the first losses are comparable.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import milliseconds, write_result
from ligerzoo import AutoModel, models

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

QWEN2_VL_2B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vision_config": models.Qwen2VLVisionConfig(hidden_size=1536),
}

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Attributes:
        model: the ligerzoo class.
        config: its config.
        hf_class: the transformers class that loads the checkpoint.
        liger: the liger-kernel function that patches the transformers model, and its options.
        inputs: (batch, length) -> the batch; `length` counts text tokens per row.
        for_transformers: inputs -> the extra inputs that transformers needs.
        batch, length: the default size of the batch.
    """

    model: Callable[..., models.CausalLM]
    config: Any
    hf_class: str
    liger: tuple[str, dict[str, bool]]
    inputs: Callable[[int, int], Inputs]
    for_transformers: Callable[[Inputs], Inputs]
    batch: int
    length: int


def text(vocab_size: int, batch: int, length: int) -> Inputs:
    ids = torch.randint(vocab_size, (batch, length), device="cuda")
    return {"input_ids": ids, "labels": ids}


def images(batch: int, length: int, *, count: int = 4, side: int = 896) -> Inputs:
    """Rows of four images of 896 x 896 pixels, each between its start and end token, followed by text."""
    config = models.Qwen2VLConfig()
    rows = side // config.vision_config.patch_size
    around, within = torch.tensor([config.vision_start_token_id]), torch.tensor([config.vision_end_token_id])
    picture = torch.cat([around, torch.full((rows**2 // 4,), config.image_token_id), within])
    ids = torch.cat([picture.repeat(count).expand(batch, -1), torch.randint(151000, (batch, length))], 1).cuda()
    labels = ids.clone()
    labels[:, :-length] = -100
    pixels = torch.randn(batch * count * rows**2, 3 * 2 * 14 * 14, device="cuda")
    grid = torch.tensor([[1, rows, rows]]).repeat(batch * count, 1)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels, "image_grid_thw": grid}


WORKLOADS = {
    "llama_1b": Workload(
        model=models.Llama,
        config=models.LlamaConfig(**LLAMA_1B),
        hf_class="AutoModelForCausalLM",
        liger=("apply_liger_kernel_to_llama", {"rope": True, "swiglu": True}),
        inputs=lambda batch, length: text(128256, batch, length),
        for_transformers=lambda inputs: {},
        batch=8,
        length=2048,
    ),
    "qwen2_vl_2b": Workload(
        model=models.Qwen2VL,
        config=models.Qwen2VLConfig(**QWEN2_VL_2B),
        hf_class="AutoModelForImageTextToText",
        liger=("apply_liger_kernel_to_qwen2_vl", {"rope": True, "swiglu": True, "layer_norm": True}),
        inputs=images,
        for_transformers=lambda inputs: {
            "mm_token_type_ids": (inputs["input_ids"] == models.Qwen2VLConfig.image_token_id).int(),
            "image_grid_thw": inputs["image_grid_thw"].cuda(),
        },
        batch=1,
        length=512,
    ),
}


def with_transformers(workload: Workload, checkpoint: Path) -> nn.Module:
    import transformers

    load = getattr(transformers, workload.hf_class).from_pretrained
    return load(checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()  # type: ignore[no-any-return]


def with_liger(workload: Workload, checkpoint: Path) -> nn.Module:
    import liger_kernel.transformers

    model, (patch, options) = with_transformers(workload, checkpoint), workload.liger
    getattr(liger_kernel.transformers, patch)(rms_norm=True, fused_linear_cross_entropy=True, model=model, **options)
    return model


def with_ligerzoo(workload: Workload, checkpoint: Path) -> nn.Module:
    return AutoModel.from_pretrained(checkpoint, device="cuda")


# liger-kernel patches transformers' module: plain transformers runs first, and once.
ONCE = {"transformers": with_transformers}
ALTERNATING = {"ligerzoo": with_ligerzoo, "transformers + liger-kernel": with_liger}


def trained(model: nn.Module, inputs: Inputs) -> Callable[[], Tensor]:
    """Returns a function that does one training step and returns the loss."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> Tensor:
        loss: Tensor = model(**inputs, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(model: Callable[[], nn.Module], inputs: Inputs) -> dict[str, float]:
    """One round: the median step time, the peak memory, and the loss before the first step."""
    gc.collect()  # transformers' models are part of reference cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = trained(model(), inputs)
    first_loss = float(step())
    time = milliseconds(step, warmup=3, repeats=12)
    return {
        "ms": time,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_loss": first_loss,
        "tokens_per_s": inputs["input_ids"].numel() / time * 1e3,
    }


def profile(model: nn.Module, inputs: Inputs) -> str:
    """Returns the profiler's table of GPU time by kernel for one step."""
    step = trained(model, inputs)
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return profiler.key_averages().table(sort_by="cuda_time_total", row_limit=50, max_name_column_width=90)


def compare(workload: Workload, checkpoint: Path, inputs: Inputs, rounds: int) -> dict[str, Any]:
    """Returns every provider's medians over its rounds."""
    figures: dict[str, list[dict[str, float]]] = {}
    theirs = {**inputs, **workload.for_transformers(inputs)}

    def measure_round(name: str, load: Callable[[Workload, Path], nn.Module]) -> None:
        of_the_provider = inputs if load is with_ligerzoo else theirs
        try:
            figures.setdefault(name, []).append(measure(lambda: load(workload, checkpoint), of_the_provider))
        except (ImportError, torch.OutOfMemoryError) as error:
            print(f"{name}: {error}")

    for name, load in ONCE.items():
        measure_round(name, load)
    for _ in range(rounds):
        for name, load in ALTERNATING.items():
            measure_round(name, load)
    return {
        name: {key: statistics.median(result[key] for result in results) for key in results[0]}
        | {"all_ms": [result["ms"] for result in results]}
        for name, results in figures.items()
        if results
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="llama_1b")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/training_step[_MODEL].json")
    parser.add_argument("--batch", type=int, help="rows of the batch")
    parser.add_argument("--length", type=int, help="text tokens per row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--profile", action="store_true", help="also write a profile of ligerzoo's step to OUT.profile.txt"
    )
    arguments = parser.parse_args()
    workload: Workload = WORKLOADS[arguments.model]
    suffix = "" if arguments.model == "llama_1b" else f"_{arguments.model}"
    out = arguments.out or Path(f"benchmarks/results/training_step{suffix}.json")
    batch, length = arguments.batch or workload.batch, arguments.length or workload.length

    torch.manual_seed(0)
    inputs = workload.inputs(batch, length)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "checkpoint"
        workload.model(workload.config, device="cuda", dtype=torch.bfloat16).save_pretrained(checkpoint)
        providers = compare(workload, checkpoint, inputs, arguments.rounds)
        ours, peer = providers["ligerzoo"], providers.get("transformers + liger-kernel")
        ratios = {key: ours[key] / peer[key] for key in ("ms", "peak_gib")} if peer else {}
        shape = {"batch": batch, "length": length}
        raw_shape = {"model": arguments.model, "config": asdict(workload.config), **shape}
        raw = {"what": __doc__, "shape": raw_shape, "providers": providers, "ligerzoo / liger-kernel": ratios}
        kept = ("ms", "tokens_per_s", "peak_gib")
        compact = {name: {key: figures[key] for key in kept} for name, figures in providers.items()}
        write_result(out, raw, {"shape": shape, "providers": compact})
        if arguments.profile:
            out.with_suffix(".profile.txt").write_text(profile(with_ligerzoo(workload, checkpoint), inputs))


if __name__ == "__main__":
    main()
