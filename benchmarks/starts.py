"""How soon `generate` answers: one prompt, 1 to 64 new tokens, the first call of a shape and later ones.

    python -m benchmarks.starts                        # shapes of Llama-3.2-1B and Llama-3-8B, about a minute
    python -m benchmarks.starts --models tiny --prompts 16 --new-tokens 1 2 --out starts.json

Greedy, bf16, random weights; wall-clock, with the wait for the GPU. Kernels are compiled and attention is planned
before, with other graphs, which are then dropped: a first call captures only. Then random shapes, several times in a
row, with the GPU's memory in use after each pass. The file keeps its times from before graphs of prefills existed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.decoding import CONFIGS, DEVICE, build
from benchmarks.measure import save_result, synchronize
from benchmarks.processes import Json
from ligerzoo import models

CALLS, PASSES, SHAPES = 7, 6, 50
"""Calls of a shape; passes over the random shapes, and their number."""


def milliseconds(call: Callable[[], object]) -> float:
    synchronize(DEVICE)
    begin = time.perf_counter()
    call()
    synchronize(DEVICE)
    return 1e3 * (time.perf_counter() - begin)


def prompts(model: models.CausalLM, rows: int, tokens: int) -> Tensor:
    return torch.randint(model.input_vocab_size, (rows, tokens), device=DEVICE)


def generate(model: models.CausalLM, ids: Tensor, new_tokens: int) -> None:
    model.generate(ids, max_new_tokens=new_tokens, eos_token_id=[])


def measure(model: models.CausalLM, name: str, lengths: Sequence[int], new_tokens: Sequence[int]) -> list[Json]:
    """Returns the milliseconds of the first call of each shape, `first_ms`, and the median of later ones, `ms`."""
    for length in lengths:
        for new in (1, 3):
            generate(model, prompts(model, 1, length), new)
    rows = []
    for length in tqdm(lengths, desc=name, unit="prompt"):
        model.release_decode_graphs()
        ids = prompts(model, 1, length)
        for new in new_tokens:
            first, *later = (milliseconds(lambda: generate(model, ids, new)) for _ in range(CALLS))  # noqa: B023
            median = statistics.median(later)
            rows.append({"model": name, "prompt": length, "new_tokens": new, "first_ms": first, "ms": median})
    return rows


def used_gib() -> float:
    """The GPU's memory in use; 0 on a CPU."""
    if DEVICE == "cpu":
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def random_shapes(model: models.CausalLM, shapes: int, longest: int) -> Json:
    """Returns the slowest call while shapes are new, the slowest one later, and the memory in use after each pass."""
    model.release_decode_graphs()
    draw = random.Random(0)
    drawn = [(draw.choice([1, 1, 1, 2, 3, 5, 8]), draw.randint(1, longest), draw.randint(1, 12)) for _ in range(shapes)]
    slowest, used = [], []
    for _ in tqdm(range(PASSES), desc="random shapes", unit="pass"):
        calls = ((prompts(model, rows, length), new) for rows, length, new in drawn)
        slowest.append(max(milliseconds(lambda: generate(model, ids, new)) for ids, new in calls))  # noqa: B023
        used.append(used_gib())
    return {"shapes": shapes, "first_ms": slowest[0], "later_ms": max(slowest[1:]), "used_gib": used}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=["llama_1b", "llama_8b"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 512, 2048], help="tokens of the prompts")
    parser.add_argument("--new-tokens", nargs="+", type=int, default=[1, 2, 8, 64])
    parser.add_argument("--shapes", type=int, default=SHAPES, help=f"random shapes; 0: none; default: {SHAPES}")
    parser.add_argument("--longest", type=int, default=700, help="tokens of the longest random prompt; default: 700")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/starts.json"))
    arguments = parser.parse_args(argv)
    earlier = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    rows: list[Json] = []
    found: dict[str, Json] = {}
    for name in arguments.models:
        torch.manual_seed(0)
        model = build(CONFIGS[name])
        rows += measure(model, name, arguments.prompts, arguments.new_tokens)
        if arguments.shapes:
            found[name] = random_shapes(model, arguments.shapes, arguments.longest)
        result = {"rows": rows, "before": earlier.get("before", []), "random_shapes": found}
        save_result(arguments.out, {"what": __doc__, **result}, result)
        del model
        used_gib()  # frees
    print(arguments.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
