"""Plans of batches for the documents of packed rows: which documents share a batch, and the slots of their tokens.

`packed_attention` gathers documents of similar length into batches, with padding on their right. Few batches have much
padding, many take long to launch. A batch of one document needs no copy: it is read where it is in its row, followed by
other tokens in place of padding. So are documents at equal distances, such as those of one length that fill a row.

A plan minimizes the time that a model of it expects. On one H200, attention of 32 heads of 128 takes, forward and
backward, 0.050 ms for a million pairs of a query and a key (4 documents of 500 tokens), 0.042 ms for 1000 tokens,
0.031 ms to copy them, or half of it in place, and 0.1 ms for a batch, or 0.2 where it waits for the host. Heads of 64
take two thirds of it.

cuDNN plans each shape of a batch once, which takes about 0.1 s. So lengths and numbers of documents are rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import cdiv, next_power_of_2

TOKEN_COST, TOKEN_COST_IN_PLACE, BATCH_COST = 1470, 1140, 4_000_000
"""Costs of a token, copied or read in place, and of a batch, in pairs of a query and a key."""

_LENGTHS, _COUNTS = 16, 4
"""Lengths, and numbers of documents, per octave."""

_SHORTEST, _LONG = 64, 1024
"""Tokens of the shortest batch, and of the shortest document that may be in another batch than others of its length."""


Span = tuple[int, int]
"""The first token of a document in its row, and its number of tokens."""


class Packing(NamedTuple):
    """The slots of the tokens of B packed rows of T tokens in batches of documents. S slots in all.

    Attributes:
        source: (S,) int32, the token of each slot, counted over the rows; -1 for padding.
        alone: (A,) int64, the tokens without a slot: documents of one token, and padding.
        batches: (batches, 3) int64, on the CPU: documents, tokens of a document, and the first token where the
            documents are read in place, else -1.
        rows: B.
        tokens: T.
    """

    source: Tensor
    alone: Tensor
    batches: Tensor
    rows: int
    tokens: int


class Boundaries(NamedTuple):
    """Where the documents of B packed rows of T tokens begin and end, counted over the rows.

    Attributes:
        positions: (n + 1,) int32, the first token of each document, and B * T. Tokens between documents, and at the end
            of a row, form documents too.
        longest: tokens of the longest document.
    """

    positions: Tensor
    longest: int


class DocumentBatch(NamedTuple):
    """Documents that share a batch.

    Attributes:
        documents: the first token of each, counted over the rows, and its number of tokens.
        length: tokens of the batch for each document.
        in_place: whether the documents are read where they are, `length` tokens apart.
    """

    documents: Sequence[Span]
    length: int
    in_place: bool

    @property
    def cost(self) -> int:
        """In pairs of a query and a key."""
        return batch_cost(len(self.documents), self.length, self.in_place)

    def source(self) -> Tensor:
        """The token of each slot, (documents, length) int32; -1 for padding, of which there may be documents."""
        count = len(self.documents) if self.in_place else _rounded(len(self.documents), _COUNTS)
        starts, sizes = torch.tensor(self.documents, dtype=torch.int32)[..., None].unbind(1)
        offsets = torch.arange(self.length, dtype=torch.int32)
        index = torch.full((count, self.length), -1, dtype=torch.int32)
        index[: len(self.documents)] = torch.where(offsets < sizes, starts + offsets, -1)
        return index


def boundaries_of(rows: Sequence[Sequence[Span]], tokens: int, device: torch.device | str | None = None) -> Boundaries:
    """Returns the boundaries of the documents of rows of T tokens, copied to a device without a host sync."""
    ends = (row * tokens + end for row, spans in enumerate(rows) for span in spans for end in (span[0], sum(span)))
    bounds = sorted({*ends, *range(0, len(rows) * tokens + 1, max(tokens, 1))})
    longest = max((stop - start for start, stop in pairwise(bounds)), default=0)
    return Boundaries(_copy(torch.tensor(bounds, dtype=torch.int32), device), longest)


def pack_documents(rows: Sequence[Sequence[Span]], tokens: int, device: torch.device | str | None = None) -> Packing:
    """Plans the batches of `packed_attention`, on the host.

    Args:
        rows: the documents of each row. Tokens of no document are padding.
        tokens: T.
        device: of the results but `batches`, to which they are copied without a host sync.

    Raises:
        ValueError: spans are not of integers, or documents overlap, are not in order, or do not fit their row.
    """
    return as_packing(plan(rows, tokens), len(rows), tokens, device)


def as_packing(
    batches: Sequence[DocumentBatch], rows: int, tokens: int, device: torch.device | str | None = None
) -> Packing:
    """Copies a plan to a device, see `pack_documents`."""
    sources = [batch.source() for batch in batches]
    table = [
        (*source.shape, batch.documents[0][0] if batch.in_place else -1)
        for batch, source in zip(batches, sources, strict=True)
    ]
    source = torch.cat([torch.empty(0, dtype=torch.int32), *(x.flatten() for x in sources)])
    is_alone = torch.ones(rows * tokens, dtype=torch.bool)
    is_alone[source[source >= 0]] = False
    alone = is_alone.nonzero()[:, 0]
    return Packing(
        _copy(source, device), _copy(alone, device), torch.tensor(table, dtype=torch.int64).view(-1, 3), rows, tokens
    )


def _check_spans(row: int, spans: Sequence[Span], tokens: int) -> None:
    last = 0
    for start, length in spans:
        if not (hasattr(start, "__index__") and hasattr(length, "__index__")):
            got = f"({start!r}, {length!r})"
            raise ValueError(f"pack_documents: rows[{row}] has the span {got}; expected a token and a length as int")
        if start < last or length < 0 or start + length > tokens:
            raise ValueError(
                f"pack_documents: rows[{row}] has a document of {length} tokens from token {start} on; expected "
                f"documents in order, which do not overlap, within {tokens} tokens"
            )
        last = start + length


def packing_pays(batches: Sequence[DocumentBatch], rows: Sequence[Sequence[Span]], tokens: int, features: int) -> bool:
    """Whether `packed_attention` is at least as fast as FlexAttention: the rule where exactness is not asked for.

    On the same GPU FlexAttention, compiled for one shape, takes 0.070 ms for a million pairs, 0.073 ms for 1000 tokens,
    and 0.126 ms; for any shape it takes up to 1.4 times as long. Both take less time for fewer features, except for
    what a batch takes, which is that of the host. Compared with such batches it takes 1.2 times that: the rule
    chooses the faster way, forward and backward, in 29 of the 30 rows of docs/benchmarks.md.

    Args:
        batches: the plan.
        rows: the documents of each row.
        tokens: T.
        features: of the queries of a token, N * D.
    """
    pairs = sum(length * length for spans in rows for _, length in spans)
    flex_cost = (pairs * 10 // 7 + len(rows) * tokens * 1470 + 2_500_000) * 6 // 5
    of_batches = len(batches) * BATCH_COST * max(0, 4096 - features) // features
    return sum(batch.cost for batch in batches) + of_batches <= flex_cost


def plan(rows: Sequence[Sequence[Span]], tokens: int) -> list[DocumentBatch]:
    """Divides the documents of rows of T tokens into the batches of least cost. Documents of one token need none.

    Raises:
        ValueError: see `pack_documents`.
    """
    for row, spans in enumerate(rows):
        _check_spans(row, spans, tokens)
    documents = [(row * tokens + start, n) for row, spans in enumerate(rows) for start, n in spans if n > 1]
    batches = _by_length(sorted(documents, key=lambda document: -document[1]), len(rows) * tokens)
    whole = _in_place(documents, len(rows) * tokens)
    return [whole] if whole is not None and whole.cost <= sum(batch.cost for batch in batches) else batches


def _in_place(documents: Sequence[Span], end: int) -> DocumentBatch | None:
    """A batch of documents at equal distances, if these have the length of a batch; else None."""
    if len(documents) < 2:
        return None
    (first, _), (second, _) = documents[:2]
    distance, longest = second - first, max(length for _, length in documents)
    is_even = all(start == first + i * distance for i, (start, _) in enumerate(documents))
    fits = longest <= distance == padded_length(distance) and first + len(documents) * distance <= end
    return DocumentBatch(documents, distance, in_place=True) if is_even and fits else None


def _by_length(documents: Sequence[Span], end: int) -> list[DocumentBatch]:
    """Divides documents, the longest first, into the batches of least cost. The rows end at token `end`."""
    padded = [padded_length(length) for _, length in documents]
    # Short documents of equal lengths share a batch, so that there are few ways.
    bounds = [i for i, n in enumerate(padded) if i == 0 or n < padded[i - 1] or n >= _LONG]
    fits = [start + length <= end for (start, _), length in zip(documents, padded, strict=True)]
    best: dict[int, tuple[int, int]] = {0: (0, 0)}  # of the documents before a bound: cost, where the last batch begins
    for stop in [*bounds[1:], len(padded)] if documents else []:
        best[stop] = min(
            (best[s][0] + batch_cost(stop - s, padded[s], in_place=fits[s] and s + 1 == stop), s)
            for s in bounds
            if s < stop
        )
    batches, stop = [], len(padded)
    while stop:
        start = best[stop][1]
        batches.append(DocumentBatch(documents[start:stop], padded[start], in_place=fits[start] and start + 1 == stop))
        stop = start
    return batches[::-1]


def batch_cost(documents: int, length: int, in_place: bool) -> int:
    """Cost of a batch, in pairs of a query and a key."""
    if in_place:
        return BATCH_COST + documents * length * (length + TOKEN_COST_IN_PLACE)
    return BATCH_COST + _rounded(documents, _COUNTS) * length * (length + TOKEN_COST)


def padded_length(length: int) -> int:
    """The length of the batch of a document."""
    return max(_SHORTEST, _rounded(length, _LENGTHS))


def _rounded(n: int, steps: int) -> int:
    """The next of `steps` sizes per octave."""
    step = max(1, next_power_of_2(n) // 2 // steps)
    return cdiv(n, step) * step


def _copy(x: Tensor, device: torch.device | str | None) -> Tensor:
    if device is None or torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
