"""Time to the first token of a fresh process: import, load a checkpoint, prefill a prompt, capture.

The files are in the page cache. Times start with the process, Python's start and CUDA's initialization included. Run by
`benchmarks.generation`; this module imports nothing but the standard library, so that a process measures its imports.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKLOADS = {"first_token_8b": ("llama_8b", 512), "first_token_tiny": ("tiny", 16)}
"""Name of the workload -> name of its config in `benchmarks.decoding.CONFIGS`, tokens of the prompt."""
NEW_TOKENS = 8  # `generate` has captured its graphs by then
ROOT = Path(__file__).parent.parent


class Clock:
    """A streamer that notes when each token is on the host."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, tokens: Any) -> None:
        self.seconds.append(time.monotonic())

    def end(self) -> None:
        pass


def with_ligerzoo(checkpoint: Path, prompt: int) -> list[float]:
    import torch

    from ligerzoo import AutoModel

    imported = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModel.from_pretrained(checkpoint, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    loaded, clock = time.monotonic(), Clock()
    ids = torch.arange(prompt, device=device)[None] % model.config.vocab_size
    model.generate(ids, max_new_tokens=NEW_TOKENS, eos_token_id=[], streamer=clock)
    return [imported, loaded, *clock.seconds]


def with_transformers(checkpoint: Path, prompt: int) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    imported = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map=device)
    model.generation_config.eos_token_id = None
    loaded, clock = time.monotonic(), Clock()
    ids = torch.arange(prompt, device=device)[None] % model.config.vocab_size
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=clock)
    return [imported, loaded, *clock.seconds]


PROVIDERS: dict[str, Callable[[Path, int], list[float]]] = {
    "ligerzoo": with_ligerzoo,
    "transformers": with_transformers,
}


def write_checkpoint(checkpoint: Path, config: str) -> None:
    """Writes a checkpoint of random weights in a new process, and reads it into the page cache."""
    if not checkpoint.exists():
        program = "import sys; from benchmarks import first_token; first_token.save(*sys.argv[1:])"
        subprocess.run([sys.executable, "-c", program, config, str(checkpoint)], check=True, cwd=ROOT)
    for file in checkpoint.iterdir():
        with file.open("rb", buffering=0) as stream:
            while stream.read(2**24):
                pass


def save(config: str, checkpoint: str) -> None:
    """Saves a new model."""
    from benchmarks.decoding import CONFIGS, build

    build(CONFIGS[config]).save_pretrained(checkpoint)


def measure(provider: str, checkpoint: Path, prompt: int, rounds: int, limit: float) -> dict[str, Any]:
    """Measures a provider in `rounds` new processes.

    Args:
        limit: seconds that a process may take.

    Returns:
        Medians in seconds since the start of the process: `first_token_s` and `captured_s`, the last of 8 tokens. For
        ours also `stages_s`: those of import, load, prefill and capture.
    """
    times = []
    command = [sys.executable, "-m", "benchmarks.first_token", provider, str(checkpoint), str(prompt)]
    for _ in range(rounds):
        begin = time.monotonic()
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit, cwd=ROOT)
        except subprocess.TimeoutExpired:
            return {"error": f"not finished within {limit:.0f} s"}
        if done.returncode:
            return {"error": f"the process ended with status {done.returncode}"}
        times.append([second - begin for second in json.loads(done.stdout.splitlines()[-1])])
    imported, loaded, _, first, *_, last = (statistics.median(column) for column in zip(*times, strict=True))
    result: dict[str, Any] = {"first_token_s": first, "captured_s": last}
    if provider == "ligerzoo":
        stages = {"import": imported, "load": loaded - imported, "prefill": first - loaded, "capture": last - first}
        result["stages_s"] = stages
    return result


if __name__ == "__main__":
    name, directory, tokens = sys.argv[1:]
    print(json.dumps(PROVIDERS[name](Path(directory), int(tokens))))
