"""Inputs of cross-attention to images: image states, and which of them each token attends to.

Shapes: B batch, T tokens in the call, M images, t tiles per image, P states per tile, H features; S = M * t * P states
in all, including cached ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ligerzoo.layers.context import Context
from ligerzoo.layers.masks import TileMask
from ligerzoo.tensor_checks import describe_value


@dataclass(frozen=True, kw_only=True)
class CrossAttentionInputs:
    """What all cross-attention layers of one forward attend to.

    Attributes:
        states: the new states, (B, at most S, H); None if all keys and values are cached.
        mask: which states each token attends to; None for all.
        no_states: (B, T, 1) bool, tokens that should attend to nothing. They attend to all states of their segment, and
            skip only the MLP; see `CrossAttentionBlock`. None for no such tokens.
        bypass: (B, T, 1) bool, tokens that cross-attention layers leave unchanged; None for no such tokens.
    """

    states: Tensor | None = None
    mask: TileMask | None = None
    no_states: Tensor | None = None
    bypass: Tensor | None = None


def inputs_of(context: Context) -> CrossAttentionInputs | None:
    """Returns `context.cross_attention_inputs`.

    Raises:
        TypeError: it is of another type.
    """
    inputs = context.cross_attention_inputs
    if not (inputs is None or isinstance(inputs, CrossAttentionInputs)):
        raise TypeError(
            f"CrossAttention: context.cross_attention_inputs is {describe_value(inputs)}; expected CrossAttentionInputs"
        )
    return inputs


def tile_cross_attention_inputs(
    context: Context, states: Tensor | None, cross_attention_mask: Tensor | None, tile_length: int
) -> CrossAttentionInputs | None:
    """Returns the inputs of cross-attention to new and cached images in tiles; None without images.

    The images of a packed segment are those that its tokens attend to. Segments without images bypass cross-attention,
    so that each segment gives the same result as alone.

    Args:
        context: positions of the tokens. Its cache stores the mask of the last token for later calls.
        states: states of the new images, (B, at most S, H); None for no new images.
        cross_attention_mask: (B, T, M, t), 1 where a token attends to a tile. May also cover all tokens from the start
            of the sequence; tokens after its end repeat its last entry. Default: without new images, the mask of the
            last cached token, if any; else all tokens attend to all tiles.
        tile_length: P.

    Raises:
        ValueError: the mask has the wrong shape, or is missing for packed segments.
    """
    cache = context.cache
    length = (0 if states is None else states.shape[1]) + (0 if cache is None else cache.cross_attention_length)
    visible = None
    if cross_attention_mask is not None:
        visible = _mask_of_call(cross_attention_mask, context, length, tile_length)
    elif states is None and cache is not None and cache.last_image_mask is not None:
        visible = cache.last_image_mask.expand(-1, context.tokens, -1, -1)
    if length == 0:
        return None
    if visible is None and context.segment_start is not None:
        raise ValueError(
            "cross_attention_mask: got None for packed sequences with images; "
            "expected a mask, which assigns the images to the sequences"
        )
    # A host sync, once per prompt: if everything is visible, faster attention kernels without a mask can run.
    may_sync = context.tokens > 1 and not torch.compiler.is_compiling()
    if visible is not None and may_sync and bool(visible.all()):
        visible = None
    if cache is not None:
        cache.last_image_mask = None if visible is None else visible[:, -1:]
    if visible is None:
        return CrossAttentionInputs(states=states)

    tiles, bypass = visible.flatten(2), None
    no_states = ~tiles.any(-1, keepdim=True)
    attended = tiles | no_states
    if context.segment_start is not None:
        own = _images_of_segment(visible.any(-1), context.segment_start)
        bypass = ~own.any(-1, keepdim=True)
        attended = tiles | (no_states & own.repeat_interleave(visible.shape[3], -1)) | bypass
    return CrossAttentionInputs(states=states, mask=TileMask(attended, tile_length), no_states=no_states, bypass=bypass)


def _mask_of_call(mask: Tensor, context: Context, length: int, tile_length: int) -> Tensor:
    """Returns the mask of the call's tokens over `length` states, (B, T, M, t) bool."""
    start = 0 if context.cache is None else context.cache.length
    covered, end = mask.shape[1] if mask.ndim == 4 else 0, start + context.tokens
    if not 0 < covered <= end or len(mask) != context.rows or mask[0, 0].numel() * tile_length != length:
        raise ValueError(
            f"cross_attention_mask has shape {tuple(mask.shape)}; expected ({context.rows}, {end}, images, tiles) with "
            f"{length / tile_length:g} tiles in all; tokens at the end may be left out"
        )
    if covered != context.tokens:
        mask = mask[:, torch.arange(start, end, device=mask.device).clamp(max=covered - 1)]
    return mask.bool()


def _images_of_segment(visible: Tensor, segment_start: Tensor) -> Tensor:
    """Returns whether any token of the same segment attends to each image, (B, T, M) bool.

    Args:
        visible: (B, T, M) bool, whether each token attends to each image.
        segment_start: see `Context`.
    """
    index = segment_start[..., None].expand_as(visible)
    by_start = torch.zeros_like(visible, dtype=torch.uint8).scatter_reduce(1, index, visible.to(torch.uint8), "amax")
    return by_start.gather(1, index).bool()
