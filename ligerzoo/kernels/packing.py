"""Plans of batches for the documents of packed rows: which documents share a batch, and the slots of their tokens.

`packed_attention` gathers documents of similar length into batches, with padding on their right. Few batches have much
padding, many take long to launch. On one H200, attention of 32 heads of 128 takes, forward and backward, 0.046 ms for a
million pairs of a query and a key (4 documents of 500 tokens), 0.069 ms for 1000 tokens, and 0.117 ms for a batch: 15
mixtures of lengths were within 5 % of that. Heads of 64 take two thirds of it. So a plan minimizes the sum of these.

cuDNN plans each shape of a batch once, which takes about 0.1 s. So lengths and numbers of documents are rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import cdiv, next_power_of_2

TOKEN_COST, BATCH_COST = 1500, 2_500_000
"""Costs of a token and of a batch, in pairs of a query and a key."""

_LENGTHS, _COUNTS = 16, 4
"""Lengths, and numbers of documents, per octave."""

_SHORTEST = 64
"""Tokens of the shortest batch."""


Span = tuple[int, int]
"""The first token of a document in its row, and its number of tokens."""


class Packing(NamedTuple):
    """The slots of the tokens of B packed rows of T tokens in batches of documents. S slots in all.

    Attributes:
        source: (S,) int32, the token of each slot, counted over the rows; -1 for padding.
        slots: (B, T) int32, the slot of each token; -1 for a token without one.
        alone: (A,) int64, the tokens without a slot: documents of one token, and padding.
        batches: (batches, 2) int64, on the CPU: documents and tokens of a document.
    """

    source: Tensor
    slots: Tensor
    alone: Tensor
    batches: Tensor


def pack_documents(rows: Sequence[Sequence[Span]], tokens: int, device: torch.device | str | None = None) -> Packing:
    """Plans the batches of `packed_attention`, on the host.

    Args:
        rows: the documents of each row. Tokens of no document are padding.
        tokens: T.
        device: of the results but `batches`, to which they are copied without a host sync.

    Raises:
        ValueError: spans are not of integers, or documents overlap, are not in order, or do not fit their row.
    """
    for row, spans in enumerate(rows):
        _check_spans(row, spans, tokens)
    documents = sorted(
        ((length, row * tokens + start) for row, spans in enumerate(rows) for start, length in spans if length > 1),
        reverse=True,
    ) or [(0, 0)]  # a batch of padding, so that there is one
    batches, source = [], []
    for batch in plan([length for length, _ in documents]).batches:
        length, count = padded_length(documents[batch.start][0]), batch.stop - batch.start
        sizes, starts = torch.tensor(documents[batch], dtype=torch.int32)[..., None].unbind(1)
        offsets = torch.arange(length, dtype=torch.int32)
        index = torch.full((_rounded(count, _COUNTS), length), -1, dtype=torch.int32)
        index[:count] = torch.where(offsets < sizes, starts + offsets, -1)
        source.append(index.flatten())
        batches.append(index.shape)
    index = torch.cat(source)
    slots = torch.full((len(rows) * tokens,), -1, dtype=torch.int32)
    slots[index[index >= 0]] = torch.arange(len(index), dtype=torch.int32)[index >= 0]
    alone = (slots < 0).nonzero()[:, 0]
    table = torch.tensor(batches, dtype=torch.int64).view(-1, 2)
    return Packing(_copy(index, device), _copy(slots.view(len(rows), tokens), device), _copy(alone, device), table)


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


def cost(rows: Sequence[Sequence[Span]]) -> int:
    """Cost of `packed_attention` for these documents, in pairs of a query and a key."""
    return plan(sorted((length for spans in rows for _, length in spans if length > 1), reverse=True)).cost


def flex_cost(rows: Sequence[Sequence[Span]], tokens: int) -> int:
    """Cost of FlexAttention for packed rows, in the same unit.

    On the same GPU it takes 0.069 ms for a million pairs, 0.070 ms for 1000 tokens, and 0.17 ms: 15 mixtures of lengths
    were within 14 % of that. Compiled for one shape; for any shape it takes up to 1.4 times as long.
    """
    pairs = sum(length * length for spans in rows for _, length in spans)
    return pairs * 3 // 2 + len(rows) * tokens * TOKEN_COST + 3_700_000


class Plan(NamedTuple):
    """How documents are divided into batches.

    Attributes:
        batches: the documents of each batch.
        cost: in pairs of a query and a key.
    """

    batches: list[slice]
    cost: int


def plan(lengths: Sequence[int]) -> Plan:
    """Divides documents, the longest first, into the batches of least cost."""
    padded = [padded_length(length) for length in lengths]
    bounds = [i for i, length in enumerate(padded) if i == 0 or length < padded[i - 1]]  # equal lengths share a batch
    best: dict[int, tuple[int, int]] = {
        0: (0, 0)
    }  # cost of the documents before a bound, and where the last batch begins
    for end in [*bounds[1:], len(padded)]:
        best[end] = min((best[s][0] + batch_cost(end - s, padded[s]), s) for s in bounds if s < end) if end else (0, 0)
    batches, end = [], len(padded)
    while end:
        start = best[end][1]
        batches.append(slice(start, end))
        end = start
    return Plan(batches[::-1], best[len(padded)][0])


def batch_cost(documents: int, length: int) -> int:
    """Cost of a batch, in pairs of a query and a key."""
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
