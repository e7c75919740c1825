"""What Qwen2-VL and Qwen2.5-VL share: Qwen2, with images and videos among the tokens of a text, at positions in time,
height and width."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor, nn

from ligerzoo.errors import ConfigError
from ligerzoo.layers import (
    MLP,
    Attention,
    AxialRotaryEmbedding,
    Context,
    Grids,
    LMHead,
    PatchEmbedding,
    PatchMerger,
    PreNormBlock,
    SectionedRotaryEmbedding,
    VisionTower,
    grid_positions,
    put_rows,
)
from ligerzoo.models.causal_lm import CausalLM, FactoryKwargs
from ligerzoo.models.config import check_fields
from ligerzoo.models.qwen2 import Qwen2Config, qwen2_decoder


@dataclass(frozen=True, kw_only=True)
class VisionTowerConfig(ABC):
    """The numbers that every vision tower has. An architecture's adds its own.

    Attributes:
        depth: the number of blocks.
        patch_size: the side of a patch, in pixels.
        temporal_patch_size: the frames that a patch has of a video; an image is given as often.
        spatial_merge_size: the side of a block of patches that is one token.
    """

    depth: int = 32
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.patch_features % (4 * self.num_heads):
            raise ConfigError(
                "heads whose features are not turned in pairs by rows and by columns", where="vision_config, num_heads",
                got=f"{self.num_heads} for {self.patch_features} features of a patch",
                expected="a number that leaves each a multiple of 4",
            )  # fmt: skip

        if self.spatial_merge_size**2 * self.patch_features >= 2**63:
            raise ConfigError(
                "more features than can be counted", where="vision_config, spatial_merge_size",
                got=self.spatial_merge_size, expected="a few patches side by side",
            )  # fmt: skip

    @property
    @abstractmethod
    def patch_features(self) -> int:
        """The features of a patch."""

    @property
    @abstractmethod
    def token_features(self) -> int:
        """The features of a token, which are the decoder's."""


@dataclass(frozen=True, kw_only=True)
class VisionLMConfig(Qwen2Config):
    """The numbers of a Qwen2 that sees, of its decoder where nothing else is said; defaults are those of transformers'
    Qwen2VLTextConfig and Qwen2_5_VLTextConfig, which are nearly those of the models with 72B.

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
    vision_config: VisionTowerConfig
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
        if self.vision_config.token_features != self.hidden_size:
            raise ConfigError(
                "images make tokens of another size than the decoder's", where="vision_config",
                got=self.vision_config.token_features, expected=f"hidden_size, {self.hidden_size}",
            )  # fmt: skip

    @property
    def all_layers(self) -> int:
        return self.num_hidden_layers + self.vision_config.depth


class VisionLM(CausalLM):
    """Qwen2 with a language-model head and a vision tower, see `CausalLM`; it also reads images and videos, see
    `embed`.

    Args:
        config: the architecture's config.
        visual: the tower.
        make: how to make the weights.

    Attributes:
        frames_advance: behind a video the positions go on from its last frame, as in transformers 4, and not only from
            its last row or column, as in transformers 5.
    """

    config: VisionLMConfig
    visual: VisionTower
    frames_advance = False

    def __init__(self, config: VisionLMConfig, visual: VisionTower, **factory_kwargs: Unpack[FactoryKwargs]) -> None:
        c = config
        frequencies = c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings
        rotary = SectionedRotaryEmbedding(c.mrope_section, *frequencies)
        decoder, head = (
            qwen2_decoder(c, rotary, **factory_kwargs),
            LMHead(c.hidden_size, c.vocab_size, **factory_kwargs),
        )
        super().__init__(config, decoder, head, visual=visual)

    @property
    def placeholders(self) -> Mapping[int, str]:
        return {self.config.image_token_id: "pixel_values", self.config.video_token_id: "pixel_values_videos"}

    def embed(
        self,
        x: Tensor,
        context: Context,
        *,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        frame_interval: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """(B, T) token ids -> (B, T, H), with images and videos in the places of their tokens. Given (B, T, H), it
        stays as it is. The context gets the positions on three axes, unless it has them; where there are images, those
        on a single axis only tell texts apart.

        Args:
            x: what `forward` has as `input_ids` or `inputs_embeds`.
            context: where they stand.
            pixel_values: (N, C * F * P * P), the patches of all images of the batch, see `ligerzoo.layers.VisionTower`.
            image_grid_thw: (n, 3) int, how many frames, rows and columns of patches each has; best on the CPU.
            pixel_values_videos: like `pixel_values`.
            video_grid_thw: like `image_grid_thw`.
            frame_interval: (n,) or 0-d, by how much the position in time grows from frame to frame of each video; 1
                when None.
            mm_token_type_ids: (B, T), the kinds of the tokens, as processors of transformers tell them; not read, for
                the ids tell them, too.

        Raises:
            ValueError: patches, grids and tokens do not fit together.
        """
        c, m, one = self.config, self.visual.merge_size, torch.ones((), device=x.device)
        kinds = (
            (c.image_token_id, pixel_values, image_grid_thw, one),
            (c.video_token_id, pixel_values_videos, video_grid_thw, one if frame_interval is None else frame_interval),
        )
        embeddings, real, grids = (
            x if x.is_floating_point() else self.model.embed_tokens(x),
            context.call_padding_mask(),
            [],
        )
        for token_id, patches, grid, interval in kinds:
            if patches is None and grid is None:
                continue
            if patches is None or grid is None or x.is_floating_point():
                raise ValueError("images and videos need patches and their grids, and input_ids to tell their places")
            here = x == token_id if real is None else (x == token_id) & real
            tokens = grid // grid.new_tensor([1, m, m])
            embeddings = put_rows(embeddings, here, self.visual(patches, grid), tokens.long().prod(1))
            grids.append(Grids(here, tokens, interval))
        self._set_positions(context, grids)
        return embeddings

    def _set_positions(self, context: Context, grids: list[Grids]) -> None:
        cache, places = context.cache, context.token_positions()
        before = None if cache is None else cache.position_offset
        if context.position_ids.ndim == 3:
            after = context.position_ids[..., -1:].amax(0) - places[:, -1:]
        elif grids:
            positions, after = grid_positions(places, grids, context.segment_start, frames_advance=self.frames_advance)
            if (real := context.call_padding_mask()) is not None:
                positions = positions.masked_fill(~real, 0)  # as in transformers, also for padding on the right
            if before is not None:
                positions, after = positions + before, after + before
            context.position_ids = positions
        elif before is not None:
            context.position_ids, after = places + before, before
        else:
            return
        if cache is not None:
            cache.position_offset = after


def tower_parts(
    config: VisionTowerConfig,
    norm: Callable[[], nn.Module],
    mlp: Callable[[], nn.Module],
    **factory_kwargs: Unpack[FactoryKwargs],
) -> tuple[PatchEmbedding, list[PreNormBlock], PatchMerger]:
    """What both towers are made of, see `ligerzoo.layers.VisionTower`.

    Args:
        config: the tower's.
        norm: makes one, of a patch's features.
        mlp: makes a block's feed-forward.
        make: how to make the weights of all else.
    """
    c, features, merged = config, config.patch_features, config.spatial_merge_size**2
    rotary = AxialRotaryEmbedding(2, features // c.num_heads, in_fp32=True)

    def block() -> PreNormBlock:
        attention = Attention(
            features, c.num_heads, rotary=rotary, is_causal=False, qkv_bias=True, output_bias=True, **factory_kwargs
        )
        return PreNormBlock(norm(), attention, norm(), mlp())

    patch = (c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
    merger = PatchMerger(
        norm(), MLP(merged * features, merged * features, c.token_features, **factory_kwargs), merged=merged
    )
    return PatchEmbedding(patch, features, **factory_kwargs), [block() for _ in range(c.depth)], merger
