"""Scaled dot-product attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023).

Shapes: B batch, T tokens in the call, S tokens seen in all (cached and new), N query heads, K key-value heads, D head
    size.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligerzoo.kernels import rope
from ligerzoo.kernels.dispatch import Backend, check_backend, wide
from ligerzoo.layers.cache import LayerCache

# Asked for by name: which one a plain call gets differs between versions of torch, and cuDNN's is 1.7 times as fast on
# Hopper.
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """`attend` in plain torch: scores in the inputs' dtype, softmax in fp32."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(
            1 + scores.shape[-1] - scores.shape[-2]
        )
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    probabilities = scores.softmax(-1, dtype=wide(q.dtype)).to(q.dtype)
    return (probabilities @ v).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale + mask) v.

    Args:
        q: (B, T, N, D).
        k: (B, S, K, D) with K a divisor of N: key head j serves query heads j*N/K to (j+1)*N/K - 1.
        v: (B, S, K, D).
        mask: (B or 1, 1, T, S), added to the scores. None is causal: T = S, or one new token (T = 1) that sees all.
        scale: D^-0.5 when None.

    Returns:
        (B, T, N, D).
    """
    # On a CPU torch's fused kernel is good for fp32 without padding alone: in half precision it ends up to 5 ulps of a
    # logit away from the plain steps, and it gives rows that see nothing gradients many times too large.
    if q.device.type == "cpu" and (q.dtype in (torch.bfloat16, torch.float16) or (mask is not None and q.shape[1] > 1)):
        return reference(q, k, v, mask, scale)
    is_causal = mask is None
    if q.shape[1] == 1:  # branched on, because torch.compile would leave a comparison of the length symbolic
        is_causal = False
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(
            q, k, v, mask, scale=scale, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries.

    Args:
        hidden_size: H.
        num_heads: N.
        num_kv_heads: K, a divisor of N; N when None.
        head_dim: D; H / N when None.
        qkv_bias: biases on the projections to queries, keys and values.
        output_bias: a bias on the output projection.
        backend: of the rotation: "auto" (Triton where it can), "triton" or "torch" (the reference).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        self.head_dim = head_dim or hidden_size // num_heads
        self.backend: Backend = check_backend(backend)
        if num_heads % num_kv_heads:
            raise ValueError(f"Attention: {num_heads} query heads cannot share {num_kv_heads} key-value heads evenly")
        q_size, kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, q_size, bias=qkv_bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(hidden_size, kv_size, bias=qkv_bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(hidden_size, kv_size, bias=qkv_bias, device=device, dtype=dtype)
        self.o_proj = nn.Linear(q_size, hidden_size, bias=output_bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initializes the four projections anew."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            projection.reset_parameters()

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x: (B, T, H) -> (B, T, H).

        Args:
            x: the hidden states of T new tokens.
            rotation: their cosines and sines from `RotaryEmbedding`.
            mask: see `attend`.
            cache: what came before; it takes up the new keys and values.
        """
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rope(q, k, *rotation, backend=self.backend)
        if cache is not None:
            k, v = cache.append(k, v)
        out = attend(q, k, v, mask)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]
