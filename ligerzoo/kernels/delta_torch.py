"""The gated delta rule in plain torch, by chunks of 32 tokens: what runs on a CPU, and with `backend="torch"`.

The formulas are those of `delta_chunks`; the chunks are those of `torch_chunks`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.delta_tiles import NORMALIZATION_EPS
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.torch_chunks import CHUNK, ChunkDecays, TorchChunks

_BLOCK = 8
"""Tokens whose decays are computed pair by pair, for each channel."""


class _ChannelDecays(NamedTuple):
    """Decays of each channel of the keys within chunks, as `ChunkDecays`.

    Attributes:
        total: (..., 32, D_k) sums of g, in fp64.
        before: (..., 32, D_k) from the state before the chunk to that after a token.
        after: (..., 32, D_k) from the state after a token to that after the chunk.
        whole: (..., D_k, 1) of the chunk.
    """

    total: Tensor
    before: Tensor
    after: Tensor
    whole: Tensor

    @staticmethod
    def of(g: Tensor) -> _ChannelDecays:
        """From g of shape (..., 32, D_k)."""
        total = g.cumsum(-2, dtype=torch.float64)
        before, after = total.to(g.dtype).exp(), (total[..., -1:, :] - total).to(g.dtype).exp()
        return _ChannelDecays(total, before, after, before[..., -1:, :].mT)

    def decayed_products(self, x: Tensor, k: Tensor) -> Tensor:
        """(..., 32, 32): the sums over c of x_ic k_jc exp(G_ic - G_jc) for j <= i, else 0; see `delta_channels`."""
        rows, dtype = [], k.dtype
        for first in range(0, CHUNK, _BLOCK):
            own, total = slice(first, first + _BLOCK), self.total[..., first : first + _BLOCK, :]
            pairs = (total[..., :, None, :] - total[..., None, :, :]).clamp(max=0.0).to(dtype).exp()
            block = (x[..., own, None, :] * pairs * k[..., None, own, :]).sum(-1).tril()
            start = total[..., :1, :]  # no exponent is positive
            earlier = (start - self.total[..., :first, :]).to(dtype).exp() * k[..., :first, :]
            before = (x[..., own, :] * (total - start).to(dtype).exp()) @ earlier.mT
            rows.append(F.pad(torch.cat([before, block], -1), (0, CHUNK - first - _BLOCK)))
        return torch.cat(rows, -2)


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
    chunks = TorchChunks.of(tokens, segment_start)
    is_per_channel = g.dim() == 4
    g = g if is_per_channel else g[..., None]
    q, k, v, g, beta = (chunks.split(x.to(dtype)) for x in (q, k, v, g, beta[..., None]))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORMALIZATION_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q * scale, k))

    decay: ChunkDecays | _ChannelDecays
    if is_per_channel:
        decay = _ChannelDecays.of(g)
        products, attention = beta * decay.decayed_products(k, k), decay.decayed_products(q, k)
    else:
        decay = ChunkDecays.of(g)
        products, attention = beta * decay.within * (k @ k.mT), decay.within * (q @ k.mT)
    strength = torch.diag_embed(beta.squeeze(-1))
    inverse = torch.linalg.solve_triangular(products.tril(-1), strength, upper=False, unitriangular=True)
    per_chunk = v, inverse, attention, decay.before * k, decay.before * q, decay.after * k, decay.whole

    state = v.new_zeros(batch, heads, k.shape[-1], value_dim) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for chunk, tensors in enumerate(zip(*(x.unbind() for x in per_chunk), strict=True)):
        values, solver, weights, readers, queries, writers, kept_share = tensors
        state = chunks.state_before(chunk, state)
        delta = solver @ (values - readers @ state)
        outputs.append(queries @ state + weights @ delta)
        state = kept_share * state + writers.mT @ delta
    return chunks.join(torch.stack(outputs)), state
