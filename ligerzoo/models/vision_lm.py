"""Shared by models with images and videos of any size: Qwen's, at positions in time, height and width, and others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.layers import (
    MLP,
    Attention,
    AxialRotaryEmbedding,
    Context,
    Decoder,
    DeepStack,
    Grids,
    LMHead,
    PatchEmbedding,
    PatchMerger,
    PreNormBlock,
    VisionTower,
    grid_positions,
    masked_index,
    repeated_items,
    scatter_embeddings,
)
from ligerzoo.layers.rope_scaling import MAX_ROTARY_DIM, is_rotary_dim
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, are_indices, check_fields, refuse_unless


@dataclass(frozen=True, kw_only=True)
class VisionTowerConfig(ABC):
    """Config of a vision tower. Architectures add fields.

    Attributes:
        depth: number of blocks.
        patch_size: side of a patch, in pixels.
        temporal_patch_size: frames per patch; images are repeated this many times.
        spatial_merge_size: side of a block of patches that is merged into one token.
    """

    depth: int = 32
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.patch_features % (4 * self.num_heads) or not is_rotary_dim(self.patch_features // self.num_heads // 2):
            raise ConfigError(
                "invalid number of heads",
                where="vision_config, num_heads",
                got=f"{self.num_heads} for {self.patch_features} features",
                expected="features per head to be a multiple of 4 (2-D rotary embedding), "
                f"at most {2 * MAX_ROTARY_DIM}",
            )
        side, where = self.spatial_merge_size, "vision_config, spatial_merge_size"
        expected = "fewer than 2^63 features in a block of patches"
        refuse_unless(side**2 * self.patch_features < 2**63, where, side, expected)

    @property
    @abstractmethod
    def patch_features(self) -> int:
        """Features of a patch."""

    @property
    def token_features(self) -> int | None:
        """Features of an output token, which equal the decoder's `hidden_size`; None for a tower of any number."""
        return None


@dataclass(frozen=True, kw_only=True)
class VisionLMConfig(DecoderConfig):
    """Config of a decoder with a vision tower. Unless noted, fields are those of the decoder.

    Attributes:
        vision_config: config of the vision tower.
        image_token_id: placeholder token that image embeddings replace.
        video_token_id: placeholder token that video embeddings replace.
    """

    vision_config: VisionTowerConfig
    image_token_id: int = 151655
    video_token_id: int = 151656

    def validate(self) -> None:
        super().validate()
        features, size = self.vision_config.token_features, self.hidden_size
        what = "the tower's output features differ from the decoder's"
        refuse_unless(features in (None, size), "vision_config", features, f"hidden_size, {size}", what)

    @property
    def all_layers(self) -> int:
        return self.num_hidden_layers + self.vision_config.depth


@dataclass(frozen=True, kw_only=True)
class SectionedVisionLMConfig(VisionLMConfig):
    """Config of a decoder with positions in time, height and width, and a vision tower.

    Attributes:
        mrope_section: feature pairs of a head that rotate by time, height and width.
    """

    mrope_section: Sequence[int] = field(default_factory=lambda: [16, 24, 24])

    def validate(self) -> None:
        super().validate()
        sections, pairs = self.mrope_section, self.rotary_size // 2
        is_valid = are_indices(sections) and len(sections) == 3 and sum(sections) == pairs
        expected = f"three integers, 0 or more, that add up to {pairs}, half of the rotated features"
        refuse_unless(is_valid, "mrope_section", sections, expected, "invalid sections")


@dataclass(frozen=True, kw_only=True)
class QwenVisionLMConfig(SectionedVisionLMConfig):
    """Config of Qwen's decoders with a vision tower.

    Attributes:
        vision_start_token_id: token before an image or video; unused by the model.
        vision_end_token_id: token after an image or video; unused by the model.
    """

    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653


_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""The input with the grids of patches, by that with the patches."""


class VisionLM(CausalLM):
    """A decoder with a language-model head and a vision tower; see `CausalLM`, and `embed` for images and videos.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
        lm_head: see `CausalLM`.
        parts: the vision tower, with the name `tower_name`, and further modules.

    Attributes:
        separates_frames: in prompts, text separates the frames of a video, which have the positions of images.
    """

    config: VisionLMConfig
    tower_name: ClassVar[str] = "visual"
    separates_frames = False
    inputs_per_video: ClassVar[tuple[str, ...]] = ("frame_interval",)
    """Model inputs with an entry for each video."""

    def __init__(
        self, config: VisionLMConfig, model: Decoder, lm_head: LMHead | None = None, **parts: nn.Module
    ) -> None:
        super().__init__(config, model, lm_head, **parts)

    @property
    def tower(self) -> VisionTower:
        """The vision tower."""
        tower: VisionTower = getattr(self, self.tower_name)
        return tower

    def embed_patches(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """Returns the embeddings of images, (N / m^2, H), and DeepStack features, if any; see `VisionTower.forward`."""
        return self.tower(patches, grid_thw)  # type: ignore[no-any-return]

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
        """Embeds tokens, images and videos: (B, T) token ids -> (B, T, H). Embeddings (B, T, H) are returned unchanged.

        Args:
            x: `input_ids` or `inputs_embeds` of `forward`.
            context: positions and mask of these tokens.
            pixel_values: (N, C * F * P * P), patches of all images of the batch, see `ligerzoo.layers.VisionTower`.
            image_grid_thw: (n, 3) int, frames, rows and columns of patches of each image; on the CPU to avoid a host
                sync.
            pixel_values_videos: patches of all videos, like `pixel_values`.
            video_grid_thw: grids of all videos, like `image_grid_thw`.
            frame_interval: (n,) or 0-d, increase of the temporal position per frame of each video; None for 1.
            mm_token_type_ids: (B, T), token types from transformers' processors; unused where the ids imply them.

        Raises:
            ValueError: the numbers of patches, grids and vision tokens do not match.
        """
        if self.separates_frames and frame_interval is not None:
            raise ValueError("frame_interval: got a value; expected None, since timestamps in the text separate frames")
        m, one = self.tower.merge_size, torch.ones((), device=x.device)
        kinds = (
            ("pixel_values", pixel_values, image_grid_thw, one),
            (
                "pixel_values_videos",
                pixel_values_videos,
                video_grid_thw,
                one if frame_interval is None else frame_interval,
            ),
        )
        embeddings = x if x.is_floating_point() else self.model.embed_tokens(x)
        padding_mask, grids, deepstack = context.call_padding_mask(), [], []
        for name, patches, grid, interval in kinds:
            if patches is None and grid is None:
                continue
            if patches is None or grid is None or x.is_floating_point():
                given = [name for name, value in (("patches", patches), ("grids", grid)) if value is not None]
                given.append("inputs_embeds" if x.is_floating_point() else "input_ids")
                what = "images and videos need patches (pixel_values*), their grids (*_grid_thw) and input_ids"
                raise LigerzooError(what, got=f"only some of them: {', '.join(given)}")
            mask = self.placeholder_masks(x, mm_token_type_ids, context.segment_start)[name]
            mask = mask if padding_mask is None else mask & padding_mask
            is_separate = self.separates_frames and name == "pixel_values_videos"
            grids.append(Grids(mask, grid // grid.new_tensor([1, m, m]), interval, is_separate))
            output = self.embed_patches(patches, grid)  # (N, H), or (1 + L, N, H) with DeepStack features
            tokens, *features = output.view(-1, *output.shape[-2:])
            embeddings = scatter_embeddings(embeddings, mask, tokens, grids[-1].runs)
            deepstack.append((masked_index(mask, len(tokens)), *features))
        if any(features for _, *features in deepstack):
            index, *levels = (torch.cat(tensors) for tensors in zip(*deepstack, strict=True))
            context.deepstack = DeepStack(index, levels)
        self.set_positions(context, grids)
        return embeddings

    def repeat_rows(
        self, modalities: Mapping[str, Any], repeats: int, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """See `CausalLM.repeat_rows`. Images and videos are listed in order, without a row dimension."""
        repeated, types = dict(modalities), modalities.get("mm_token_type_ids")
        for patches, is_placeholder in self.placeholder_masks(input_ids, types).items():
            grid_name, others = _GRIDS[patches], self.inputs_per_video if patches == "pixel_values_videos" else ()
            grid = repeated.get(grid_name)
            if grid is None or repeated.get(patches) is None:
                continue
            mask = is_placeholder if attention_mask is None else is_placeholder & attention_mask.bool()
            sizes = grid.prod(1)
            items = repeated_items(mask, sizes // self.tower.merge_size**2, repeats)
            pieces = repeated[patches].split(sizes.tolist())
            repeated[patches], repeated[grid_name] = torch.cat([pieces[item] for item in items]), grid[items]
            for name in others:
                if repeated.get(name) is not None:
                    repeated[name] = torch.as_tensor(repeated[name])[items]
        return repeated if types is None else {**repeated, "mm_token_type_ids": types.repeat_interleave(repeats, 0)}

    def set_positions(self, context: Context, grids: list[Grids]) -> None:
        """Sets the context's positions of the tokens of images and videos; they have those of text by default.

        Args:
            context: positions and mask of the tokens.
            grids: the images, and the videos, if the batch has some.
        """


class SectionedVisionLM(VisionLM):
    """`VisionLM` with positions on three axes, time, height and width; its decoder has a rotary embedding for them.

    `embed` sets these positions in the context, unless they were given. With images, position ids on one axis only mark
    the segments of a packed row.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
        visual: the vision tower.

    Attributes:
        frames_advance: positions after a video continue after its last frame, as in transformers 4, instead of only
            after its last row or column, as in transformers 5.
    """

    config: SectionedVisionLMConfig
    visual: VisionTower
    frames_advance = False

    def __init__(self, config: SectionedVisionLMConfig, model: Decoder, visual: VisionTower) -> None:
        super().__init__(config, model, visual=visual)

    def set_positions(self, context: Context, grids: list[Grids]) -> None:
        """See `VisionLM.set_positions`."""
        cache, token_positions = context.cache, context.token_positions()
        before = None if cache is None else cache.position_offset
        if context.position_ids.ndim == 3:
            after = context.position_ids[..., -1:].amax(0) - token_positions[:, -1:]
        elif grids:
            positions, after = grid_positions(
                token_positions, grids, context.segment_start, frames_advance=self.frames_advance
            )
            if (padding_mask := context.call_padding_mask()) is not None:
                positions = positions.masked_fill(~padding_mask, 0)  # as in transformers, also for padding on the right
            if before is not None:
                positions, after = positions + before, after + before
            context.position_ids = positions
        elif before is not None:
            context.position_ids, after = token_positions + before, before
        else:
            return
        if cache is not None:
            cache.position_offset = after


def tower_parts(
    config: VisionTowerConfig,
    norm: Callable[[], nn.Module],
    mlp: Callable[[], nn.Module],
    *,
    patch_bias: bool = False,
    qkv_bias: bool = True,
    output_bias: bool = True,
) -> tuple[PatchEmbedding, list[PreNormBlock]]:
    """Builds the first parts of a vision tower.

    Args:
        config: config of the tower.
        norm: builds a norm of `patch_features` features.
        mlp: builds the MLP of a block.
        patch_bias: add a bias to the patch embedding.
        qkv_bias: see `Attention`, as for `output_bias`.
    """
    c = config
    patch = (c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
    embedding = PatchEmbedding(patch, c.patch_features, bias=patch_bias)
    return embedding, tower_blocks(c, norm, mlp, qkv_bias=qkv_bias, output_bias=output_bias)


def tower_blocks(
    config: VisionTowerConfig,
    norm: Callable[[], nn.Module],
    mlp: Callable[[], nn.Module],
    *,
    qkv_bias: bool = True,
    output_bias: bool = True,
) -> list[PreNormBlock]:
    """Builds the blocks of a vision tower. The arguments are those of `tower_parts`."""
    c, features = config, config.patch_features
    rotary = AxialRotaryEmbedding(2, features // c.num_heads, in_fp32=True)
    build = partial(Attention, features, c.num_heads, rotary=rotary, is_causal=False)

    def block() -> PreNormBlock:
        attention = build(qkv_bias=qkv_bias, output_bias=output_bias)
        return PreNormBlock(norm(), attention, norm(), mlp())

    return [block() for _ in range(c.depth)]


def patch_merger(config: VisionTowerConfig, norm: nn.Module) -> PatchMerger:
    """Builds the merger from patches of a tower to tokens of the decoder; `norm` as in `PatchMerger`."""
    merged = config.spatial_merge_size**2
    features = merged * config.patch_features
    return PatchMerger(norm, MLP(features, features, config.token_features), merged=merged)
