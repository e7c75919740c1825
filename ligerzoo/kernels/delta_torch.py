"""The gated delta rule in plain torch, by chunks of 32 tokens: what runs on a CPU, and with `backend="torch"`.

The formulas are those of `delta_chunks`. Chunks begin at the start of each segment, and zeros after their tokens fill
them up. Tokens of zeros do not change the state, and all matrix products have the same shapes and memory layout: so a
segment has the results of the segment alone, bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.delta_tiles import NORMALIZATION_EPS
from ligerzoo.kernels.dispatch import accumulation_dtype, cdiv

CHUNK = 32
"""Tokens of a chunk. On a CPU, 16 is faster below 20 tokens, and 64 nowhere."""


class _Layout(NamedTuple):
    """The chunks of packed rows, R = B or 1.

    Attributes:
        sources: (R, N * 32) token of each position in the chunks; T for a position to fill up.
        positions: (R, T) position of each token in the chunks.
        forgets: (R, N) whether nothing remains of the state before the chunk.
    """

    sources: Tensor
    positions: Tensor
    forgets: Tensor

    @staticmethod
    def of(segment_start: Tensor) -> _Layout:
        """The chunks of rows with these segments. Reads their number on the host."""
        rows, tokens = segment_start.shape
        index = torch.arange(tokens, device=segment_start.device).expand(rows, tokens)
        within = (index - segment_start) % CHUNK
        chunk = (within == 0).cumsum(1) - 1
        n_chunks = int(chunk.max()) + 1
        positions = chunk * CHUNK + within
        sources = index.new_full((rows, n_chunks * CHUNK), tokens).scatter(1, positions, index)
        first = sources[:, ::CHUNK]
        begins = F.pad((index == segment_start) & (index > 0), (0, 1))
        return _Layout(sources, positions, begins.gather(1, first))


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    segment_start: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """`delta_rule.reference`, faster: its operations and the states that it keeps are for 32 tokens at a time."""
    dtype = accumulation_dtype(v.dtype)
    batch, tokens, heads, value_dim = v.shape
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    layout = None if segment_start is None or tokens == 0 else _Layout.of(segment_start)
    q, k, v, g, beta = (_split(x.to(dtype), layout) for x in (q, k, v, g[..., None], beta[..., None]))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORMALIZATION_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q * scale, k))

    total = g.cumsum(-2, dtype=torch.float64)  # the error of a small difference of large sums is as large as theirs
    decay = (total - total.mT).tril().to(dtype).exp().tril()
    decay_before, decay_after = total.to(dtype).exp(), (total[..., -1:, :] - total).to(dtype).exp()
    system = (beta * decay * (k @ k.mT)).tril(-1)
    strength = torch.diag_embed(beta.squeeze(-1))
    inverse = torch.linalg.solve_triangular(system, strength, upper=False, unitriangular=True)
    attention = decay * (q @ k.mT)
    kept = decay_before[..., -1:, :]
    per_chunk = v, inverse, attention, decay_before * k, decay_before * q, decay_after * k, kept

    state = v.new_zeros(batch, heads, k.shape[-1], value_dim) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for chunk, tensors in enumerate(zip(*(x.unbind() for x in per_chunk), strict=True)):
        values, solver, weights, readers, queries, writers, kept_share = tensors
        if layout is not None:
            state = state.masked_fill(layout.forgets[:, chunk, None, None, None], 0.0)
        delta = solver @ (values - readers @ state)
        outputs.append(queries @ state + weights @ delta)
        state = kept_share * state + writers.mT @ delta
    return _join(torch.stack(outputs), tokens, layout), state


def _split(x: Tensor, layout: _Layout | None) -> Tensor:
    """(B, T, heads, D) -> (N, B, heads, 32, D), contiguous, with zeros after the tokens of a chunk; N is at least 1."""
    batch, tokens = x.shape[:2]
    if layout is None:
        padding = max(1, cdiv(tokens, CHUNK)) * CHUNK - tokens
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    else:
        rows = torch.arange(batch, device=x.device)[:, None]
        x = F.pad(x, (0, 0, 0, 0, 0, 1))[rows, layout.sources]
    return x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).contiguous()


def _join(x: Tensor, tokens: int, layout: _Layout | None) -> Tensor:
    """(N, B, heads, 32, D) -> (B, T, heads, D)."""
    x = x.permute(1, 0, 3, 2, 4).flatten(1, 2)
    if layout is None:
        return x[:, :tokens]
    return x[torch.arange(len(x), device=x.device)[:, None], layout.positions]
