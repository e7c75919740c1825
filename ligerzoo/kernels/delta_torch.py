"""The gated delta rule in plain torch, by chunks of 32 tokens: what runs on a CPU, and with `backend="torch"`.

The formulas are those of `delta_chunks`; the chunks are those of `torch_chunks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.delta_tiles import NORMALIZATION_EPS
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.torch_chunks import ChunkDecays, TorchChunks


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
    q, k, v, g, beta = (chunks.split(x.to(dtype)) for x in (q, k, v, g[..., None], beta[..., None]))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORMALIZATION_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q * scale, k))

    decay = ChunkDecays.of(g)
    system = (beta * decay.within * (k @ k.mT)).tril(-1)
    strength = torch.diag_embed(beta.squeeze(-1))
    inverse = torch.linalg.solve_triangular(system, strength, upper=False, unitriangular=True)
    attention = decay.within * (q @ k.mT)
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
