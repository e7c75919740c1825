"""The documents of packed rows, or the texts between padding: which tokens attend to each other, known to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ligerzoo.kernels.packing import (
    Boundaries,
    DocumentBatch,
    Packing,
    Span,
    as_packing,
    boundaries_of,
    packing_pays,
    plan,
)

Rows = Sequence[Sequence[Span]]


class Documents:
    """The documents of B rows of T tokens.

    Args:
        rows: returns the documents of each row, or None if padding divides one. Called once, when attention needs them.
        tokens: T.
        device: of the tensors that attention reads.
        exact: give each document the attention that it has alone, to the bit, where another way is faster too.
    """

    def __init__(
        self, rows: Callable[[], Rows | None], tokens: int, device: torch.device, *, exact: bool = False
    ) -> None:
        self._read, self.tokens, self.device, self.exact = rows, tokens, device, exact
        self._pays: dict[int, bool] = {}

    @cached_property
    def rows(self) -> Rows | None:
        """The documents of each row; None if padding divides one. At first, a host sync where they are on a GPU."""
        return self._read()

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max((length for spans in self.rows or () for _, length in spans), default=0)

    @cached_property
    def boundaries(self) -> Boundaries:
        """Where documents, and the tokens between them, begin and end. There must be `rows`."""
        return boundaries_of(self.rows or (), self.tokens, self.device)

    @cached_property
    def packing(self) -> Packing:
        """The plan of `ligerzoo.kernels.packed_attention`."""
        return as_packing(self._batches, len(self.rows or ()), self.tokens, self.device)

    @cached_property
    def whole(self) -> int | None:
        """Tokens of each document, if all have the same length and fill the rows; else None."""
        length = self.longest
        full = [(start, length) for start in range(0, self.tokens, max(length, 1))]
        return length if length and all(list(spans) == full for spans in self.rows or ()) else None

    def packing_pays(self, features: int) -> bool:
        """Whether `packed_attention` is as fast as FlexAttention, for queries of N * D features."""
        if features not in self._pays:  # all layers ask
            is_fast = self.whole is not None
            self._pays[features] = is_fast or packing_pays(self._batches, self.rows or (), self.tokens, features)
        return self._pays[features]

    def divided(self, chunk: int) -> Documents:
        """The documents in parts of `chunk` tokens, of which the last may be shorter."""

        def read() -> Rows | None:
            return None if self.rows is None else [divided_spans(row, chunk) for row in self.rows]

        return Documents(read, self.tokens, self.device, exact=self.exact)

    @cached_property
    def _batches(self) -> list[DocumentBatch]:
        return plan(self.rows or (), self.tokens)


def segments(is_start: Tensor, rows: int) -> Rows:
    """The documents that begin where `is_start`, (B or 1, T) bool, is True, and with a row."""
    tokens = is_start.shape[1]
    bounds = [[0, *row.nonzero()[:, 0].tolist(), tokens] for row in is_start.cpu()]
    return [spans(row) for row in bounds] * (rows // len(bounds))


def divided_spans(row: Sequence[Span], chunk: int) -> list[Span]:
    """Divides documents into parts of `chunk` tokens."""
    ends = ((first, start + length) for start, length in row for first in range(start, start + length, chunk))
    return [(first, min(chunk, end - first)) for first, end in ends]


def spans(bounds: Sequence[int]) -> list[Span]:
    """The documents between boundaries."""
    return [(start, end - start) for start, end in pairwise(bounds)]


def unpadded(padding_mask: Tensor) -> Rows | None:
    """The text of each row of a padding mask, (B, T) bool; None if padding divides one."""
    found = []
    for row in padding_mask.cpu():
        index = row.nonzero()[:, 0].tolist()
        if index and index[-1] - index[0] + 1 != len(index):
            return None
        found.append([(index[0], len(index))] if index else [])
    return found
