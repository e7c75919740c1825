"""Gated cross-attention: layers in which the tokens of a text look at images (Alayrac et al. 2022, "Flamingo").

Shapes: B batch, T tokens in the call, S states of the memory, H features of either, K key-value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ligerzoo.layers.attention import Attention, attend
from ligerzoo.layers.cache import CrossAttentionLayerCache, LayerCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.linear import INIT_STD
from ligerzoo.layers.norm import add_and_normalize


class CrossAttention(Attention):
    """Attention to the context's memory: its states make the keys and values, without positions.

    Args:
        hidden_size: H.
        num_heads: N.
        num_kv_heads: K, a divisor of N; N when None.
        head_dim: D; H / N when None.
        q_norm: applied to the queries (B, T, N, D); None for none.
        k_norm: applied to the keys (B, S, K, D); None for none.

    Raises:
        ValueError: the numbers make no attention; or, when it is called, there is nothing to attend to.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, num_heads, num_kv_heads, head_dim, q_norm=q_norm, k_norm=k_norm, is_causal=False,
            device=device, dtype=dtype,
        )  # fmt: skip

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H).

        Args:
            x: the hidden states of T new tokens.
            context: has the memory.
            cache: a `CrossAttentionLayerCache`, which takes up the keys and values of new states.
        """
        memory = context.cross_attention_inputs
        if memory is None:
            raise ValueError("CrossAttention: the context has no memory to attend to")
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        k, v = self._keys_and_values(memory.states, cache)
        out = attend(q, k, v, memory.mask, is_causal=False)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]

    def _keys_and_values(self, states: Tensor | None, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        """Those of the whole memory, (B, S, K, D) each."""
        if states is None:
            if not isinstance(cache, CrossAttentionLayerCache) or cache.length == 0:
                raise ValueError("CrossAttention: a memory without states, and none in the cache")
            return cache.held()
        k, v = (projection(states).unflatten(-1, (-1, self.head_dim)) for projection in (self.k_proj, self.v_proj))
        if self.k_norm is not None:
            k = self.k_norm(k)
        return (k, v) if cache is None else cache.append(k, v)


class CrossAttentionBlock(nn.Module):
    """A pre-norm block around cross-attention, each branch of which is scaled by the tanh of a learned number, at first
    0 (Flamingo, section 2.2). Without a memory it does nothing.

    Args:
        input_layernorm: before the attention.
        cross_attn: the attention.
        post_attention_layernorm: before the feed-forward.
        mlp: the feed-forward, which is left out for the memory's blind tokens.
    """

    def __init__(
        self, input_layernorm: nn.Module, cross_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_layernorm = input_layernorm
        self.cross_attn = cross_attn
        self.cross_attn_attn_gate = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self.cross_attn_mlp_gate = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.init_weights()

    def init_weights(self, std: float = INIT_STD) -> None:
        """Sets the gates to 0. `std` is unused; it keeps the signature uniform."""
        nn.init.zeros_(self.cross_attn_attn_gate)
        nn.init.zeros_(self.cross_attn_mlp_gate)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        memory = context.cross_attention_inputs
        if memory is None:
            return x
        attended = self.cross_attn_attn_gate.tanh() * self.cross_attn(self.input_layernorm(x), context, cache)
        normalized, attended = add_and_normalize(x, attended, self.post_attention_layernorm)
        fed = self.cross_attn_mlp_gate.tanh() * self.mlp(normalized, context)
        if memory.blind is not None:
            fed = fed.masked_fill(memory.blind, 0)
        out = attended + fed
        return out if memory.outside is None else x.where(memory.outside, out)
