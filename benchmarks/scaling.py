"""Scaling of the loss head with tokens and vocabulary: time and memory of linear cross entropy in ligerzoo,
torch.compile, liger-kernel and cut-cross-entropy, forward and backward.

    python -m benchmarks.scaling --out benchmarks/results/scaling.json

Hidden size 4096, bf16, peaked logits: 2048 to 65536 tokens at Llama 3's vocabulary of 128256, and vocabularies of 32000
to 256000 at 8192 tokens. Measured as in `benchmarks.operations`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.operations import linear_cross_entropy_row
from benchmarks.row import OURS, Goal, Row
from benchmarks.suite import Size, suite_command

PROVIDERS = (OURS, "torch.compile", "liger-kernel", "cut-cross-entropy")
WIDTH, LLAMA_VOCABULARY = 4096, 128256
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
VOCABULARIES = (32000, 64000, LLAMA_VOCABULARY, 256000)


def rows(size: Size) -> Iterator[Row]:
    for tokens, classes in dict.fromkeys(
        [*((tokens, LLAMA_VOCABULARY) for tokens in LENGTHS), *((8192, classes) for classes in VOCABULARIES)]
    ):
        row = linear_cross_entropy_row(size(tokens), size(WIDTH), size(classes), peaked=True, goal=Goal(of_peer=None))
        yield replace(row, providers={name: row.providers[name] for name in PROVIDERS})


if __name__ == "__main__":
    suite_command(rows, what=__doc__, out=Path("benchmarks/results/scaling.json"), seconds=0.5)
