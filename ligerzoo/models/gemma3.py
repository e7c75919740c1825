"""Gemma 3 with images (Gemma Team 2025, "Gemma 3 Technical Report").

    pixels -> patches + positions -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm
           -> mean of k x k patches -> norm -> image embeddings
    tokens -> embedding, image embeddings at image tokens -> Gemma 3

Distinctive: Gemma 3 with SigLIP image embeddings; tokens of an image attend to each other bidirectionally.

Every image is resized to one square. A vision transformer (SigLIP, Zhai et al. 2023) maps it to a fixed number of
embeddings, which are not scaled as token embeddings are. In the decoder, the tokens of an image attend to each other in
both directions, within the sliding window where a layer has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.layers import (
    MLP,
    Attention,
    BlockStack,
    Context,
    ImageEmbedding,
    ImageTower,
    LayerNorm,
    LMHead,
    PoolingProjector,
    PreNormBlock,
    RMSNorm,
    repeated_items,
    scatter_embeddings,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import check_fields, refuse_unless
from ligerzoo.models.gemma3_text import Gemma3DecoderConfig, gemma3_decoder


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig:
    """Configuration of the vision tower. Defaults: those of transformers' SiglipVisionConfig.

    Attributes:
        hidden_size: features of a patch.
        num_channels: channels of an image.
        image_size: side of an image, in pixels.
        patch_size: side of a patch, in pixels.
        layer_norm_eps: also used by the norm of the projector.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_fields(self)
        size, num_heads = self.hidden_size, self.num_attention_heads
        expected = f"a multiple of num_attention_heads, {num_heads}"
        refuse_unless(size % num_heads == 0, "vision_config, hidden_size", size, expected)

    @property
    def patches_per_side(self) -> int:
        """Patches per side of an image."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma3DecoderConfig):
    """Configuration of Gemma 3 with images. Unless noted, fields are those of the decoder.

    The default tower is that of all Gemma 3 checkpoints.

    Attributes:
        vision_config: config of the vision tower.
        mm_tokens_per_image: tokens per image, a perfect square.
        image_token_id: placeholder token that image embeddings replace. It may be outside the vocabulary.
        boi_token_id: token before an image; unused by the model.
        eoi_token_id: token after an image; unused by the model.
    """

    vision_config: Gemma3VisionConfig = field(
        default_factory=lambda: Gemma3VisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            image_size=896,
            patch_size=14,
        )
    )
    mm_tokens_per_image: int = 256
    image_token_id: int = 262144
    boi_token_id: int = 255999
    eoi_token_id: int = 256000

    def validate(self) -> None:
        super().validate()
        tokens, patches = math.isqrt(self.mm_tokens_per_image), self.vision_config.patches_per_side
        if tokens**2 != self.mm_tokens_per_image or patches % tokens or patches == 0:
            what = "invalid number of tokens"
            got = f"{self.mm_tokens_per_image} tokens for {patches} x {patches} patches"
            expected = "a perfect square whose root divides image_size // patch_size of vision_config"
            remedy = "A text-only checkpoint has model_type gemma3_text."
            raise ConfigError(what, where="mm_tokens_per_image", got=got, expected=expected, remedy=remedy)

    @property
    def all_layers(self) -> int:
        return self.num_hidden_layers + self.vision_config.num_hidden_layers

    @property
    def pool_size(self) -> int:
        """Side of the square of patches that becomes one token."""
        return self.vision_config.patches_per_side // math.isqrt(self.mm_tokens_per_image)


class Gemma3(CausalLM):
    """Gemma 3 with a vision tower and a language-model head. Logits have no soft cap.

    Attributes:
        vision_tower: images to patch features.
        multi_modal_projector: patch features to embeddings.
    """

    config: Gemma3Config
    vision_tower: ImageTower
    multi_modal_projector: PoolingProjector
    inputs_per_token = ("token_type_ids",)

    def __init__(self, config: Gemma3Config) -> None:
        c, v = config, config.vision_config
        norm = RMSNorm(v.hidden_size, v.layer_norm_eps, weight_offset=1.0, round_before_scale=False)
        super().__init__(
            config,
            gemma3_decoder(c),
            LMHead(c.hidden_size, c.vocab_size),
            vision_tower=siglip_tower(v),
            multi_modal_projector=PoolingProjector(norm, v.hidden_size, c.hidden_size, pool_size=c.pool_size),
        )

    @property
    def placeholders(self) -> Mapping[int, str]:
        return {self.config.image_token_id: "pixel_values"}

    def embed(
        self, x: Tensor, context: Context, pixel_values: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Embeds tokens and images: (B, T) token ids -> (B, T, H). Without images, `x` is returned unchanged.

        Adjacent image tokens attend to each other, as in training. (transformers does the same with `token_type_ids`;
        without them, its image tokens do not attend to later ones.) Calls with a cache must not split an image. A
        (B, 1, T, S) attention mask overrides this.

        Args:
            x: `input_ids` or `inputs_embeds` of `forward`.
            context: positions and mask of these tokens.
            pixel_values: (n, C, S, S), the images of the batch, in order.
            token_type_ids: (B, at most T), 1 for image tokens; tokens after its end are text. Default: with
                `pixel_values`, the tokens equal to `image_token_id`.

        Raises:
            ValueError: the numbers of images and image tokens do not match, or `token_type_ids` has the wrong shape.
        """
        in_image = None if token_type_ids is None else self._image_mask(token_type_ids, x)
        if pixel_values is not None:
            if x.is_floating_point():
                raise ValueError("pixel_values: got images with inputs_embeds; expected input_ids with image tokens")
            is_placeholder, padding_mask = x == self.config.image_token_id, context.call_padding_mask()
            in_image = is_placeholder if in_image is None else in_image
            tokens = self.model.embed_tokens(x.masked_fill(is_placeholder, 0))
            images = self.multi_modal_projector(self.vision_tower(pixel_values)).flatten(0, 1)
            mask = is_placeholder if padding_mask is None else is_placeholder & padding_mask
            x = scatter_embeddings(tokens, mask, images)
        if in_image is not None:
            context.allow_bidirectional_spans(in_image)
        return x

    def repeat_rows(
        self, modalities: Mapping[str, Any], repeats: int, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """See `CausalLM.repeat_rows`. Images are listed in order, without a row dimension."""
        rest = {name: value for name, value in modalities.items() if name != "pixel_values"}
        repeated, images = super().repeat_rows(rest, repeats, input_ids, attention_mask), modalities.get("pixel_values")
        if images is not None:
            mask = input_ids == self.config.image_token_id
            mask = mask if attention_mask is None else mask & attention_mask.bool()
            tokens = torch.full((len(images),), self.config.mm_tokens_per_image)
            repeated["pixel_values"] = images[repeated_items(mask, tokens, repeats)]
        return repeated

    @staticmethod
    def _image_mask(token_type_ids: Tensor, x: Tensor) -> Tensor:
        """Returns the mask of image tokens, (B, T) bool."""
        rows, tokens = x.shape[:2]
        if token_type_ids.ndim != 2 or len(token_type_ids) != rows or token_type_ids.shape[1] > tokens:
            what, expected = (
                f"token_type_ids has shape {tuple(token_type_ids.shape)}",
                f"{(rows, tokens)}, one per token",
            )
            raise LigerzooError(what, expected=expected)
        return F.pad(token_type_ids == 1, (0, tokens - token_type_ids.shape[1]), value=False).to(x.device)


def siglip_tower(config: Gemma3VisionConfig) -> ImageTower:
    """Builds the vision tower, from pixels to patch features."""
    c = config

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.layer_norm_eps)

    def block() -> PreNormBlock:
        attention = Attention(c.hidden_size, c.num_attention_heads, is_causal=False, qkv_bias=True, output_bias=True)
        return PreNormBlock(norm(), attention, norm(), MLP(c.hidden_size, c.intermediate_size, activation="gelu_tanh"))

    embeddings = ImageEmbedding(c.image_size, c.patch_size, c.hidden_size, channels=c.num_channels)
    return ImageTower(embeddings, BlockStack(block() for _ in range(c.num_hidden_layers)), norm())
