"""Tiny runs of GRPO and on-policy distillation: prompts, and a reward for the share of the letter a."""

import json
from pathlib import Path
from typing import Any

REWARD = """
def reward(completions, **fields):
    return [text.count("a") / 8 for text in completions]
"""


def write_prompts(file: Path, count: int = 20) -> Path:
    """Writes prompts of different lengths with further fields."""
    lines = [json.dumps({"prompt": f"Say {'a' * (n % 5)} {n}:", "answer": "a", "id": n}) for n in range(count)]
    file.write_text("\n".join(lines) + "\n")
    return file


def write_reward(file: Path, source: str = REWARD) -> Path:
    """Writes a file with a reward function."""
    file.write_text(source)
    return file


def grpo_options(checkpoint: Path, data: Path, reward: Path, output: Path, /, **changes: Any) -> dict[str, Any]:
    """Returns options of a run of a few steps in float32 on the CPU."""
    given: dict[str, Any] = {
        "model": str(checkpoint), "data": (str(data),), "reward": str(reward), "output": str(output), "prompts": 2,
        "num_samples": 4, "max_new_tokens": 8, "seq_length": 64, "batch_size": 2, "max_steps": 4, "lr": 1e-3,
        "warmup": 0.0, "device": "cpu",
    }  # fmt: skip
    return given | changes


def opd_options(checkpoint: Path, data: Path, teacher: Path, output: Path, /, **changes: Any) -> dict[str, Any]:
    """Returns options of a run of on-policy distillation of a few steps in float32 on the CPU."""
    given = grpo_options(checkpoint, data, Path(), output, **{"teacher": str(teacher), "method": "opd", **changes})
    del given["reward"]
    return given
