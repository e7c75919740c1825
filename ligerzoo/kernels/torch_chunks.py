"""Rows of tokens in chunks of 32, for recurrences in plain torch.

Chunks begin at the start of each segment, and zeros after their tokens fill them up. Tokens of zeros do not change the
state, and all matrix products have the same shapes and memory layout: so a segment has the results of the segment
alone, bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.dispatch import cdiv

CHUNK = 32
"""Tokens of a chunk. On a CPU, 16 is faster below 20 tokens, and 64 nowhere."""


class TorchChunks(NamedTuple):
    """The chunks of rows of T tokens, R = B or 1; N chunks in each row.

    Attributes:
        tokens: T.
        sources: (R, N * 32) token of each position in the chunks; T for a position to fill up. None without segments.
        positions: (R, T) position of each token in the chunks, likewise.
        forgets: (R, N) whether nothing remains of the state before the chunk, likewise.
    """

    tokens: int
    sources: Tensor | None = None
    positions: Tensor | None = None
    forgets: Tensor | None = None

    @staticmethod
    def of(tokens: int, segment_start: Tensor | None) -> TorchChunks:
        """The chunks of rows with these segments, (B or 1, T). Reads their number on the host."""
        if segment_start is None or tokens == 0:
            return TorchChunks(tokens)
        rows = len(segment_start)
        index = torch.arange(tokens, device=segment_start.device).expand(rows, tokens)
        within = (index - segment_start) % CHUNK
        chunk = (within == 0).cumsum(1) - 1
        n_chunks = int(chunk.max()) + 1
        positions = chunk * CHUNK + within
        sources = index.new_full((rows, n_chunks * CHUNK), tokens).scatter(1, positions, index)
        begins = F.pad((index == segment_start) & (index > 0), (0, 1))
        return TorchChunks(tokens, sources, positions, begins.gather(1, sources[:, ::CHUNK]))

    def split(self, x: Tensor) -> Tensor:
        """(B, T, heads, D) -> (N, B, heads, 32, D), contiguous, with zeros after a chunk's tokens; N is at least 1."""
        if self.sources is None:
            padding = max(1, cdiv(self.tokens, CHUNK)) * CHUNK - self.tokens
            x = F.pad(x, (0, 0, 0, 0, 0, padding))
        else:
            rows = torch.arange(len(x), device=x.device)[:, None]
            x = F.pad(x, (0, 0, 0, 0, 0, 1))[rows, self.sources]
        return x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """(N, B, heads, 32, D) -> (B, T, heads, D)."""
        x = x.permute(1, 0, 3, 2, 4).flatten(1, 2)
        if self.positions is None:
            return x[:, : self.tokens]
        return x[torch.arange(len(x), device=x.device)[:, None], self.positions]

    def state_before(self, chunk: int, state: Tensor) -> Tensor:
        """The state before a chunk, (B, heads, D, D'), from that after the chunk before it."""
        return state if self.forgets is None else state.masked_fill(self.forgets[:, chunk, None, None, None], 0.0)


class ChunkDecays(NamedTuple):
    """Decays within chunks, from logarithms g of the decays of tokens, which are not positive.

    Attributes:
        within: (..., 32, 32) from the state after token j to that after token i >= j; 0 for others.
        before: (..., 32, 1) from the state before the chunk to that after a token.
        after: (..., 32, 1) from the state after a token to that after the chunk.
        whole: (..., 1, 1) of the chunk.
    """

    within: Tensor
    before: Tensor
    after: Tensor
    whole: Tensor

    @staticmethod
    def of(g: Tensor) -> ChunkDecays:
        """From g of shape (..., 32, 1)."""
        total = g.cumsum(-2, dtype=torch.float64)  # the error of a small difference of large sums is as large as theirs
        within = (total - total.mT).tril().to(g.dtype).exp().tril()
        before, after = total.to(g.dtype).exp(), (total[..., -1:, :] - total).to(g.dtype).exp()
        return ChunkDecays(within, before, after, before[..., -1:, :])
