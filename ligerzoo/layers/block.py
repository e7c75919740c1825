"""Residual blocks: how attention and feed-forward are put around the residual stream. A residual pattern is a class."""

from __future__ import annotations

from torch import Tensor, nn

from ligerzoo.layers.cache import LayerCache
from ligerzoo.layers.norm import add_and_normalize


class PreNormBlock(nn.Module):
    """Each branch reads a normalized copy of the residual stream and adds to the stream itself (Xiong et al. 2020,
    pre-LN).

    Args:
        input_layernorm: before the attention.
        self_attn: called with the states, the rotation, the mask and its cache, as `Attention` is.
        post_attention_layernorm: before the feed-forward.
        mlp: called with the states.
    """

    def __init__(
        self, input_layernorm: nn.Module, self_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x: (B, T, H) -> (B, T, H); the other arguments are those of `Attention`."""
        attended = self.self_attn(self.input_layernorm(x), rotation, mask, cache)
        normalized, x = add_and_normalize(x, attended, self.post_attention_layernorm)
        return x + self.mlp(normalized)  # type: ignore[no-any-return]
