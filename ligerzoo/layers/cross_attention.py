"""Gated cross-attention: tokens attend to images (Alayrac et al. 2022, "Flamingo").

Shapes: B batch, T tokens in the call, S image states, H features of both, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ligerzoo.layers.attention import Attention
from ligerzoo.layers.cache import CrossAttentionLayerCache, LayerCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.cross_attention_inputs import inputs_of
from ligerzoo.layers.exactness import Obstacle, not_dense
from ligerzoo.layers.kv_cache import new_layer_cache
from ligerzoo.layers.linear import INIT_STD
from ligerzoo.layers.norm import add_and_normalize
from ligerzoo.layers.projection import check_features


class CrossAttention(Attention):
    """Attention to the states in `Context.cross_attention_inputs`, without positions.

    Args:
        hidden_size: H.
        num_heads: N.
        num_kv_heads: K, a divisor of N; N when None.
        head_dim: D; H / N when None.
        q_norm: applied to the queries (B, T, N, D); None for no norm.
        k_norm: applied to the keys (B, S, K, D); None for no norm.

    Raises:
        ValueError: `num_heads` is not a multiple of `num_kv_heads`, or `hidden_size` is not a multiple of `num_heads`
            and `head_dim` is None. In forward: the context and the cache hold no states.
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
        sizes = hidden_size, num_heads, num_kv_heads, head_dim
        super().__init__(*sizes, q_norm=q_norm, k_norm=k_norm, is_causal=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H).

        Args:
            x: the hidden states of T new tokens.
            context: holds the image states, `cross_attention_inputs`.
            cache: a `CrossAttentionLayerCache`; keys and values of new states are appended to it.
        """
        inputs = inputs_of(context)
        if inputs is None:
            raise ValueError("CrossAttention: context.cross_attention_inputs is None; expected CrossAttentionInputs")
        check_features(self, x, self.hidden_size)
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        k, v = self._keys_and_values(inputs.states, cache)
        out = self.attend(q, k, v, inputs.mask, context)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """See `Attention.exact_obstacles`."""
        yield not_dense(self)

    def new_cache(self, capacity: int | None = None) -> CrossAttentionLayerCache:
        """Returns an empty cache. `capacity` is unused: it limits tokens, and this cache holds image states."""
        return CrossAttentionLayerCache()

    def _keys_and_values(self, states: Tensor | None, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all states, cached and new, (B, S, K, D) each."""
        if states is None:
            if not isinstance(cache, CrossAttentionLayerCache) or cache.length == 0:
                raise ValueError("CrossAttention: got no states; expected new ones, or a cache that holds some")
            return cache.read()
        check_features(self, states, self.hidden_size)
        k, v = (projection(states).unflatten(-1, (-1, self.head_dim)) for projection in (self.k_proj, self.v_proj))
        if self.k_norm is not None:
            k = self.k_norm(k)
        return (k, v) if cache is None else cache.append(k, v)


class CrossAttentionBlock(nn.Module):
    """Pre-norm block with gated cross-attention (Flamingo, section 2.2).

    Each branch is multiplied by the tanh of a learned gate. Gates start at 0, so that a new block has no effect.
    Without cross-attention inputs it returns `x`.

    Args:
        input_layernorm: norm before attention.
        cross_attn: `CrossAttention`.
        post_attention_layernorm: norm before the MLP.
        mlp: the MLP, whose output is dropped for tokens in `CrossAttentionInputs.no_states`.
    """

    def __init__(
        self, input_layernorm: nn.Module, cross_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_layernorm = input_layernorm
        self.cross_attn = cross_attn
        self.attn_gate = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self.mlp_gate = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.init_weights()

    def init_weights(self, std: float = INIT_STD) -> None:
        """Sets the gates to 0, whatever `std` is."""
        nn.init.zeros_(self.attn_gate)
        nn.init.zeros_(self.mlp_gate)

    def new_cache(self, capacity: int | None = None) -> LayerCache:
        """Returns an empty cache of the attention."""
        return new_layer_cache(self.cross_attn, capacity)

    def is_skipped(self, context: Context) -> bool:
        """Returns whether the block returns its input: there are no images."""
        return context.cross_attention_inputs is None

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        inputs = inputs_of(context)
        if inputs is None:
            return x
        attended = self.attn_gate.tanh() * self.cross_attn(self.input_layernorm(x), context, cache)
        normalized, attended = add_and_normalize(x, attended, self.post_attention_layernorm)
        mlp_out = self.mlp_gate.tanh() * self.mlp(normalized, context)
        if inputs.no_states is not None:
            mlp_out = mlp_out.masked_fill(inputs.no_states, 0)
        out = attended + mlp_out
        return out if inputs.bypass is None else x.where(inputs.bypass, out)
