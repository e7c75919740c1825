"""Causal attention of packed rows: batches of documents on cuDNN against FlexAttention, in one run.

    python -m benchmarks.packed_attention              # at most 95 s; files and lines are written row by row
    python -m benchmarks.packed_attention --device cpu --quick --out packed.json

Rows of 8k, 16k and 32k tokens, 32 query and 8 key heads of 128 and 64 features, bf16, with documents of one length or
of random lengths, uniform up to twice the mean. FlexAttention compares the first tokens of documents, and is compiled
once for each shape of a row. Times are those of `benchmarks.operations`: calls alternate, the L2 cache is flushed, and
the host's launches count where the GPU waits for them. What all layers of a batch share is made before: the plan of the
batches, and the block mask. Three documents of each row of the fewest tokens are compared with attention of each alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.measure import medians_within, save_result, synchronize
from benchmarks.processes import Json
from benchmarks.row import DIRECTIONS, OURS, Step, reason
from ligerzoo.kernels import packed_attention
from ligerzoo.layers import Context, attend
from ligerzoo.layers.documents import Documents

TOKENS, HEADS, KV_HEADS, HEAD_DIMS = (8192, 16384, 32768), 32, 8, (128, 64)
DOCUMENTS = (("each", 2048), ("mean", 4096), ("mean", 2048), ("mean", 512), ("mean", 100))
"""Documents of a length each, or of a mean length."""
FLEX = "FlexAttention"
COMPARED = 3
"""Documents whose bits are compared."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One packed row.

    Attributes:
        tokens: T.
        head_dim: features of a head.
        kind: "each" or "mean".
        length: of each document, or their mean.
    """

    tokens: int
    head_dim: int
    kind: str
    length: int

    @property
    def name(self) -> str:
        return f"{self.tokens} x {HEADS} x {KV_HEADS} x {self.head_dim}, {self.documents}"

    @property
    def documents(self) -> str:
        return f"{self.length} tokens each" if self.kind == "each" else f"{self.length} tokens on average"

    def lengths(self) -> list[int]:
        """The tokens of each document, which fill the row."""
        draw, left, found = random.Random(self.tokens + self.length), self.tokens, []
        while left > 0:
            found.append(min(left, self.length if self.kind == "each" else draw.randint(1, 2 * self.length)))
            left -= found[-1]
        return found


def rows(quick: bool) -> Iterator[Row]:
    """Yields the rows, those of a shape one after the other."""
    shrink = 64 if quick else 1
    for head_dim, tokens in product(HEAD_DIMS, TOKENS[:1] if quick else TOKENS):
        for kind, length in DOCUMENTS:
            yield Row(tokens // shrink, head_dim, kind, max(1, length // shrink))


def position_ids(lengths: Sequence[int], device: str) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None].to(device)


def batches_of(spans: Sequence[tuple[int, int]], tokens: int, device: str) -> tuple[Attention, int]:
    """Our attention, as `attend` computes it where exactness is asked for, and its number of batches."""
    documents = Documents(lambda: [spans], tokens, torch.device(device))
    if (length := documents.whole) is not None:

        def call(*x: Tensor) -> Tensor:
            return attend(*(t.reshape(-1, length, *t.shape[2:]) for t in x)).view(x[0].shape)

        return call, 1
    packing = documents.packing
    return lambda q, k, v: packed_attention(q, k, v, packing), len(packing.batches)


class Flex:
    """FlexAttention, compiled for one shape of rows."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        torch.compiler.reset()
        self._compiled: Callable[..., Tensor] = torch.compile(flex_attention)

    def of(self, lengths: Sequence[int], device: str) -> Attention:
        """Returns attention within documents of these lengths."""
        from torch.nn.attention.flex_attention import create_block_mask

        starts, tokens = [0, *accumulate(lengths)][:-1], sum(lengths)
        start = torch.tensor(starts, dtype=torch.int32).repeat_interleave(torch.tensor(lengths)).to(device)

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= start[query])

        mask = create_block_mask(sees, None, None, tokens, tokens, device=device)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return self._compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

        return call


def measure(row: Row, flex: Flex | None, seconds: float, device: str, *, compare: bool) -> Json:
    """Measures a row.

    Args:
        flex: FlexAttention of this shape; None without.
        seconds: for which each direction is timed.
        compare: whether bits are compared with documents alone.

    Returns:
        op, shape, variant, providers: as in the results of `benchmarks.operations`.
        documents, batches: their numbers.
        packing pays: whether batches are what `attend` chooses where exactness is not asked for.
        largest difference: the largest relative difference (of norms) between the output and gradients of both.
        bits: numbers of the compared documents that differ from attention alone, and how many were compared.
    """
    torch.manual_seed(0)
    lengths = row.lengths()
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    x = [
        torch.randn(1, row.tokens, heads, row.head_dim, requires_grad=True, **options)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    dy = torch.randn_like(x[0])
    spans = list(zip([0, *accumulate(lengths)], lengths, strict=False))
    ours, batches = batches_of(spans, row.tokens, device)
    functions = {OURS: ours} | ({} if flex is None else {FLEX: flex.of(lengths, device)})
    context = Context(torch.empty(1, row.tokens, device=device), position_ids=position_ids(lengths, device))
    result: Json = {
        "op": "packed attention",
        "shape": [row.tokens, HEADS, KV_HEADS, row.head_dim],
        "variant": row.documents,
        "documents": len(lengths),
        "batches": batches,
        "packing pays": context.documents is not None and context.documents.packing_pays(HEADS * row.head_dim),
        "providers": {name: {} for name in functions},
    }
    steps = {name: Step(function, x, [dy]) for name, function in functions.items()}
    found = {}
    for name, step in steps.items():  # compiles, plans, and loads
        step.forward()
        outputs, gradients = step.forward_backward()
        found[name] = (*outputs, *gradients)
    if flex is not None:
        pairs = zip(found[OURS], found[FLEX], strict=True)
        result["largest difference"] = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    if compare:
        result["bits"] = differing_bits(found[OURS][0], x, spans)
    del found
    for direction in DIRECTIONS:
        calls: dict[str, Callable[[], Any]] = {name: getattr(step, direction) for name, step in steps.items()}
        for name, ms in medians_within(seconds, calls, device=device).items():
            result["providers"][name][f"{direction}_ms"] = ms
    return result


@torch.no_grad()
def differing_bits(y: Tensor, x: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> list[int]:
    """How many numbers of some documents of y differ from attention of each alone, and of how many."""
    differing = count = 0
    for start, length in spans[:COMPARED]:
        part = slice(start, start + length)
        q, k, v = (t[:, part] for t in x)
        differing += int((y[:, part] != attend(q, k, v)).sum())
        count += q.numel()
    return [differing, count]


def line(result: Json) -> str:
    """One line about a row, for the terminal."""
    name = f"{' x '.join(map(str, result['shape']))}, {result['variant']}"
    if "error" in result:
        return f"{name}: {result['error']}"
    parts = []
    for direction in DIRECTIONS:
        times = {name: entry[f"{direction}_ms"] for name, entry in result["providers"].items()}
        parts.append(f"{direction} " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()))
    return f"{name}: {'; '.join(parts)}; bits {result.get('bits')}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/packed_attention.json"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny rows: checks that everything runs")
    parser.add_argument("--limit", type=float, default=95.0, help="no row starts after these seconds; default: 95")
    arguments = parser.parse_args(argv)
    begin, device, results = time.perf_counter(), arguments.device, list[Json]()
    todo = list(rows(arguments.quick))
    flex, shape = None, None
    for row in (progress := tqdm(todo, unit="row")):
        if time.perf_counter() - begin > arguments.limit:
            break
        if shape != (shape := (row.tokens, row.head_dim)) and device == "cuda":
            flex = Flex()
            torch.cuda.empty_cache()
        progress.set_description(row.name)
        try:
            compare = row.tokens == todo[0].tokens
            result = measure(row, flex, 0.001 if arguments.quick else 0.2, device, compare=compare)
        except Exception as error:
            shape_of_row = [row.tokens, HEADS, KV_HEADS, row.head_dim]
            result = {"shape": shape_of_row, "variant": row.documents, "error": reason(error)}
        synchronize(device)
        results.append(result)
        progress.write(line(result))
        save_result(arguments.out, {"what": __doc__, "rows": results}, {"rows": results})


if __name__ == "__main__":
    main()
