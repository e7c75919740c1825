"""Pairs and labelled completions for runs of a few steps."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.train import tiny_run

WORDS = ["liger", "lion", "tiger", "is", "a", "large", "cat", "hybrid", "of", "and"]


def write(file: Path, records: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def pairs(count: int = 40) -> list[dict[str, Any]]:
    """Returns pairs whose chosen completions begin with yes, and whose rejected ones begin with no."""
    source = random.Random(0)

    def text(most: int) -> str:
        return " ".join(source.choices(WORDS, k=source.randint(1, most)))

    return [
        {"prompt": text(3), "chosen": f" yes {text(3)}", "rejected": f" no {text(4)}"} for _ in range(count)
    ]  # fmt: skip


def labelled(count: int = 40) -> list[dict[str, Any]]:
    """Returns the completions of pairs by themselves."""
    return [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs(count)
        for name in ("chosen", "rejected")
    ]


def options(checkpoint: Path, data: Path, output: Path, /, **changes: Any) -> dict[str, Any]:
    """Returns options of a run of the preference and distillation recipes."""
    return tiny_run.options(checkpoint, data, output, **{"seq_length": 128, **changes})
