"""Gated cross-attention: tokens attend to images (Alayrac et al. 2022, "Flamingo").

Shapes: B batch, T tokens in the call, H features, K key-value heads, D head size; M images, t tiles per image, P states
per tile, S = M * t * P states in all, including cached ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from ligerzoo.layers.attention import Attention
from ligerzoo.layers.cache import BlockCache, CrossAttentionLayerCache, LayerCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.exactness import Obstacle, never_exact
from ligerzoo.layers.kv_cache import new_layer_cache
from ligerzoo.layers.linear import INIT_STD, initialize
from ligerzoo.layers.masks import TileMask
from ligerzoo.layers.norm import add_and_normalize
from ligerzoo.layers.projection import check_features
from ligerzoo.layers.row_parts import RowParts
from ligerzoo.layers.tensor_plan import TensorPlan
from ligerzoo.tensor_checks import describe_value, explains_options


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

    def own(self, parts: RowParts, rows: int, tokens: int) -> Self:
        """Returns the inputs of the tokens of this process."""
        mask, no_states, bypass = self.mask, self.no_states, self.bypass
        return replace(
            self,
            mask=None if mask is None else TileMask(parts.own(mask.visible_tiles, fill=1), mask.tile_length),
            no_states=None if no_states is None else parts.own(no_states),
            bypass=None if bypass is None else parts.own(bypass),
        )


def inputs_of(context: Context) -> CrossAttentionInputs | None:
    """Returns `context.cross_attention_inputs`. Raises TypeError if it is of another type."""
    inputs = context.cross_attention_inputs
    if not (inputs is None or isinstance(inputs, CrossAttentionInputs)):
        raise TypeError(
            f"CrossAttention: context.cross_attention_inputs is {describe_value(inputs)}; expected CrossAttentionInputs"
        )
    return inputs


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

    @explains_options
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

    def tensor_plan(self) -> TensorPlan:
        """See `Attention.tensor_plan`."""
        return replace(super().tensor_plan(), obstacle="reads states in addition to its input")

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
        yield never_exact(self)

    def new_cache(self, capacity: int | None = None) -> CrossAttentionLayerCache:
        """Returns an empty cache. `capacity` is unused: it limits tokens, and this cache holds image states."""
        return CrossAttentionLayerCache()

    @property
    def cached_features(self) -> int:
        """0: the cache holds no tokens."""
        return 0

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
        initialize(self, CrossAttentionBlock)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Sets the gates to 0, whatever `std` is."""
        nn.init.zeros_(self.attn_gate)
        nn.init.zeros_(self.mlp_gate)

    @property
    def mixers(self) -> tuple[nn.Module, ...]:
        """The attention."""
        return (self.cross_attn,)

    def new_cache(self, capacity: int | None = None) -> BlockCache:
        """Returns an empty cache of the attention."""
        return new_layer_cache(self.cross_attn, capacity)

    def is_skipped(self, context: Context) -> bool:
        """Returns whether the block returns its input, as it does without images."""
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
