"""Time to the first token of a fresh process: import, load a checkpoint, prefill a prompt, capture.

The files are in the page cache. Times start with the process, Python's start and CUDA's initialization included. Run by
`benchmarks.generation`; this module imports nothing but the standard library, so that a process measures its imports.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WORKLOADS = {"first_token_8b": ("llama_8b", 512), "first_token_tiny": ("tiny", 16)}
"""Name of the workload -> name of its config in `benchmarks.decoding.CONFIGS`, tokens of the prompt."""
NEW_TOKENS = 8  # `generate` has captured its graphs by then
ROOT = Path(__file__).parent.parent


class Clock:
    """Notes when the stages of a process end. As a streamer it notes the end of prefill, and of the last decode step.

    Attributes:
        ends: the time by stage, in order.
    """

    def __init__(self) -> None:
        self.ends: dict[str, float] = {}
        self._puts = 0

    def mark(self, stage: str) -> None:
        self.ends[stage] = time.monotonic()

    def put(self, tokens: Any) -> None:
        self._puts += 1  # the first are the prompts
        if self._puts > 1:
            self.mark("prefill" if self._puts == 2 else "first decode steps")

    def end(self) -> None:
        pass


def with_ligerzoo(checkpoint: Path, prompt: int, clock: Clock) -> None:
    import torch

    clock.mark("import torch")
    from ligerzoo import AutoModel

    clock.mark("import ligerzoo")
    device = start_device(clock)
    model = AutoModel.from_pretrained(checkpoint, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    clock.mark("load")
    ids = torch.arange(prompt, device=device)[None] % model.config.vocab_size
    model.generate(ids, max_new_tokens=NEW_TOKENS, eos_token_id=[], streamer=clock)


def with_transformers(checkpoint: Path, prompt: int, clock: Clock) -> None:
    import torch

    clock.mark("import torch")
    from transformers import AutoModelForCausalLM

    clock.mark("import transformers")
    device = start_device(clock)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map=device)
    model.generation_config.eos_token_id = None
    clock.mark("load")
    ids = torch.arange(prompt, device=device)[None] % model.config.vocab_size
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=clock)


def start_device(clock: Clock) -> str:
    """Allocates a tensor on the GPU, so that loading does not include the start of CUDA."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.empty(1, device=device)
    clock.mark("start CUDA")
    return device


PROVIDERS: dict[str, Callable[[Path, int, Clock], None]] = {
    "ligerzoo": with_ligerzoo,
    "transformers": with_transformers,
}


def write_checkpoint(checkpoint: Path, config: str) -> None:
    """Writes a checkpoint of random weights in a new process unless it exists, and reads it into the page cache."""
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
    """Measures a provider in new processes: one with an empty Triton cache on disk, then `rounds` with a full one.

    Args:
        limit: seconds that a process may take.

    Returns:
        Seconds since the start of the process: `first_token_s` and `captured_s`, the last of 8 tokens. `stages_s`: the
        seconds of each stage. These are medians of the later rounds. `cold`: the same of the first round, and
        `compiled`, the number of compiled variants by name of the kernel.
    """
    command = [sys.executable, "-m", "benchmarks.first_token", provider, str(checkpoint), str(prompt)]
    with tempfile.TemporaryDirectory() as cache:
        times = []
        for _ in range(1 + rounds):
            begin = time.monotonic()
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, timeout=limit, cwd=ROOT,
                    env={**os.environ, "TRITON_CACHE_DIR": cache},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return {"error": f"not finished within {limit:.0f} s"}
            if done.returncode:
                return {"error": f"the process ended with status {done.returncode}"}
            ends = json.loads(done.stdout.splitlines()[-1])
            times.append({stage: end - begin for stage, end in ends.items()})
            if len(times) == 1:
                compiled = Counter(path.stem for path in Path(cache).rglob("*.cubin"))
        cold, *warm = times
        medians = {stage: statistics.median(one[stage] for one in warm) for stage in cold}
        return {**figures(medians), "cold": {**figures(cold), "compiled": dict(sorted(compiled.items()))}}


def figures(ends: Mapping[str, float]) -> dict[str, Any]:
    """The figures of `measure` from the ends of the stages."""
    starts = [0.0, *ends.values()]
    stages = {stage: end - start for (stage, end), start in zip(ends.items(), starts, strict=False)}
    return {"first_token_s": ends["prefill"], "captured_s": ends["first decode steps"], "stages_s": stages}


if __name__ == "__main__":
    this = Clock()
    this.mark("start Python")
    name, directory, tokens = sys.argv[1:]
    PROVIDERS[name](Path(directory), int(tokens), this)
    print(json.dumps(this.ends))
