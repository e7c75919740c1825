"""Images and videos among the tokens of a text: from pixels to embeddings, and where those stand in the text.

An image or a video is a grid of t frames of h x w patches. Its patches come frame by frame, and in a frame by blocks of
m x m, which are merged into one token each; so of a frame there are h/m x w/m tokens, row by row.

Shapes: N patches of all images, n images, C channels, P the side of a patch, F the frames of images that a patch has of
them, E the tower's features, H the decoder's; B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers.context import Context
from ligerzoo.layers.decoder import run_blocks


class PatchEmbedding(nn.Module):
    """A linear map of patches, which is a convolution whose stride is its kernel's size (Dosovitskiy et al. 2021).

    Args:
        patch: the sizes of a patch: channels, then frames if it has several, height and width.
        embed_dim: E.
        bias: whether there is one.
    """

    def __init__(
        self,
        patch: tuple[int, ...],
        embed_dim: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(embed_dim, *patch, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(embed_dim, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draws the weight from N(0, std^2), and sets the bias to zero."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, patches: Tensor) -> Tensor:
        """patches: (..., C * F * P * P), of any floating dtype -> (..., E)."""
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)

    def extra_repr(self) -> str:
        embed_dim, *patch = self.weight.shape
        return f"{tuple(patch)}, {embed_dim}"


class PatchMerger(nn.Module):
    """Neighbouring patches, normalized, side by side in one vector, to one embedding (Qwen2-VL).

    Args:
        ln_q: the norm, of E features.
        mlp: m^2 * E features to H.
    """

    def __init__(self, ln_q: nn.Module, mlp: nn.Module, *, merged: int) -> None:
        super().__init__()
        self.merged = merged
        self.ln_q, self.mlp = ln_q, mlp

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., E), N in all, blocks one after the other -> (N / m^2, H)."""
        return self.mlp(self.ln_q(x).reshape(-1, self.merged * x.shape[-1]))  # type: ignore[no-any-return]


class Segments:
    """Runs of patches, each of which sees itself alone: those of one size are the rows of a batch, in which attention
    needs no mask, and those of several sizes are packed into a single row.

    Args:
        sizes: (n,) int64 on the CPU, how many patches each has.
        places: (A, N) int64, where the patches stand on each axis.

    Attributes:
        shape: (B, T) of the rows.
        context: what their attention sees.
    """

    def __init__(self, sizes: Tensor, places: Tensor) -> None:
        is_batch = bool((sizes == sizes[0]).all())
        self.shape = (len(sizes), int(sizes[0])) if is_batch else (1, int(sizes.sum()))
        bounds = None if is_batch else F.pad(sizes.cumsum(0), (1, 0))
        position_ids = places.view(-1, *self.shape)
        self.context = Context(position_ids[0], position_ids=position_ids, cu_seqlens=bounds)

    def rows(self, x: Tensor) -> Tensor:
        """x: (..., E), N in all -> (B, T, E)."""
        return x.view(*self.shape, x.shape[-1])


class VisionTower(nn.Module):
    """Patches to embeddings for a decoder: every patch sees those of its own frame.

    Args:
        patch_embed: patches to features.
        blocks: the blocks, each called as `PreNormBlock` is.
        merger: features of blocks of patches to embeddings.
        merge_size: m.

    Attributes:
        gradient_checkpointing: see `Decoder`.
    """

    def __init__(
        self, patch_embed: nn.Module, blocks: Iterable[nn.Module], merger: nn.Module, *, merge_size: int
    ) -> None:
        super().__init__()
        self.patch_embed = patch_embed
        self.blocks = nn.ModuleList(blocks)
        self.merger = merger
        self.merge_size = merge_size
        self.gradient_checkpointing = False

    def forward(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """patches: (N, C * F * P * P) -> (N / m^2, H).

        Args:
            patches: of all images, one after the other.
            grid_thw: (n, 3) int, t, h and w of each; on the CPU, for there the sizes are needed.

        Raises:
            ValueError: the grids do not fit the patches.
        """
        sizes, places = self._frames(patches, grid_thw)
        frames = Segments(sizes, places.to(patches.device))
        x = frames.rows(self.patch_embed(patches))
        x = run_blocks(self.blocks, x, frames.context, recompute=self.gradient_checkpointing)
        return self.merger(x)  # type: ignore[no-any-return]

    def _frames(self, patches: Tensor, grid_thw: Tensor) -> tuple[Tensor, Tensor]:
        """How many patches each frame has, and where they stand in it, see `patch_places`; both on the CPU."""
        if grid_thw.ndim != 2 or grid_thw.shape[1] != 3:
            raise ValueError(f"grids of shape {tuple(grid_thw.shape)}; expected (images, 3): t, h and w of each")
        grid, count = grid_thw.cpu().long(), len(patches)
        is_possible = bool(((grid > 0) & (grid <= count)).all()) and not (grid[:, 1:] % self.merge_size).any()
        sizes = (grid[:, 1] * grid[:, 2]).repeat_interleave(grid[:, 0]) if is_possible else grid.new_empty(0)
        if not count or sizes.sum() != count:
            raise ValueError(
                f"{count} patches for grids of {grid.tolist()}; expected t * h * w of each together, "
                f"and h and w to be multiples of {self.merge_size}"
            )
        return sizes, patch_places(grid, self.merge_size)


class WindowedVisionTower(VisionTower):
    """A tower most of whose blocks show a patch no more than a square window of its frame (Qwen2.5-VL, Bai et al. 2025,
    section 2.1). Windows at the right and the lower edge are what is left there.

    Patches go through the blocks window by window: so those of a window, and those of a frame, are neighbours.

    Args:
        window: the side of a window, in tokens: m patches each.
        full_blocks: the numbers of the blocks in which a patch sees all of its frame.
        parts: those of `VisionTower`.
    """

    def __init__(self, *parts: Any, window: int, full_blocks: Iterable[int], **options: Any) -> None:
        super().__init__(*parts, **options)
        self.window, self.full_blocks = window, frozenset(full_blocks)

    def forward(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """See `VisionTower.forward`."""
        frame_sizes, places = self._frames(patches, grid_thw)
        order, window_sizes = window_order(frame_sizes, places, self.window * self.merge_size)
        token_order = order[:: self.merge_size**2] // self.merge_size**2
        order, token_order, places = (x.to(patches.device) for x in (order, token_order, places[:, order]))
        frames, windows = Segments(frame_sizes, places), Segments(window_sizes, places)

        x = self.patch_embed(patches[order])
        for number, block in enumerate(self.blocks):
            seen = frames if number in self.full_blocks else windows
            x = run_blocks([block], seen.rows(x), seen.context, recompute=self.gradient_checkpointing)
        tokens = self.merger(x)
        return torch.empty_like(tokens).index_copy(0, token_order, tokens)


def patch_places(grid: Tensor, merge_size: int) -> Tensor:
    """(2, N) int64: the row and the column in its frame of each patch, in the patches' order.

    Args:
        grid: (n, 3) on the CPU.
        merge_size: m.
    """
    m = merge_size

    def places(frames: int, height: int, width: int) -> Tensor:
        numbers = (torch.arange(size, device=grid.device) for size in (height, width))
        rows_and_columns = torch.stack(torch.meshgrid(*numbers, indexing="ij"))
        blocks = rows_and_columns.view(2, height // m, m, width // m, m).transpose(2, 3)
        return blocks.flatten(1).repeat(1, frames)

    return torch.cat([places(*sizes) for sizes in grid.tolist()], dim=1)


def window_order(frame_sizes: Tensor, places: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The patches frame by frame, and in a frame window by window, row by row of windows.

    Args:
        frame_sizes: (f,) int64, how many patches each frame has.
        places: (2, N) int64, see `patch_places`.
        side: of a window, in patches; a multiple of m.

    Returns:
        (N,) int64, the numbers of the patches in that order, those of a window as they came; and (w,) int64, how many
        patches each window has.
    """
    frame = torch.arange(len(frame_sizes), device=places.device).repeat_interleave(frame_sizes)
    row, column = places // side
    number = (frame * (row.max() + 1) + row) * (column.max() + 1) + column
    order = number.argsort(stable=True)
    return order, number[order].unique_consecutive(return_counts=True)[1]


def put_rows(x: Tensor, here: Tensor, rows: Tensor, sizes: Tensor | None = None) -> Tensor:
    """x: (B, T, H) -> (B, T, H) with other rows in some places, in their order.

    Args:
        x: the embeddings of all tokens.
        here: (B, T) bool, as many of them true as there are rows.
        rows: (N, H).
        sizes: (n,) int64, how many of the rows each image or video has, whose places lie side by side; None if that
            does not matter.

    Raises:
        ValueError: there are more or fewer rows than places, or those of an image do not lie side by side.
    """
    where = here.flatten().nonzero()[:, 0]
    if len(where) != len(rows):
        raise ValueError(f"{len(rows)} embeddings of images or videos; expected {len(where)}, one for each token there")
    if sizes is not None:
        ends = sizes.cumsum(0)
        first, last = where[ends - sizes], where[ends - 1]
        is_in_a_row = (last - first == sizes.to(where.device) - 1) & (first // x.shape[1] == last // x.shape[1])
        if not bool(is_in_a_row.all()):
            raise ValueError(f"images or videos in parts; expected {sizes.tolist()} tokens side by side, in this order")
    return x.flatten(0, 1).index_copy(0, where, rows.to(x.dtype)).view_as(x)


class Grids(NamedTuple):
    """All images of a batch, or all its videos, as the text has them.

    Attributes:
        here: (B, T) bool, where their tokens are.
        sizes: (n, 3) int, of each in its turn how many frames, rows and columns of tokens it has.
        interval: (n,) or 0-d, by how much the position in time grows from frame to frame; it is rounded down.
    """

    here: Tensor
    sizes: Tensor
    interval: Tensor


def grid_positions(
    places: Tensor, grids: Iterable[Grids], starts: Tensor | None = None, *, frames_advance: bool = False
) -> tuple[Tensor, Tensor]:
    """Positions on three axes (time, height, width) of the tokens of texts with images (Wang et al. 2024, section 2.1).

    The tokens of an image have the coordinates of their frame, row and column, counted from the position p at which the
    image begins. The text goes on at p + max(h, w) on all axes. So each image leaves its number of tokens, less
    max(h, w), out of the count of positions.

    Args:
        places: (B or 1, T) int64, see `Context.places`.
        grids: one for each kind of image.
        starts: see `Context`.
        frames_advance: the text goes on behind the last frame of a video, too.

    Returns:
        The positions, (3, B, T) int64; and by how much those of tokens to come differ from their places, (B, 1) int64.
    """
    positions, left_out = places.expand(3, -1, -1), torch.zeros_like(places)
    for here, grid, interval in grids:
        t, h, w = grid.to(places.device, torch.int64).unbind(1)
        interval = interval.to(places.device).expand_as(t)
        sizes = t * h * w
        ends = sizes.cumsum(0)
        count = (here.flatten().cumsum(0) - 1).view(here.shape)  # of such tokens up to this
        image = torch.searchsorted(ends, count, right=True).clamp(max=len(sizes) - 1)
        token = count - (ends - sizes)[image]
        h_, w_ = h[image], w[image]
        time = (token // (h_ * w_) * interval[image]).long()
        coordinates = torch.stack([time, token // w_ % h_, token % w_])
        positions = positions + (coordinates - token) * here
        advance = torch.maximum(h, w)
        if frames_advance:
            advance = torch.maximum(advance, ((t - 1) * interval).long() + 1)
        is_last = here & (token == sizes[image] - 1)
        left_out = left_out + (sizes - advance)[image] * is_last
    before = left_out.cumsum(1) - left_out
    if starts is not None:
        before = before - before.gather(1, starts.expand_as(before))
    return positions - before, -(before + left_out)[:, -1:]
