"""Gemma 3 with images (Gemma Team 2025, "Gemma 3 Technical Report").

    pixels -> patches + positions -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm
           -> mean of k x k patches -> norm -> embeddings
    tokens, and these in the places of images -> Gemma 3

Distinctive: Gemma 3 with SigLIP image embeddings; tokens of an image attend to each other bidirectionally.

Every image is resized to one square. A vision transformer (SigLIP, Zhai et al. 2023) maps it to a fixed number of
embeddings, which are not scaled as token embeddings are. In the decoder, the tokens of an image attend to each other in
both directions, within the sliding window where a layer has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Unpack

import torch.nn.functional as F
from torch import Tensor

from ligerzoo.errors import ConfigError
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
    scatter_embeddings,
)
from ligerzoo.models.causal_lm import CausalLM, FactoryKwargs
from ligerzoo.models.config import check_fields
from ligerzoo.models.gemma3_text import Gemma3DecoderConfig, gemma3_decoder


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig:
    """The numbers of the vision tower; defaults are those of transformers' SiglipVisionConfig.

    Attributes:
        hidden_size: the features of a patch.
        num_channels: of an image.
        image_size: the side of an image, in pixels.
        patch_size: the side of a patch, in pixels.
        layer_norm_eps: also of the projector's norm.
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
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                "no heads of a size", where="vision_config, hidden_size", got=self.hidden_size,
                expected=f"a multiple of num_attention_heads, {self.num_attention_heads}",
            )  # fmt: skip

    @property
    def patches_per_side(self) -> int:
        """The number of patches side by side in an image."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma3DecoderConfig):
    """The numbers of a Gemma 3 with images, of its decoder where nothing else is said; the default tower is that of all
    Gemma 3.

    Attributes:
        vision_config: the vision tower's.
        mm_tokens_per_image: how many tokens an image is, the square of a whole number.
        image_token_id: the token in whose places the embeddings of images go. It may be beyond the vocabulary.
        boi_token_id: the token before an image, for others who look for it; likewise the one after.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens, patches = math.isqrt(self.mm_tokens_per_image), self.vision_config.patches_per_side
        if tokens**2 != self.mm_tokens_per_image or patches % tokens or patches == 0:
            raise ConfigError(
                "an image is no square of tokens that are squares of patches", where="mm_tokens_per_image",
                got=f"{self.mm_tokens_per_image} tokens for {patches} x {patches} patches",
                expected="the square of a divisor of image_size / patch_size in vision_config",
                remedy="A checkpoint of text alone, without a vision tower, has model_type gemma3_text.",
            )  # fmt: skip

    @property
    def all_layers(self) -> int:
        return self.num_hidden_layers + self.vision_config.num_hidden_layers

    @property
    def pool_size(self) -> int:
        """The side of the squares of patches that are one token."""
        return self.vision_config.patches_per_side // math.isqrt(self.mm_tokens_per_image)


class Gemma3(CausalLM):
    """Gemma 3 with a vision tower and a language-model head. Unlike that of text alone it has no bound on the logits.

    Attributes:
        vision_tower: images to features of patches.
        multi_modal_projector: features of patches to embeddings of tokens.
    """

    config: Gemma3Config
    vision_tower: ImageTower
    multi_modal_projector: PoolingProjector
    inputs_per_token = ("token_type_ids",)

    def __init__(self, config: Gemma3Config, **factory_kwargs: Unpack[FactoryKwargs]) -> None:
        c, v = config, config.vision_config
        norm = RMSNorm(v.hidden_size, v.layer_norm_eps, weight_offset=1.0, round_before_scale=False, **factory_kwargs)
        super().__init__(
            config,
            gemma3_decoder(c, **factory_kwargs),
            LMHead(c.hidden_size, c.vocab_size, **factory_kwargs),
            vision_tower=vision_tower(v, **factory_kwargs),
            multi_modal_projector=PoolingProjector(
                norm, v.hidden_size, c.hidden_size, pool_size=c.pool_size, **factory_kwargs
            ),
        )  # fmt: skip

    @property
    def placeholders(self) -> Mapping[int, str]:
        return {self.config.image_token_id: "pixel_values"}

    def embed(
        self, x: Tensor, context: Context, pixel_values: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """(B, T) token ids -> (B, T, H), with images in the places of their tokens; what has no images stays as it is.

        Tokens of an image, which are those side by side, see each other, as the model was trained. (So they do in
        transformers when `token_type_ids` say where they are; when these are left out, it hides from them what comes
        after.) An image must not be cut in two by calls with a cache. A ready attention mask says itself who sees whom.

        Args:
            x: what `forward` has as `input_ids` or `inputs_embeds`.
            context: where they stand.
            pixel_values: (n, C, S, S), the images of the batch, in their order.
            token_type_ids: (B, T), 1 for the tokens of images; by default, where there are `pixel_values`, for those
                that are `image_token_id`. Tokens behind those that it tells of are of text.

        Raises:
            ValueError: images and tokens do not fit together.
        """
        together = None if token_type_ids is None else self._of_images(token_type_ids, x)
        if pixel_values is not None:
            if x.is_floating_point():
                raise ValueError("images need input_ids to tell their places")
            here, real = x == self.config.image_token_id, context.call_padding_mask()
            together = here if together is None else together
            tokens = self.model.embed_tokens(x.masked_fill(here, 0))
            images = self.multi_modal_projector(self.vision_tower(pixel_values)).flatten(0, 1)
            x = scatter_embeddings(tokens, here if real is None else here & real, images)
        if together is not None:
            context.allow_bidirectional_spans(together)
        return x

    @staticmethod
    def _of_images(token_type_ids: Tensor, x: Tensor) -> Tensor:
        """(B, T) bool."""
        rows, tokens = x.shape[:2]
        if token_type_ids.ndim != 2 or len(token_type_ids) != rows or token_type_ids.shape[1] > tokens:
            raise ValueError(
                f"token_type_ids {tuple(token_type_ids.shape)}; expected {(rows, tokens)}, one for each token"
            )
        return F.pad(token_type_ids == 1, (0, tokens - token_type_ids.shape[1]), value=False).to(x.device)


def vision_tower(config: Gemma3VisionConfig, **factory_kwargs: Unpack[FactoryKwargs]) -> ImageTower:
    """The tower, from pixels to features of patches."""
    c = config

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.layer_norm_eps, **factory_kwargs)

    def block() -> PreNormBlock:
        attention = Attention(
            c.hidden_size, c.num_attention_heads, is_causal=False, qkv_bias=True, output_bias=True, **factory_kwargs
        )
        return PreNormBlock(
            norm(), attention, norm(), MLP(c.hidden_size, c.intermediate_size, activation="gelu_tanh", **factory_kwargs)
        )

    embeddings = ImageEmbedding(c.image_size, c.patch_size, c.hidden_size, channels=c.num_channels, **factory_kwargs)
    return ImageTower(embeddings, BlockStack(block() for _ in range(c.num_hidden_layers)), norm())
