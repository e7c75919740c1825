"""State-space duality in plain torch, by chunks of 32 tokens: what runs on a CPU, and with `backend="torch"`.

The formulas are those of `ssd_chunks`; the chunks are those of `torch_chunks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.torch_chunks import ChunkDecays, TorchChunks


def chunked_ssd(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    dt: Tensor,
    d: Tensor | None = None,
    initial_state: Tensor | None = None,
    segment_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`ssd.reference`, faster: its operations and the states that it keeps are for 32 tokens at a time."""
    dtype = accumulation_dtype(x.dtype)
    batch, tokens, heads, features = x.shape
    group = heads // b.shape[2]
    chunks = TorchChunks.of(tokens, segment_start)
    skip = None if d is None else d.to(dtype)[:, None] * x.to(dtype)
    x, b, c, g, dt = (chunks.split(t.to(dtype)) for t in (x, b, c, g[..., None], dt[..., None]))
    decay, written = ChunkDecays.of(g), dt * x
    b, c, products = (t.repeat_interleave(group, 2) for t in (b, c, c @ b.mT))
    added = b.mT @ (decay.after * written)

    state = x.new_zeros(batch, heads, b.shape[-1], features) if initial_state is None else initial_state.to(dtype)
    states = []
    for chunk, (new, kept_share) in enumerate(zip(added.unbind(), decay.whole.unbind(), strict=True)):
        states.append(chunks.state_before(chunk, state))
        state = kept_share * states[-1] + new
    y = chunks.join((decay.within * products) @ written + (decay.before * c) @ torch.stack(states))
    return (y if skip is None else y + skip), state
