"""Loading a model to the GPU: ligerzoo, transformers, and safetensors alone.

    python -m benchmarks.loading --out benchmarks/results/loading.json
    python -m benchmarks.loading --checkpoint gpt-oss-20b --out benchmarks/results/loading_gpt_oss_20b.json

Random weights in Hugging Face format are read once before timing, so that every provider reads from the page cache:
Llama-3-8B in bf16 (15 GiB), or gpt-oss-20b in MXFP4 (13 GiB), which ligerzoo and transformers dequantize to bf16
(39 GiB). Each load runs in a new process; providers alternate for several rounds. Import and load are timed separately;
the load ends when all weights are on the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.measure import write_result
from ligerzoo.convert import architecture_for_config
from ligerzoo.models import GptOssConfig, Llama, LlamaConfig

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)


# Each provider's import, and its load of DIRECTORY.
PROVIDERS = {
    "raw safetensors": (
        "from pathlib import Path; from safetensors.torch import load_file",
        "loaded = [load_file(shard, device='cuda') for shard in sorted(Path(DIRECTORY).glob('*.safetensors'))]",
    ),
    "ligerzoo": (
        "from ligerzoo import AutoModel",
        "loaded = AutoModel.from_pretrained(DIRECTORY, device='cuda', dtype=torch.bfloat16)",
    ),
    "transformers": (
        "from transformers import AutoModelForCausalLM",
        "loaded = AutoModelForCausalLM.from_pretrained(DIRECTORY, device_map='cuda')",
    ),
}


def save_llama(directory: Path) -> None:
    Llama(LLAMA_8B, device="cuda", dtype=torch.bfloat16).save_pretrained(directory)
    torch.cuda.empty_cache()


def save_gpt_oss(directory: Path) -> None:
    """Writes a checkpoint of gpt-oss-20b's shape with the experts' matrices in MXFP4, one layer per file."""
    config = GptOssConfig(num_hidden_layers=24, num_experts=32)
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    queries, keys = (heads * config.head_size for heads in (config.num_attention_heads, config.kv_heads))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").mul_(0.02).bfloat16().cpu()

    def quantized(name: str, rows: int, columns: int) -> dict[str, Tensor]:
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(115, 125, (experts, rows, columns // 32), dtype=torch.uint8, device="cuda")
        return {f"{name}_blocks": blocks.cpu(), f"{name}_scales": scales.cpu(), f"{name}_bias": numbers(experts, rows)}

    def layer(prefix: str) -> dict[str, Tensor]:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        sizes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
                 "o_proj": (hidden, queries)}  # fmt: skip
        return {
            **{f"{attention}{name}.weight": numbers(*size) for name, size in sizes.items()},
            **{f"{attention}{name}.bias": numbers(size[0]) for name, size in sizes.items()},
            f"{attention}sinks": numbers(config.num_attention_heads),
            f"{prefix}input_layernorm.weight": numbers(hidden),
            f"{prefix}post_attention_layernorm.weight": numbers(hidden),
            f"{mlp}router.weight": numbers(experts, hidden),
            f"{mlp}router.bias": numbers(experts),
            **quantized(f"{mlp}experts.gate_up_proj", 2 * inner, hidden),
            **quantized(f"{mlp}experts.down_proj", hidden, inner),
        }

    directory.mkdir()
    architecture = architecture_for_config(GptOssConfig)
    entries = {
        **architecture.config_to_hf(config), "architectures": [architecture.hf_class], "model_type": "gpt_oss",
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    rest = {
        "model.embed_tokens.weight": numbers(config.vocab_size, hidden),
        "lm_head.weight": numbers(config.vocab_size, hidden),
        "model.norm.weight": numbers(hidden),
    }
    index: dict[str, str] = {}

    def save(tensors: dict[str, Tensor], name: str) -> None:
        save_file(tensors, directory / f"{name}.safetensors", {"format": "pt"})
        index.update(dict.fromkeys(tensors, f"{name}.safetensors"))

    save(rest, "model-rest")
    for i in range(config.num_hidden_layers):
        save(layer(f"model.layers.{i}."), f"model-layer-{i}")
    text = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


SAVE = {"llama-3-8b": save_llama, "gpt-oss-20b": save_gpt_oss}


def seconds(provider: str, directory: Path) -> tuple[float, float]:
    """Times the import and the load in a new process, without CUDA's initialization."""
    imports, load = PROVIDERS[provider]
    program = f"""
import time, torch
DIRECTORY = {str(directory)!r}
torch.zeros(1, device="cuda")
start = time.perf_counter()
{imports}
imported = time.perf_counter()
{load}
torch.cuda.synchronize()
print(imported - start, time.perf_counter() - imported)
"""
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    imported, loaded = map(float, out.split()[-2:])
    return imported, loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loading.json"))
    parser.add_argument("--checkpoint", choices=SAVE, default="llama-3-8b")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / arguments.checkpoint
        SAVE[arguments.checkpoint](directory)
        shards = list(directory.glob("*.safetensors"))
        size = sum(shard.stat().st_size for shard in shards)

        seconds("raw safetensors", directory)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in arguments.providers}
        for _ in range(arguments.rounds):
            for name in arguments.providers:
                times[name].append(seconds(name, directory))

    medians = {
        name: [statistics.median(column) for column in zip(*rounds, strict=True)] for name, rounds in times.items()
    }
    compact = {"gib": size / 2**30, "median_import_and_load_s": medians}
    raw: dict[str, Any] = {
        "what": __doc__,
        **compact,
        "shards": len(shards),
        "import_and_load_s": times,
        "load, ligerzoo / raw safetensors": medians["ligerzoo"][1] / medians["raw safetensors"][1],
    }
    if "transformers" in medians:
        raw["import and load, ligerzoo / transformers"] = sum(medians["ligerzoo"]) / sum(medians["transformers"])
    write_result(arguments.out, raw, compact)


if __name__ == "__main__":
    main()
