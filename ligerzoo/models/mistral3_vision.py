"""The vision tower of Mistral Small 3.1 (Pixtral): a vision transformer for images of any size."""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.kernels.activation import Activation
from ligerzoo.layers import (
    AlternatingRotaryEmbedding,
    Attention,
    BlockStack,
    GatedMLP,
    PatchEmbedding,
    PixelVisionTower,
    PreNormBlock,
    RMSNorm,
)
from ligerzoo.layers.rope_scaling import is_rotary_dim
from ligerzoo.models.config import check_fields, check_theta, refuse_unless


def refuse_other_activation(where: str, activation: Activation) -> None:
    """Raises ConfigError unless an activation of the tower or the projector is "gelu" or "silu"."""
    refuse_unless(activation in ("gelu", "silu"), where, activation, "'gelu' or 'silu'")


@dataclass(frozen=True, kw_only=True)
class Mistral3VisionConfig:
    """Configuration of the vision tower. Defaults: those of transformers' PixtralVisionConfig.

    Attributes:
        hidden_size: features of a patch.
        num_channels: channels of an image.
        image_size: longest side of the images in training, in pixels; unused by the model.
        patch_size: side of a patch, in pixels.
        hidden_act: activation of the MLPs, "gelu" or "silu".
        rope_theta: rotary base of rows and columns.
    """

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 1024
    patch_size: int = 16
    hidden_act: Activation = "gelu"
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_theta(self)
        size, number, where = self.hidden_size, self.num_attention_heads, "vision_config, "
        is_valid = size % (4 * number) == 0 and is_rotary_dim(size // number)
        expected = "a multiple of 4 times num_attention_heads (2-D rotary embedding)"
        refuse_unless(is_valid, where + "hidden_size", f"{size} for {number} heads", expected)
        refuse_other_activation(where + "hidden_act", self.hidden_act)


def pixel_tower(config: Mistral3VisionConfig, depth: int) -> PixelVisionTower:
    """Builds the vision tower, from images to features of patches.

    Args:
        config: config of the tower.
        depth: number of blocks that run.
    """
    c, size = config, config.hidden_size
    rotary = AlternatingRotaryEmbedding(2, size // c.num_attention_heads, c.rope_theta)

    def norm() -> RMSNorm:
        return RMSNorm(size, 1e-5)

    def block() -> PreNormBlock:
        attention = Attention(size, c.num_attention_heads, rotary=rotary, is_causal=False)
        mlp = GatedMLP(size, c.intermediate_size, activation=c.hidden_act)
        return PreNormBlock(norm(), attention, norm(), mlp)

    patches = PatchEmbedding((c.num_channels, c.patch_size, c.patch_size), size)
    return PixelVisionTower(patches, norm(), BlockStack(block() for _ in range(c.num_hidden_layers)), depth=depth)
