"""Attention with the masks of a call by torch's FlexAttention, in the notation of `attention_paths`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache as cached
from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels import apply_sinks
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.layers.attention_on_meta import attention_on_meta
from ligerzoo.layers.fused_sdpa import MAX_FUSED_HEAD
from ligerzoo.layers.masks import AttentionMask


def run_flex_attention(call: AttentionCall) -> Tensor:
    """Returns the outputs of a call with an `AttentionMask`, (B, T, N, D)."""
    q, k, v, mask, scale, softcap, _, sinks = call
    assert isinstance(mask, AttentionMask)
    if q.is_meta:
        out, lse = attention_on_meta(q, k, v, is_causal=True)
        return out if sinks is None else apply_sinks(out, lse, sinks)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    arguments = q, k, v, _softcapped(softcap), mask.block_mask(), scale, q.shape[1] != k.shape[1]
    tiles = flex_tiles(q)
    with nullcontext() if torch.compiler.is_compiling() else _many_flex_kernels():
        if sinks is None:
            plain: Tensor = _compiled_flex_attention()(*arguments, kernel_options=tiles)
            return plain.transpose(1, 2)
        from torch.nn.attention.flex_attention import AuxRequest

        out, aux = _compiled_flex_attention()(*arguments, return_aux=AuxRequest(lse=True), kernel_options=tiles)
    return apply_sinks(out.transpose(1, 2), aux.lse, sinks)


def flex_tiles(x: Tensor) -> dict[str, int] | None:
    """Returns FlexAttention's `kernel_options` for large heads, (..., D), whose own tiles exceed the shared memory."""
    if x.shape[-1] <= MAX_FUSED_HEAD:
        return None
    has_large_memory = torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    queries, keys, tile, warps = (64, 64, 32, 8) if has_large_memory and x.itemsize == 2 else (32, 16, 16, 4)
    forward = {"fwd_BLOCK_M": queries, "fwd_BLOCK_N": keys, "fwd_num_stages": 1, "fwd_num_warps": warps}
    backward = {f"bwd_BLOCK_{name}": tile for name in ("M1", "N1", "M2", "N2")}
    return {**forward, **backward, "bwd_num_stages": 1, "bwd_num_warps": warps}


@cached
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@contextmanager
def _many_flex_kernels() -> Iterator[None]:
    """Within this context, torch compiles up to 128 variants of a function, instead of 8.

    Each mask, cap, dtype, head size and grad mode is a variant. Above the limit, torch would run FlexAttention without
    a kernel, with all scores in memory.
    """
    config = torch._dynamo.config
    limit = config.recompile_limit
    config.recompile_limit = max(limit, 128)
    try:
        yield
    finally:
        config.recompile_limit = limit


@cached  # one function per cap, so that it is compiled once
def _softcapped(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None
    return lambda score, batch, head, query, key: softcap * torch.tanh(score / softcap)
