"""Shared by models that read images of any size as pixels, padded to one size (Pixtral)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.layers import Context, MergingProjector, PixelVisionTower, repeated_items, scatter_embeddings
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import LanguageModelConfig


class PixelLMConfig(LanguageModelConfig, Protocol):
    """Config fields that these models read.

    Attributes:
        image_token_id: placeholder token that image embeddings replace.
        spatial_merge_size: side of a square of patches that is merged into one token.
    """

    @property
    def image_token_id(self) -> int: ...
    @property
    def spatial_merge_size(self) -> int: ...


class PixelLM(CausalLM):
    """A decoder with a language-model head, a vision tower for pixels and a projector; see `embed`.

    Other tokens, such as break tokens, may separate the rows of tokens of an image.
    """

    config: PixelLMConfig
    vision_tower: PixelVisionTower
    multi_modal_projector: MergingProjector

    @property
    def placeholders(self) -> Mapping[int, str]:
        return {self.config.image_token_id: "pixel_values"}

    def embed(
        self, x: Tensor, context: Context, pixel_values: Tensor | None = None, image_sizes: Tensor | None = None
    ) -> Tensor:
        """Embeds tokens and images: (B, T) token ids -> (B, T, H). Without images, `x` is returned unchanged.

        Args:
            x: `input_ids` or `inputs_embeds` of `forward`.
            context: positions and mask of these tokens.
            pixel_values: (n, C, height, width), the images of the batch, in order, padded at the right and the bottom.
            image_sizes: (n, 2) int, height and width of each image in pixels; on the CPU to avoid a host sync.

        Raises:
            ValueError: the numbers of images, sizes and image tokens do not match, or the tokens of a row of an image
                are not adjacent.
        """
        if pixel_values is None and image_sizes is None:
            return x
        if pixel_values is None or image_sizes is None or x.is_floating_point():
            inputs = {"pixel_values": pixel_values, "image_sizes": image_sizes}
            given = [name for name, value in inputs.items() if value is not None]
            given.append("inputs_embeds" if x.is_floating_point() else "input_ids")
            what, expected = "images need pixels, sizes and token ids", "pixel_values, image_sizes and input_ids"
            raise LigerzooError(what, where="images", got=" and ".join(given), expected=expected)
        m = self.config.spatial_merge_size
        pixel_values, sizes = self.vision_tower.checked(pixel_values, image_sizes, m)
        features = self.multi_modal_projector(self.vision_tower(pixel_values, sizes), sizes)
        is_image, padding_mask = x == self.config.image_token_id, context.call_padding_mask()
        mask, runs = is_image if padding_mask is None else is_image & padding_mask, sizes // m
        is_valid = None
        if torch.compiler.is_compiling():
            is_valid = torch.arange(len(features), device=x.device) < runs.prod(1).sum()
        return scatter_embeddings(self.model.embed_tokens(x), mask, features, runs, is_valid)

    def repeat_rows(
        self,
        modalities: Mapping[str, Tensor | None],
        repeats: int,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
    ) -> dict[str, object]:
        """See `CausalLM.repeat_rows`. Images are listed in order, without a row dimension."""
        pixels, sizes = modalities.get("pixel_values"), modalities.get("image_sizes")
        if pixels is None or sizes is None:
            return dict(modalities)
        mask = input_ids == self.config.image_token_id
        mask = mask if attention_mask is None else mask & attention_mask.bool()
        side = self.vision_tower.patch_conv.weight.shape[-1] * self.config.spatial_merge_size
        items = repeated_items(mask, (sizes // side).prod(1), repeats)
        return {"pixel_values": pixels[items], "image_sizes": sizes[items]}
