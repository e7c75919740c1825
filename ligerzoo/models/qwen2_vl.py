"""Qwen2-VL and QVQ (Wang et al. 2024, "Qwen2-VL").

    pixels -> patches -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> 2 x 2 merged into one -> embeddings
    tokens, and these in the places of images and videos -> Qwen2

Distinctive: Qwen2, with images of any size and videos among its tokens. A vision transformer turns them into
embeddings, patches having rotary positions of rows and columns and seeing their own frame alone; and the decoder's
rotary positions are those in time, height and width, each of which turns some of the features (M-RoPE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Unpack

from ligerzoo.errors import ConfigError
from ligerzoo.layers import (
    MLP,
    Attention,
    AxialRotaryEmbedding,
    LayerNorm,
    LMHead,
    PatchEmbedding,
    PatchMerger,
    PreNormBlock,
    SectionedRotaryEmbedding,
    VisionTower,
)
from ligerzoo.models.causal_lm import Make
from ligerzoo.models.config import check_fields
from ligerzoo.models.qwen2 import Qwen2Config, qwen2_decoder
from ligerzoo.models.vision_lm import VisionLM


@dataclass(frozen=True, kw_only=True)
class Qwen2VLVisionConfig:
    """The numbers of the vision tower; defaults are those of transformers' Qwen2VLVisionConfig.

    Attributes:
        depth: the number of blocks.
        embed_dim: the features of a patch.
        hidden_size: the features of a token, which are the decoder's.
        mlp_ratio: the width of the feed-forwards, in `embed_dim`s.
        patch_size: the side of a patch, in pixels.
        temporal_patch_size: the frames that a patch has of a video; an image is given as often.
        spatial_merge_size: the side of a block of patches that is one token.
    """

    depth: int = 32
    embed_dim: int = 1280
    hidden_size: int = 3584
    num_heads: int = 16
    mlp_ratio: int = 4
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.embed_dim % (4 * self.num_heads):
            raise ConfigError(
                "heads whose features are not turned in pairs by rows and by columns", where="vision_config, embed_dim",
                got=self.embed_dim, expected=f"a multiple of 4 * num_heads, {4 * self.num_heads}",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(Qwen2Config):
    """The numbers of a Qwen2-VL, of its decoder where nothing else is said; defaults are those of transformers'
    Qwen2VLTextConfig, which are nearly Qwen2-VL-72B's.

    Attributes:
        vision_config: the vision tower's.
        mrope_section: how many pairs of a head's features turn by time, height and width.
        image_token_id: the token in whose places the embeddings of images go.
        video_token_id: likewise of videos.
        vision_start_token_id: the token before an image or video, for others who look for it; likewise the end's.
    """

    vocab_size: int = 152064
    hidden_size: int = 8192
    intermediate_size: int = 29568
    num_hidden_layers: int = 80
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    max_window_layers: int = field(default=80, metadata={"least": 0})
    vision_config: Qwen2VLVisionConfig = field(default_factory=lambda: Qwen2VLVisionConfig(hidden_size=8192))
    mrope_section: Sequence[int] = field(default_factory=lambda: [16, 24, 24])
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653

    def __post_init__(self) -> None:
        super().__post_init__()
        sections, pairs = self.mrope_section, self.head_size // 2
        are_sizes = isinstance(sections, list | tuple) and all(type(size) is int and size >= 0 for size in sections)
        if not are_sizes or len(sections) != 3 or sum(sections) != pairs:
            raise ConfigError(
                "not a part of each head's features for each axis", where="mrope_section", got=repr(sections)[:200],
                expected=f"three whole numbers that add up to head_dim / 2, {pairs}",
            )  # fmt: skip
        if self.vision_config.hidden_size != self.hidden_size:
            raise ConfigError(
                "tokens of another size than the decoder's", where="vision_config, hidden_size",
                got=self.vision_config.hidden_size, expected=self.hidden_size,
            )  # fmt: skip

    @property
    def all_layers(self) -> int:
        return self.num_hidden_layers + self.vision_config.depth


class Qwen2VL(VisionLM):
    """Qwen2-VL with a language-model head."""

    config: Qwen2VLConfig

    def __init__(self, config: Qwen2VLConfig, **make: Unpack[Make]) -> None:
        c = config
        frequencies = c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings
        rotary = SectionedRotaryEmbedding(c.mrope_section, *frequencies)
        decoder, head = qwen2_decoder(c, rotary, **make), LMHead(c.hidden_size, c.vocab_size, **make)
        super().__init__(config, decoder, head, visual=vision_tower(c.vision_config, **make))


def vision_tower(config: Qwen2VLVisionConfig, **make: Unpack[Make]) -> VisionTower:
    """The tower, from patches to embeddings of the decoder's size."""
    c, merged = config, config.spatial_merge_size**2
    rotary = AxialRotaryEmbedding(2, c.embed_dim // c.num_heads, in_fp32=True)

    def norm() -> LayerNorm:
        return LayerNorm(c.embed_dim, 1e-6, **make)

    def block() -> PreNormBlock:
        attention = Attention(
            c.embed_dim, c.num_heads, rotary=rotary, is_causal=False, qkv_bias=True, output_bias=True, **make
        )
        mlp = MLP(c.embed_dim, c.mlp_ratio * c.embed_dim, activation="quick_gelu", **make)
        return PreNormBlock(norm(), attention, norm(), mlp)

    patch = (c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
    merger = PatchMerger(norm(), MLP(merged * c.embed_dim, merged * c.embed_dim, c.hidden_size, **make), merged=merged)
    blocks = [block() for _ in range(c.depth)]
    return VisionTower(PatchEmbedding(patch, c.embed_dim, **make), blocks, merger, merge_size=c.spatial_merge_size)
