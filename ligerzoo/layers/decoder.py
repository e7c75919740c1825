"""The decoder: embedding, a stack of blocks, a final norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligerzoo.layers.cache import CrossAttentionLayerCache, KVCache, LayerCache, RollingLayerCache, StaticLayerCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.cross_attention import CrossAttentionBlock


class Decoder(nn.Module):
    """Token ids (or embeddings) to final hidden states.

    Args:
        embed_tokens: token ids to embeddings.
        layers: the blocks, each called as `PreNormBlock` is.
        norm: applied to the last block's output.
        input_scale: what the embeddings are multiplied by, those given as such as well.

    Attributes:
        gradient_checkpointing: keep only each block's input for the backward pass and compute the block again there.
    """

    def __init__(
        self, embed_tokens: nn.Module, layers: Iterable[nn.Module], norm: nn.Module, *, input_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.input_scale = input_scale
        self.gradient_checkpointing = False

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x: (B, T) token ids, or (B, T, H) embeddings in their place -> (B, T, H).

        Args:
            x: the new tokens.
            context: where they stand, and what came before; by default one behind the other, and nothing.
        """
        context = context if context is not None else Context(x)
        x = x if x.is_floating_point() else self.embed_tokens(x)
        if self.input_scale != 1.0:
            x = x * self.input_scale
        x = run_blocks(self.layers, x, context, recompute=self.gradient_checkpointing)
        return self.norm(x)  # type: ignore[no-any-return]

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache: rolling for layers with a sliding window and growing for the others, or, given a capacity,
        of that fixed size for all. (What cross-attention looks at takes what room it needs, and stays.)"""
        # A list and no generator, which torch.compile cannot make again when it returns the cache.
        return KVCache([_new_layer_cache(layer, capacity) for layer in self.layers])


def run_blocks(layers: Iterable[nn.Module], x: Tensor, context: Context, *, recompute: bool) -> Tensor:
    """x: (B, T, H) -> (B, T, H), through one block after the other.

    Args:
        layers: the blocks, each called as `PreNormBlock` is.
        x: what the first block reads.
        context: where the tokens stand, and what came before.
        recompute: keep only each block's input for the backward pass and compute the block again there. (Nothing is
            differentiated through a cache, so that with one there is nothing to compute again.)
    """
    recompute = recompute and torch.is_grad_enabled() and context.cache is None
    for index, layer in enumerate(layers):
        if recompute:
            x, router_logits = checkpoint(_forward, layer, x, context, use_reentrant=False)
            context.router_logits += router_logits
        else:
            x = layer(x, context, context.cache.layers[index] if context.cache is not None else None)
    return x


class BlockStack(nn.Module):
    """Blocks, one after the other.

    Args:
        layers: the blocks, each called as `PreNormBlock` is.

    Attributes:
        gradient_checkpointing: see `Decoder`.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.gradient_checkpointing = False

    def forward(self, x: Tensor, context: Context, kept: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """x: (B, T, E) -> (B, T, E), and as much after each of the blocks whose numbers are `kept`."""
        after: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            x = run_blocks([layer], x, context, recompute=self.gradient_checkpointing)
            if number in kept:
                after[number] = x
        return x, [after[number] for number in kept]


def _forward(layer: nn.Module, x: Tensor, context: Context) -> tuple[Tensor, list[Tensor]]:
    """What the layer makes of x, and what it notes in the context, which stays as it is."""
    context = context.fork()
    return layer(x, context), context.router_logits


def _new_layer_cache(layer: nn.Module, capacity: int | None) -> LayerCache:
    if isinstance(layer, CrossAttentionBlock):
        return CrossAttentionLayerCache()
    if capacity is not None:
        return StaticLayerCache(capacity)
    window = getattr(getattr(layer, "self_attn", None), "window", None)
    return LayerCache() if window is None else RollingLayerCache(window)
