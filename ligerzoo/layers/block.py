"""Residual blocks: how attention and feed-forward are put around the residual stream. A residual pattern is a class.

All are called as `block(x, context, cache)`, x: (B, T, H) -> (B, T, H), and call `self_attn(x, context, cache)`, as
`Attention` is called, and `mlp(x, context)`, as `GatedMLP` and `MoE` are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ligerzoo.layers.cache import LayerCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.linear import INIT_STD
from ligerzoo.layers.norm import add_and_normalize


class PreNormBlock(nn.Module):
    """Each branch reads a normalized copy of the residual stream and adds to the stream itself (Xiong et al. 2020,
    pre-LN).

    Args:
        input_layernorm: before the attention.
        self_attn: the attention.
        post_attention_layernorm: before the feed-forward.
        mlp: the feed-forward.
    """

    def __init__(
        self, input_layernorm: nn.Module, self_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), context, cache)
        normalized, x = add_and_normalize(x, attended, self.post_attention_layernorm)
        return x + self.mlp(normalized, context)  # type: ignore[no-any-return]


class ScaledPreNormBlock(PreNormBlock):
    """A pre-norm block whose branches are scaled before they are added (Granite; Yang et al. 2022, muP).

    Args:
        multiplier: what the outputs of both branches are multiplied by.
        parts: those of `PreNormBlock`.
    """

    def __init__(self, multiplier: float, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.multiplier = multiplier

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), context, cache)
        normalized, x = add_and_normalize(x, self.multiplier * attended, self.post_attention_layernorm)
        return x + self.multiplier * self.mlp(normalized, context)  # type: ignore[no-any-return]


class GatedPreNormBlock(PreNormBlock):
    """A pre-norm block each branch of which is scaled by the tanh of a learned number (Llama 3.2 Vision).

    Args:
        parts: those of `PreNormBlock`.
    """

    def __init__(
        self, *parts: nn.Module, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(*parts)
        self.gate_attn = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.gate_ffn = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.init_weights()

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the gates from N(0, std^2)."""
        nn.init.normal_(self.gate_attn, std=std)
        nn.init.normal_(self.gate_ffn, std=std)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        attended = self.gate_attn.tanh() * self.self_attn(self.input_layernorm(x), context, cache)
        normalized, x = add_and_normalize(x, attended, self.post_attention_layernorm)
        return x + self.gate_ffn.tanh() * self.mlp(normalized, context)  # type: ignore[no-any-return]


class PostNormBlock(nn.Module):
    """Each branch reads the residual stream as it is, and is normalized before it is added (OLMo 2; Liu et al. 2022).

    Args:
        self_attn: the attention.
        post_attention_layernorm: after the attention.
        mlp: the feed-forward.
        post_feedforward_layernorm: after the feed-forward.
    """

    def __init__(
        self, self_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module,
        post_feedforward_layernorm: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, context, cache))
        return x + self.post_feedforward_layernorm(self.mlp(x, context))  # type: ignore[no-any-return]


class SandwichBlock(nn.Module):
    """Each branch is normalized before and after (Ding et al. 2021, section 2.4; Gemma 2 and 3, GLM-4).

    Args:
        input_layernorm: before the attention.
        self_attn: the attention.
        post_attention_layernorm: after the attention.
        pre_feedforward_layernorm: before the feed-forward.
        mlp: the feed-forward.
        post_feedforward_layernorm: after the feed-forward.
    """

    def __init__(
        self, input_layernorm: nn.Module, self_attn: nn.Module, post_attention_layernorm: nn.Module,
        pre_feedforward_layernorm: nn.Module, mlp: nn.Module, post_feedforward_layernorm: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.pre_feedforward_layernorm = pre_feedforward_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), context, cache))
        normalized, x = add_and_normalize(x, attended, self.pre_feedforward_layernorm)
        return x + self.post_feedforward_layernorm(self.mlp(normalized, context))  # type: ignore[no-any-return]
