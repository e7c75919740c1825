"""Attention by the fastest kernel of torch's `scaled_dot_product_attention`, in the notation of `attention_paths`."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache as cached
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligerzoo.layers.attention_call import AttentionCall

MAX_FUSED_HEAD = 256
"""Largest head size of the kernels of cuDNN and FlashAttention."""

# Explicit, since the default choice differs between versions of torch. cuDNN is 1.7 times as fast on Hopper.
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

# For each of torch's kernels, functions that return whether it is enabled, and that enable or disable it.
_SWITCHES = [
    (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"))
    for name in ("cudnn", "flash", "mem_efficient", "math", "overrideable")
]
_CHOICE = [True, True, True, True, False], [backend.value for backend in (*_FASTEST_FIRST, SDPBackend.OVERRIDEABLE)]


def fused_sdpa(call: AttentionCall) -> Tensor:
    """Returns the outputs of a call without a soft cap and sinks, (B, T, N, D)."""
    q, k, v = call.q, call.k, call.v
    # The only kernel that keeps no scores has equal numbers of heads.
    if q.is_cuda and (q.dtype == torch.float32 or q.shape[-1] > MAX_FUSED_HEAD):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v, mask = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), call.additive(q.dtype)
    with _fastest_first(q) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(
            q, k, v, mask, scale=call.scale, is_causal=call.masks_future, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def _fastest_first(x: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which torch uses the fastest kernel on the GPU of x, and after which it chooses as before.

    torch sets its own order at the first choice of a process. A context around that choice would undo it.
    """
    if torch.compiler.is_compiling():
        return sdpa_kernel(_FASTEST_FIRST, set_priority=True)
    _let_torch_order_kernels(x.device)
    return _FASTEST


class _FastestFirst:
    """`sdpa_kernel(_FASTEST_FIRST, set_priority=True)` in a tenth of its time, 17 microseconds for each layer.

    torch's choice belongs to the process: the first thread that enters makes it, the last that leaves undoes it.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = [is_enabled() for is_enabled, _ in _SWITCHES], torch._C._get_sdp_priority_order()
                _choose_kernels(*_CHOICE)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _choose_kernels(*self._before)


_FASTEST = _FastestFirst()


def _choose_kernels(enabled: list[bool], order: list[int]) -> None:
    for (_, enable), is_enabled in zip(_SWITCHES, enabled, strict=True):
        enable(is_enabled)
    torch._C._set_sdp_priority_order(order)


@cached
def _let_torch_order_kernels(device: torch.device) -> None:
    x = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    torch._fused_sdp_choice(x, x, x)
