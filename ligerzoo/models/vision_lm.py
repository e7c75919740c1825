"""What language models share that have images and videos among the tokens of a text, at positions in time, height and
width."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ligerzoo.layers import Context, VisionTower, grid_positions, put_rows
from ligerzoo.models.causal_lm import CausalLM, CausalLMConfig


class VisionLMConfig(CausalLMConfig, Protocol):
    """What the shared code reads of an architecture's config."""

    @property
    def image_token_id(self) -> int: ...
    @property
    def video_token_id(self) -> int: ...


class VisionLM(CausalLM):
    """A causal language model with a vision tower, see `CausalLM`, that also reads images and videos, see `embed`.

    Attributes:
        visual: the tower.
        frames_advance: behind a video the positions go on from its last frame, as in transformers 4, and not only from
            its last row or column, as in transformers 5.
    """

    config: VisionLMConfig
    visual: VisionTower
    frames_advance = False

    def embed(
        self,
        x: Tensor,
        context: Context,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
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

        Raises:
            ValueError: patches, grids and tokens do not fit together.
        """
        c, m = self.config, self.visual.merge_size
        kinds = (
            (c.image_token_id, pixel_values, image_grid_thw),
            (c.video_token_id, pixel_values_videos, video_grid_thw),
        )
        embeddings, real, grids = x if x.is_floating_point() else self.model.embed_tokens(x), context.real_tokens(), []
        for token_id, patches, grid in kinds:
            if patches is None and grid is None:
                continue
            if grid is None or x.is_floating_point():
                raise ValueError("images and videos need their grids, and input_ids to tell their places")
            here = x == token_id if real is None else (x == token_id) & real
            grids.append((here, grid // grid.new_tensor([1, m, m])))
            if patches is not None:
                embeddings = put_rows(embeddings, here, self.visual(patches, grid))
        self._set_positions(context, grids)
        return embeddings

    def _set_positions(self, context: Context, grids: list[tuple[Tensor, Tensor]]) -> None:
        cache, places = context.cache, context.places()
        offset = None if cache is None else cache.position_offset
        if context.position_ids.ndim == 2 and (grids or offset is not None):
            positions = places
            if grids:
                positions = grid_positions(places, grids, context.starts, frames_advance=self.frames_advance)
            context.position_ids = positions if offset is None else positions + offset
        if cache is not None and context.position_ids.ndim == 3:
            cache.position_offset = context.position_ids.amax((0, 2))[:, None] - places[:, -1:]
