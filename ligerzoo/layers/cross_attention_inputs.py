"""What cross-attention looks at: the states of images, which are no tokens of the text.

Shapes: B batch, T tokens in the call, M images, t tiles of an image, P states of a tile, H features; S = M * t * P
states in all, cached ones included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ligerzoo.layers.masks import TileMask

if TYPE_CHECKING:
    from ligerzoo.layers.context import Context


@dataclass(frozen=True, kw_only=True)
class CrossAttentionInputs:
    """The states that all cross-attention layers of one forward look at, and who sees what of them.

    Attributes:
        states: those that are new, (B, at most S, H); None where the keys of all are cached.
        mask: which of them each token looks at; None where all look at everything.
        blind: (B, T, 1) bool, tokens that should see nothing. They look at everything there is for them all the same,
            and only their feed-forward is left out, see `CrossAttentionBlock`. None for none.
        outside: (B, T, 1) bool, tokens that the layers leave as they are; None for none.
    """

    states: Tensor | None = None
    mask: TileMask | None = None
    blind: Tensor | None = None
    outside: Tensor | None = None


def tile_cross_attention_inputs(
    context: Context, states: Tensor | None, cross_attention_mask: Tensor | None, tile_length: int
) -> CrossAttentionInputs | None:
    """The memory of images in tiles, those of the context's cache and new ones; None where there are none.

    Of texts packed into a row each has those images that its tokens see, and one without any is outside, so that it is
    as it would be alone.

    Args:
        context: where the tokens stand. Its cache remembers what the last of them sees.
        states: (B, a part of S, H), of new images; None for none.
        cross_attention_mask: (B, T, M, t), 1 where a token sees a tile. It may also tell of all tokens from the
            beginning of the text on, and what the last that it tells of sees, those after it see, too. None: without
            new images the tokens see what the last one in the cache does, and otherwise everything.
        tile_length: P.

    Raises:
        ValueError: the mask does not fit, or is needed.
    """
    cache = context.cache
    length = (0 if states is None else states.shape[1]) + (0 if cache is None else cache.cross_attention_length)
    visible = None
    if cross_attention_mask is not None:
        visible = _of_the_call(cross_attention_mask, context, length, tile_length)
    elif states is None and cache is not None and cache.last_image_mask is not None:
        visible = cache.last_image_mask.expand(-1, context.tokens, -1, -1)
    if length == 0:
        return None
    if visible is None and context.segment_start is not None:
        raise ValueError("packed texts with images need a cross_attention_mask, to tell whose these are")
    # Looking at what is visible makes the host wait for a GPU, once a prompt; where that is everything, it buys
    # attention kernels that take no mask.
    may_look = context.tokens > 1 and not torch.compiler.is_compiling()
    if visible is not None and may_look and bool(visible.all()):
        visible = None
    if cache is not None:
        cache.last_image_mask = None if visible is None else visible[:, -1:]
    if visible is None:
        return CrossAttentionInputs(states=states)

    sees, outside = visible.flatten(2), None
    blind = ~sees.any(-1, keepdim=True)
    looks = sees | blind
    if context.segment_start is not None:
        own = _seen_in_text(visible.any(-1), context.segment_start)
        outside = ~own.any(-1, keepdim=True)
        looks = sees | (blind & own.repeat_interleave(visible.shape[3], -1)) | outside
    return CrossAttentionInputs(states=states, mask=TileMask(looks, tile_length), blind=blind, outside=outside)


def _of_the_call(mask: Tensor, context: Context, length: int, tile_length: int) -> Tensor:
    """(B, T, M, t) bool, what the mask says of the call's tokens and a memory of this length."""
    before = 0 if context.cache is None else context.cache.length
    told, end = mask.shape[1] if mask.ndim == 4 else 0, before + context.tokens
    if not 0 < told <= end or len(mask) != context.rows or mask[0, 0].numel() * tile_length != length:
        raise ValueError(
            f"cross_attention_mask has shape {tuple(mask.shape)}; expected ({context.rows}, {end}, images, tiles) with "
            f"{length / tile_length:g} tiles in all; tokens at the end may be left out"
        )
    if told != context.tokens:
        mask = mask[:, torch.arange(before, end, device=mask.device).clamp(max=told - 1)]
    return mask.bool()


def _seen_in_text(seen: Tensor, starts: Tensor) -> Tensor:
    """(B, T, M) bool: whether a token of the same text sees the image, from whether each token does."""
    text = starts[..., None].expand_as(seen)
    by_start = torch.zeros_like(seen, dtype=torch.uint8).scatter_reduce(1, text, seen.to(torch.uint8), "amax")
    return by_start.gather(1, text).bool()
