"""The decoder: embedding, a stack of blocks, a final norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligerzoo.layers.cache import KVCache
from ligerzoo.layers.masks import causal_mask
from ligerzoo.layers.rotary import RotaryEmbedding


class Decoder(nn.Module):
    """Token ids (or embeddings) to final hidden states.

    Args:
        embed_tokens: token ids to embeddings.
        layers: the blocks, each called with the states, the rotation, the mask and its cache, as `PreNormBlock` is.
        norm: applied to the last block's output.
        rotary_emb: makes the rotation of the positions, once for all blocks.

    Attributes:
        gradient_checkpointing: keep only each block's input for the backward pass and compute the block again there.
    """

    def __init__(
        self, embed_tokens: nn.Module, layers: Iterable[nn.Module], norm: nn.Module, rotary_emb: RotaryEmbedding
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.rotary_emb = rotary_emb
        self.gradient_checkpointing = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(B, T) token ids, or (B, T, H) embeddings in their place -> (B, T, H).

        Args:
            input_ids: (B, T) token ids.
            attention_mask: see `causal_mask`.
            position_ids: (B or 1, T); by default the tokens' places in the sequence, the cached ones counted.
            inputs_embeds: (B, T, H), instead of `input_ids`.
            cache: what came before; it takes up the new tokens.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds` are given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both")
        x: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        tokens, past = x.shape[1], cache.length if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + tokens, device=x.device)[None]
        rotation = self.rotary_emb(position_ids, x.dtype)
        mask = causal_mask(attention_mask, tokens, past + tokens, dtype=x.dtype, device=x.device)

        recompute = self.gradient_checkpointing and torch.is_grad_enabled() and cache is None
        for index, layer in enumerate(self.layers):
            if recompute:
                x = checkpoint(layer, x, rotation, mask, use_reentrant=False)
            else:
                x = layer(x, rotation, mask, cache.layers[index] if cache is not None else None)
        return self.norm(x)  # type: ignore[no-any-return]
