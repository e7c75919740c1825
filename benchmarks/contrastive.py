"""The fused contrastive loss of embeddings against PyTorch with the matrix of all similarities: time, memory and error.
`benchmarks.row` describes the method.

    python -m benchmarks.contrastive
    python -m benchmarks.contrastive --device cpu --quick --out /tmp/contrastive.json

Pairs x features of normalized embeddings, in bf16 or fp32: InfoNCE, the mean of both directions (CLIP), and InfoNCE
with a hard negative for each query, which is a candidate of all queries. Peers are PyTorch with the matrix in fp32
("eager") and in the dtype of the embeddings ("eager, bf16 matrix"), the first one compiled, and a loop over chunks of
queries whose similarities the backward pass computes again ("chunks"). The truth in fp64 is computed in chunks too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.losses import EMBEDDING_LOSSES, TEMPERATURE, clip, infonce, ours
from benchmarks.operations import GIB, plain, upcast
from benchmarks.row import OURS, Floor, Function, Goal, Provider, Row
from benchmarks.suite import Size, suite_command

CHUNKS = 16
BF16_MATRIX, IN_CHUNKS = "eager, bf16 matrix", "chunks"


@dataclass(frozen=True)
class Workload:
    """A contrastive loss.

    Attributes:
        pairs: queries, each with a positive.
        features: size of an embedding.
        dtype: of the embeddings.
        both: whether positives have a softmax over the queries too.
        negatives: hard negatives in all.
    """

    pairs: int
    features: int
    dtype: torch.dtype = torch.bfloat16
    both: bool = False
    negatives: int = 0

    @property
    def variant(self) -> str:
        what = "both directions" if self.both else f"{self.negatives} negatives" if self.negatives else ""
        return ", ".join(filter(None, ["fp32" if self.dtype == torch.float32 else "bf16", what]))


def workloads(size: Size) -> Iterator[Workload]:
    """Yields the losses, the most important ones first."""
    large, medium, small, features = (size(n) for n in (32768, 16384, 4096, 1024))
    yield Workload(large, features)
    yield Workload(large, features, torch.float32)
    yield Workload(large, features, both=True)
    yield Workload(medium, features, negatives=medium)
    for dtype in (torch.bfloat16, torch.float32):
        for pairs in (medium, small):
            yield Workload(pairs, features, dtype)
    yield Workload(large, size(768))
    yield Workload(medium, size(768), torch.float32, both=True)


def matrix(workload: Workload, queries: Tensor, positives: Tensor, *negatives: Tensor, in_fp32: bool = True) -> Tensor:
    """The loss, with the matrix of all similarities in fp32 (fp64 for fp64 inputs) or in the inputs' dtype."""
    products = queries @ torch.cat([positives, *negatives]).T
    logits = (upcast(products) if in_fp32 else products) / TEMPERATURE
    labels = torch.arange(len(queries), device=queries.device)
    loss = F.cross_entropy(logits, labels)
    return (loss + F.cross_entropy(logits[:, : len(queries)].T, labels)) / 2 if workload.both else loss


def in_chunks(workload: Workload, queries: Tensor, positives: Tensor, *negatives: Tensor) -> Tensor:
    """The loss in chunks of queries, and of positives for the second direction."""
    loss = chunked(queries, torch.cat([positives, *negatives]))
    return (loss + chunked(positives, queries)) / 2 if workload.both else loss


def chunked(rows: Tensor, candidates: Tensor) -> Tensor:
    """The mean loss of rows, whose positives are the first candidates; one chunk of similarities exists at a time."""

    def total(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(upcast(rows @ candidates.T) / TEMPERATURE, labels, reduction="sum")

    chunks = zip(rows.chunk(CHUNKS), torch.arange(len(rows), device=rows.device).chunk(CHUNKS), strict=True)
    losses = [checkpoint(total, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(losses).sum() / len(rows)


def row(workload: Workload) -> Row:
    def inputs() -> dict[str, Tensor]:
        counts = {"queries": workload.pairs, "positives": workload.pairs, "negatives": workload.negatives}
        return {
            name: F.normalize(torch.randn(count, workload.features)).to(workload.dtype).requires_grad_()
            for name, count in counts.items()
            if count
        }

    options = {"temperature": TEMPERATURE, "similarity": "dot", **EMBEDDING_LOSSES[clip if workload.both else infonce]}

    def of_embeddings(loss: Function, _: Function) -> Function:
        return lambda *embeddings: loss(*embeddings, **options).loss

    formula = partial(matrix, workload)
    providers = {OURS: ours("contrastive_loss", of_embeddings), **plain(formula)}
    if workload.dtype == torch.bfloat16:
        providers[BF16_MATRIX] = Provider(lambda: partial(formula, in_fp32=False))
    providers[IN_CHUNKS] = Provider(lambda: partial(in_chunks, workload))
    product = 2 * workload.pairs * (workload.pairs + workload.negatives) * workload.features
    return Row(
        "contrastive",
        (workload.pairs, workload.features),
        inputs,
        partial(in_chunks, workload),
        providers,
        Floor(product, 3 * product, "FLOPs"),
        Goal(of_peer=0.7, extra_mib=GIB, directions=("forward_backward",)),
        workload.variant,
        outputs=("loss",),
        tokens_at_once=workload.pairs,
    )


def rows(size: Size) -> Iterator[Row]:
    yield from map(row, workloads(size))


if __name__ == "__main__":
    suite_command(rows, what=__doc__, out=Path("benchmarks/results/contrastive.json"), seconds=1.0)
