"""Llama 3.2 Vision, 11B and 90B (Grattafiori et al. 2024, section 7).

    images -> vision tower, see `mllama_vision` -> projector -> states
    tokens -> embedding -> L x [ Llama's block, or a gated block that attends to the images ] -> norm -> head

Distinctive: Llama 3.1 with gated cross-attention layers that attend to tiled images, initially without effect.

The gates start closed (Flamingo, Alayrac et al. 2022). In the text, an image is a single token. The vision tower reads
it as up to four square tiles, whose patches all attend to each other. Text without images skips the cross-attention
layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.layers import (
    Attention,
    Context,
    CrossAttention,
    CrossAttentionBlock,
    Decoder,
    Embedding,
    GatedMLP,
    KVCache,
    Linear,
    LMHead,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
    TiledVisionTower,
    tile_cross_attention_inputs,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, are_indices, heads, refuse_unless, rotary_arguments
from ligerzoo.models.mllama_vision import MllamaVisionConfig, tiled_tower

_IMAGE_TOKENS = 8  # token ids with an embedding but no logit: the image token, and seven unused ones


@dataclass(frozen=True, kw_only=True)
class MllamaConfig(DecoderConfig):
    """Configuration of Llama 3.2 Vision. Unless noted, fields are those of the decoder.

    Defaults: those of transformers' MllamaTextConfig.

    Attributes:
        vision_config: config of the vision tower.
        cross_attention_layers: indices of the layers that attend to images, counted from 0. They are included in
            `num_hidden_layers`; indices beyond the last layer are ignored.
        image_token_index: placeholder token of an image; it has an embedding and no logit.
    """

    vocab_size: int = 128256
    intermediate_size: int = 14336
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 5e5
    vision_config: MllamaVisionConfig = field(default_factory=MllamaVisionConfig)
    cross_attention_layers: Sequence[int] = field(default_factory=lambda: [3, 8, 13, 18, 23, 28, 33, 38])
    image_token_index: int = field(default=128256, metadata={"least": 0})

    def validate(self) -> None:
        super().validate()
        layers = self.cross_attention_layers
        refuse_unless(are_indices(layers), "cross_attention_layers", layers, "a list of layer indices")
        attending = sum(layer < self.num_hidden_layers for layer in set(layers))
        expected = "at least one layer without cross-attention"
        refuse_unless(attending < self.num_hidden_layers, "cross_attention_layers", layers, expected)
        expected = "false, since the embedding has more tokens than the head"
        refuse_unless(not self.tie_word_embeddings, "tie_word_embeddings", True, expected)

    @property
    def all_layers(self) -> int:
        return self.num_hidden_layers + self.vision_config.num_hidden_layers + self.vision_config.num_global_layers


class Mllama(CausalLM):
    """Llama 3.2 Vision with a language-model head."""

    config: MllamaConfig
    vision_model: TiledVisionTower
    multi_modal_projector: Linear
    inputs_per_token = ("cross_attention_mask",)

    def __init__(self, config: MllamaConfig) -> None:
        c = config
        rotary = RotaryEmbedding(*rotary_arguments(c))

        def norm(size: int = c.hidden_size) -> RMSNorm:
            return RMSNorm(size, c.rms_norm_eps)

        def block() -> PreNormBlock:
            mlp = GatedMLP(c.hidden_size, c.intermediate_size)
            return PreNormBlock(norm(), Attention(*heads(c), rotary), norm(), mlp)

        def cross_block() -> CrossAttentionBlock:
            attention = CrossAttention(*heads(c), q_norm=norm(c.head_size), k_norm=norm(c.head_size))
            mlp = GatedMLP(c.hidden_size, c.intermediate_size)
            return CrossAttentionBlock(norm(), attention, norm(), mlp)

        embedding = Embedding(c.vocab_size + _IMAGE_TOKENS, c.hidden_size)
        layers = [cross_block() if i in c.cross_attention_layers else block() for i in range(c.num_hidden_layers)]
        super().__init__(
            config,
            Decoder(embedding, layers, norm()),
            LMHead(c.hidden_size, c.vocab_size),
            vision_model=tiled_tower(c.vision_config),
            multi_modal_projector=Linear(c.vision_config.vision_output_dim, c.hidden_size),
        )

    @property
    def input_vocab_size(self) -> int:
        return self.config.vocab_size + _IMAGE_TOKENS

    @property
    def placeholders(self) -> Mapping[int, str]:
        return {self.config.image_token_index: "pixel_values"}

    def check_inputs(
        self,
        input_ids: Tensor,
        padding_mask: Tensor | None = None,
        past_key_values: KVCache | None = None,
        **modalities: Any,
    ) -> None:
        """See `CausalLM.check_inputs`.

        Images may also come as `cross_attention_states` or from the cache. At the start of a sequence, arrangements and
        masks of new images must agree with each other and with the image tokens.

        Raises:
            LigerzooError: an input has an invalid value.
        """
        has_states = modalities.get("cross_attention_states") is not None
        has_states |= past_key_values is not None and past_key_values.cross_attention_length > 0
        # Any value that is not None, to accept placeholders.
        given = {"pixel_values": input_ids} if has_states else {}
        super().check_inputs(input_ids, padding_mask, past_key_values, **modalities | given)
        arrangement, is_tile = modalities.get("aspect_ratio_ids"), modalities.get("aspect_ratio_mask")
        shape = (*input_ids.shape[:1], -1) if arrangement is None else (*arrangement.shape, self._max_tiles)
        if has_states or arrangement is None or is_tile is None or is_tile.shape != shape:
            return  # `embed` reports wrong shapes
        tiles = self._tiles(arrangement, is_tile).to(input_ids.device)
        is_image = input_ids == self.config.image_token_index
        count = (is_image if padding_mask is None else is_image & padding_mask).cumsum(1)
        images = tiles.any(-1).sum(1)
        if bool((count[:, -1] > images).any()):
            what, got = "more image tokens than images", count[:, -1].tolist()
            expected = f"at most {images.tolist()}, the images of each row in aspect_ratio_ids"
            raise LigerzooError(what, where="input_ids", got=got, expected=expected)
        visible = modalities.get("cross_attention_mask")
        if visible is None or visible.shape != (*input_ids.shape, *tiles.shape[1:]):
            return
        visible = visible.to(input_ids.device).bool()
        if padding_mask is not None:
            visible = visible & padding_mask[..., None, None]
        image = torch.arange(tiles.shape[1], device=count.device)
        for is_wrong, what, expected in (
            (visible & ~tiles[:, None], "1 for tiles that an image does not have", "0 for padding tiles"),
            (visible.any(-1) & (image >= count[..., None]), "1 for tokens before the image token", "0 for them"),
        ):
            if bool(is_wrong.any()):
                raise LigerzooError(what, where="cross_attention_mask", expected=expected)

    @property
    def _max_tiles(self) -> int:
        return self.config.vision_config.max_num_tiles

    def _tiles(self, arrangement: Tensor, is_tile: Tensor) -> Tensor:
        """Returns which tiles each image has, (B, M, t) bool.

        Raises:
            LigerzooError: an arrangement is unknown, or `is_tile` contradicts it.
        """
        ratios = self.config.vision_config.supported_aspect_ratios
        if bool(((arrangement < 0) | (arrangement > len(ratios))).any()):
            expected, got = f"1 to {len(ratios)}, or 0 for no image", arrangement.tolist()
            raise LigerzooError("unknown tile arrangement", where="aspect_ratio_ids", got=got, expected=expected)
        counts = torch.tensor([0, *(rows * columns for rows, columns in ratios)], device=arrangement.device)
        count, tile = counts[arrangement][..., None], torch.arange(self._max_tiles, device=arrangement.device)
        implied = tile < count.clamp(min=1)
        if not torch.equal(is_tile.to(implied.device).bool(), implied):
            what, where = "contradicts aspect_ratio_ids", "aspect_ratio_mask"
            raise LigerzooError(what, where=where, got=is_tile.int().tolist(), expected=implied.int().tolist())
        return tile < count

    def embed(
        self,
        x: Tensor,
        context: Context,
        pixel_values: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        cross_attention_states: Tensor | None = None,
    ) -> Tensor:
        """Returns `x` unchanged and stores the images in the context, for the cross-attention layers.

        Args:
            x: `input_ids` or `inputs_embeds` of `forward`.
            context: positions and mask of these tokens.
            pixel_values: (B, M, t, C, side, side), M images per sequence with t tiles each; missing ones are 0.
            aspect_ratio_ids: (B, M), number of each image's tile arrangement; 0 for no image.
            aspect_ratio_mask: (B, M, t), 1 for the tiles of an image, which come first. The first entry is always 1,
                even for no image.
            cross_attention_mask: (B, T, M, t), 1 where a token attends to a tile, cached images included. May also
                cover all tokens from the start of the sequence; tokens after its end repeat its last entry. Default:
                without new images, the mask of the last cached token, if any; else all tokens attend to all tiles.
            cross_attention_states: (B, M * t * P, H), output of tower and projector, instead of the three inputs above.

        Raises:
            ValueError: the inputs have inconsistent shapes, or some are missing.
        """
        states = self._images(len(x), pixel_values, aspect_ratio_ids, aspect_ratio_mask, cross_attention_states)
        mask = None if cross_attention_mask is None else cross_attention_mask.to(x.device)
        context.cross_attention_inputs = tile_cross_attention_inputs(
            context, states, mask, self.vision_model.tile_length
        )
        return x

    def _images(
        self,
        rows: int,
        pixels: Tensor | None,
        arrangement: Tensor | None,
        is_tile: Tensor | None,
        states: Tensor | None,
    ) -> Tensor | None:
        """Returns the states of the new images, (B, M * t * P, H); None without new images."""
        if pixels is None:
            return None if states is None else states.reshape(rows, -1, states.shape[-1])
        c = self.config.vision_config
        if states is not None or arrangement is None or is_tile is None:
            others = {"aspect_ratio_ids": arrangement, "aspect_ratio_mask": is_tile, "cross_attention_states": states}
            given = [name for name, value in others.items() if value is not None]
            what = "pixel_values need aspect_ratio_ids and aspect_ratio_mask, and no cross_attention_states"
            raise LigerzooError(what, got=" and ".join(given) or "none of them")
        shapes, images = [tuple(tensor.shape) for tensor in (pixels, arrangement, is_tile)], pixels.shape[1]
        expected = rows, images, c.max_num_tiles, c.num_channels, c.image_size, c.image_size
        if shapes != [expected, expected[:2], expected[:3]]:
            what = f"pixel_values, aspect_ratio_ids and aspect_ratio_mask have shapes {shapes}"
            raise LigerzooError(what, expected=[expected, expected[:2], expected[:3]])
        features = self.vision_model(pixels.flatten(0, 1), arrangement.flatten(), is_tile.flatten(0, 1))
        return self.multi_modal_projector(features).view(rows, -1, self.config.hidden_size)  # type: ignore[no-any-return]
