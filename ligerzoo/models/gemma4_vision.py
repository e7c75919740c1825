"""The vision tower of Gemma 4: a vision transformer for images of any shape, whose linear layers may clip."""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import (
    AxialPatchEmbedding,
    AxialRotaryEmbedding,
    BlockStack,
    GatedMLP,
    HalvesRotaryAttention,
    PaddedVisionTower,
    RMSNorm,
    SandwichBlock,
    with_clipped_linears,
)
from ligerzoo.layers.rope_scaling import is_rotary_dim
from ligerzoo.models.config import check_fields, refuse_unless


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig:
    """Configuration of the vision tower. Defaults: those of transformers' Gemma4VisionConfig.

    Attributes:
        hidden_size: features of a patch.
        pooling_kernel_size: side of a square of patches that becomes one token.
        patch_size: side of a patch, in pixels.
        position_embedding_size: largest number of columns, or rows, of patches.
        use_clipped_linears: linear layers clip their inputs and outputs to ranges in the checkpoint.
        standardize: features are standardized by statistics in the checkpoint.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    pooling_kernel_size: int = 3
    patch_size: int = 16
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        heads, kv_heads, size = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        where, expected = "vision_config, num_key_value_heads", f"a divisor of num_attention_heads, {heads}"
        refuse_unless(heads % kv_heads == 0, where, kv_heads, expected)
        is_rotary = size % 4 == 0 and is_rotary_dim(size // 2)
        refuse_unless(is_rotary, "vision_config, head_dim", size, "a multiple of 4 that can be rotated")


def padded_tower(config: Gemma4VisionConfig) -> PaddedVisionTower:
    """Builds the vision tower, from patches to features of pooled patches."""
    c, size, rotary = config, config.hidden_size, AxialRotaryEmbedding(2, config.head_dim, 100.0)

    def norm(size: int = size, *, affine: bool = True) -> RMSNorm:
        return RMSNorm(size, c.rms_norm_eps, round_before_scale=False, elementwise_affine=affine)

    def block() -> SandwichBlock:
        attention = HalvesRotaryAttention(
            size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            rotary,
            q_norm=norm(c.head_dim),
            k_norm=norm(c.head_dim),
            v_norm=norm(c.head_dim, affine=False),
            scale=1.0,
            is_causal=False,
        )
        mlp = GatedMLP(size, c.intermediate_size, activation="gelu_tanh")
        parts = (with_clipped_linears(part, clips=c.use_clipped_linears) for part in (attention, mlp))
        return SandwichBlock(norm(), next(parts), norm(), norm(), next(parts), norm())

    patches = AxialPatchEmbedding(3 * c.patch_size**2, size, c.position_embedding_size)
    blocks = BlockStack(block() for _ in range(c.num_hidden_layers))
    return PaddedVisionTower(patches, blocks, pool_size=c.pooling_kernel_size, standardize=c.standardize)
