"""Loading a model of Llama-3-8B's shape to the GPU: ligerzoo, transformers, and safetensors alone.

    python -m benchmarks.loading --out benchmarks/results/loading.json

Random bf16 weights are saved once in Hugging Face format (15 GiB) and read once before timing, so that every provider
reads from the page cache. Each load runs in a new process; providers alternate for several rounds. Import and load are
timed separately; the load ends when all weights are on the GPU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import write_result
from ligerzoo.models import Llama, LlamaConfig

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
        "from ligerzoo.models import Llama",
        "loaded = Llama.from_pretrained(DIRECTORY, device='cuda')",
    ),
    "transformers": (
        "from transformers import AutoModelForCausalLM",
        "loaded = AutoModelForCausalLM.from_pretrained(DIRECTORY, device_map='cuda')",
    ),
}


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
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "llama-8b"
        model = Llama(LLAMA_8B, device="cuda", dtype=torch.bfloat16)
        start = time.perf_counter()
        model.save_pretrained(directory)
        saving = time.perf_counter() - start
        del model
        torch.cuda.empty_cache()
        shards = list(directory.glob("*.safetensors"))
        size = sum(shard.stat().st_size for shard in shards)

        seconds("raw safetensors", directory)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in PROVIDERS}
        for _ in range(arguments.rounds):
            for name in PROVIDERS:
                times[name].append(seconds(name, directory))

    medians = {
        name: [statistics.median(column) for column in zip(*rounds, strict=True)] for name, rounds in times.items()
    }
    compact = {"gib": size / 2**30, "median_import_and_load_s": medians}
    raw: dict[str, Any] = {
        "what": __doc__,
        **compact,
        "shards": len(shards),
        "saving_s": saving,
        "import_and_load_s": times,
        "load, ligerzoo / raw safetensors": medians["ligerzoo"][1] / medians["raw safetensors"][1],
        "import and load, ligerzoo / transformers": sum(medians["ligerzoo"]) / sum(medians["transformers"]),
    }
    write_result(arguments.out, raw, compact)


if __name__ == "__main__":
    main()
