"""GRPO steps through the command line, exact and not: how far log-probabilities of sampling are from the update's.

    python -m benchmarks.exact_updates                 # 100 steps of the shape of Llama-3.2-1B, about 2 minutes
    python -m benchmarks.exact_updates --model tiny --steps 3 --device cpu --out tiny.json

`ligerzoo train --method grpo` trains a model with random weights twice, in new processes: with `--exact auto` and with
`--exact off`. The reward is the share of even tokens. `sampler_difference` is the mean absolute difference between the
log-probabilities that sampling returned and those that the first update computes from packed rows, over all tokens of a
step. The seeds are equal, so completions differ only because the weights do. The file is written after each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.measure import save_result
from benchmarks.processes import Json
from ligerzoo.models import Llama, LlamaConfig
from ligerzoo.train.log import read_log

EXACT = ("auto", "off")
MODELS: dict[str, Json] = {
    "llama_1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
SHAPE = {"prompts": 4, "num-samples": 4, "max-new-tokens": 16, "seq-length": 512, "batch-size": 2}
"""Options of a step, as in the command."""

LETTERS = 256
"""Tokens of the byte-level tokenizer; the two after them begin and end a text."""

REWARD = """
def reward(completion_ids, **fields):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


def write_tokenizer(directory: Path) -> None:
    """Writes a byte-level tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", LETTERS)])
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_inputs(directory: Path, model: str, device: str) -> None:
    """Writes what both runs read: a model with random weights, its tokenizer, prompts, and the reward."""
    torch.manual_seed(0)
    ends = {"bos_token_id": LETTERS, "eos_token_id": LETTERS + 1}
    config = LlamaConfig(**MODELS[model], **ends, rope_theta=500000.0, tie_word_embeddings=True)
    Llama(config, dtype=torch.bfloat16, device=device).save_pretrained(directory / "model")
    if device == "cuda":
        torch.cuda.empty_cache()  # the runs are other processes
    write_tokenizer(directory / "model")
    (directory / "reward.py").write_text(REWARD, encoding="utf-8")
    prompts = [f"Question {n}: " + "what is next? " * (1 + 7 * n % 23) for n in range(64)]
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (directory / "prompts.jsonl").write_text(lines, encoding="utf-8")


def arguments_of(directory: Path, exact: str, steps: int, device: str) -> list[str]:
    """The arguments of `ligerzoo`, whose output is DIRECTORY/EXACT."""
    options = {
        "method": "grpo",
        "data": directory / "prompts.jsonl",
        "reward": directory / "reward.py",
        "output": directory / exact,
        "max-steps": steps,
        "exact": exact,
        "lr": 1e-5,
        "dtype": "bfloat16",
        "device": device,
        "save-every": 10 * steps,
        **SHAPE,
    }
    pairs = (part for name, value in options.items() for part in (f"--{name}", str(value)))
    return ["train", str(directory / "model"), *pairs]


def train(directory: Path, exact: str, steps: int, device: str) -> tuple[list[Json], str]:
    """Runs the command. Returns the log's entries of steps, and the line on exactness that it prints.

    Raises:
        RuntimeError: the command failed.
    """
    command = [sys.executable, "-m", "ligerzoo", *arguments_of(directory, exact, steps, device)]
    printed, log = directory / f"{exact}.txt", directory / exact / "log.jsonl"
    with printed.open("w", encoding="utf-8") as file, tqdm(total=steps, desc=f"--exact {exact}", unit="step") as bar:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                bar.update((len(step_entries(log)) if log.exists() else 0) - bar.n)
        finally:
            process.kill()
    text = printed.read_text(encoding="utf-8")
    if process.returncode:
        raise RuntimeError(f"--exact {exact}: exit code {process.returncode}\n{text[-2000:]}")
    says = next(line for line in text.splitlines() if line.startswith("Log-probabilities of sampling"))
    return step_entries(log), says


def step_entries(log: Path) -> list[Json]:
    return [entry for entry in read_log(log) if "reward" in entry]


def summary(entries: Sequence[Json], says: str) -> Json:
    """The figures of a run.

    Returns:
        says: the line on exactness that the command prints.
        sampler_difference: of each step; null in a step without an update, whose rewards are all equal.
        reward: the mean of each step.
        step_ms, sampling_ms, update_ms: medians.
        first_step_ms: of the first step, which compiles kernels.
    """

    def column(name: str) -> list[Any]:
        return [entry.get(name) for entry in entries]

    def median(name: str) -> float:
        return 1e3 * statistics.median(column(name))

    return {
        "says": says, "sampler_difference": column("sampler_difference"), "reward": column("reward"),
        "step_ms": median("seconds"), "sampling_ms": median("sampling_seconds"),
        "update_ms": median("update_seconds"), "first_step_ms": 1e3 * column("seconds")[0],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama_1b")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exact_updates.json"))
    arguments = parser.parse_args(argv)
    runs: dict[str, Json] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_inputs(directory, arguments.model, arguments.device)
        for exact in EXACT:
            entries, says = train(directory, exact, arguments.steps, arguments.device)
            runs[exact] = summary(entries, says)
            found = {"model": arguments.model, "shape": SHAPE, "runs": runs}
            save_result(arguments.out, {"what": __doc__, **found}, found)
    print(arguments.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
