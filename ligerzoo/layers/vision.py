"""Images and videos among the tokens of a text: from pixels to embeddings, and where those stand in the text.

An image or a video is a grid of t frames of h x w patches. Its patches come frame by frame, and in a frame by blocks of
m x m, which are merged into one token each; so of a frame there are h/m x w/m tokens, row by row.

Shapes: N patches of all images, n images, C channels, P the side of a patch, F the frames of images that a patch has of
them, E the tower's features, H the decoder's; B batch, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers.context import Context
from ligerzoo.layers.decoder import run_blocks
from ligerzoo.layers.linear import INIT_STD


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
        self.init_weights()

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2) and sets the bias to 0."""
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
    """Runs of patches, each of which sees itself alone. Runs of one size are the rows of a batch, in which attention
    needs no mask; runs of several sizes, and in a compiled graph all runs, are packed into a single row.

    Args:
        begins: (N,) bool, where a run begins; best on the CPU.
        places: (A, N) int64, where the patches stand on each axis.
        device: of the patches.

    Attributes:
        shape: (B, T) of the rows.
        context: what their attention sees.
    """

    def __init__(self, begins: Tensor, places: Tensor, device: torch.device) -> None:
        index = torch.arange(len(begins), device=begins.device)
        starts: Tensor | None = (index * begins).cummax(0).values
        self.shape = (1, len(begins))
        if not torch.compiler.is_compiling():
            sizes = F.pad(begins.nonzero()[:, 0], (0, 1), value=len(begins)).diff()
            if bool((sizes == sizes[0]).all()):
                self.shape, starts = (len(sizes), int(sizes[0])), None
        position_ids = places.to(device).view(-1, *self.shape)
        self.context = Context(position_ids[0], position_ids=position_ids)
        if starts is not None:
            self.context.segment_start = starts.to(device)[None]

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
        patches, begins, places = self._frames(patches, grid_thw)
        frames = Segments(begins, places, patches.device)
        x = frames.rows(self.patch_embed(patches))
        x = run_blocks(self.blocks, x, frames.context, recompute=self.gradient_checkpointing)
        return self.merger(x)  # type: ignore[no-any-return]

    def _frames(self, patches: Tensor, grid_thw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The patches, see `checked`, and where they stand, see `patch_places`: on the CPU, but in a compiled graph on
        the patches' device."""
        if grid_thw.ndim != 2 or grid_thw.shape[1] != 3:
            raise ValueError(f"grids of shape {tuple(grid_thw.shape)}; expected (images, 3): t, h and w of each")
        count, compiles = len(patches), torch.compiler.is_compiling()
        grid = grid_thw.to(patches.device if compiles else "cpu", torch.int64)
        fits = ((grid > 0) & (grid <= count)).all() & (grid[:, 1:] % self.merge_size == 0).all()
        patches = checked(
            patches,
            fits & (grid.clamp(0, count).prod(1).sum() == max(count, 1)),
            lambda: (
                f"{count} patches for grids of {grid.tolist()}; expected t * h * w of each together, "
                f"and h and w to be multiples of {self.merge_size}"
            ),
        )
        return patches, *patch_places(grid, count, self.merge_size)


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
        patches, begins, places = self._frames(patches, grid_thw)
        order, window_begins = window_order(begins, places, self.window * self.merge_size)
        frames, windows = (Segments(first, places[:, order], patches.device) for first in (begins, window_begins))
        order = order.to(patches.device)
        token_order = order[:: self.merge_size**2] // self.merge_size**2

        x = self.patch_embed(patches[order])
        for number, block in enumerate(self.blocks):
            seen = frames if number in self.full_blocks else windows
            x = run_blocks([block], seen.rows(x), seen.context, recompute=self.gradient_checkpointing)
        tokens = self.merger(x)
        return torch.empty_like(tokens).index_copy(0, token_order, tokens)


def checked(x: Tensor, holds: Tensor, message: Callable[[], str]) -> Tensor:
    """x, if `holds`, 0-d bool, is true.

    Raises:
        ValueError: it is not, with this message. A compiled graph cannot raise and returns NaN.
    """
    if torch.compiler.is_compiling():
        return x.where(holds.to(x.device), math.nan)
    if not bool(holds):
        raise ValueError(message())
    return x


def patch_places(grid: Tensor, count: int, merge_size: int) -> tuple[Tensor, Tensor]:
    """Where each patch stands in its frame, in the patches' order.

    Args:
        grid: (n, 3) int64.
        count: N, the patches in all.
        merge_size: m.

    Returns:
        (N,) bool, the first patch of each frame; and (2, N) int64, the row and the column of each patch.
    """
    m, index = merge_size, torch.arange(count, device=grid.device)
    frames, height, width = grid.clamp(min=1).unbind(1)
    ends = (frames * height * width).cumsum(0)
    image = torch.searchsorted(ends, index, right=True).clamp(max=len(grid) - 1)
    in_frame = (index - F.pad(ends, (1, 0))[image]) % (height * width)[image]
    block, in_block = in_frame // m**2, in_frame % m**2
    blocks = (width // m).clamp(min=1)[image]  # side by side
    places = [block // blocks * m + in_block // m, block % blocks * m + in_block % m]
    return in_frame == 0, torch.stack(places)


def window_order(begins: Tensor, places: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The patches frame by frame, and in a frame window by window, row by row of windows.

    Args:
        begins: (N,) bool, the first patch of each frame.
        places: (2, N) int64, see `patch_places`.
        side: of a window, in patches; a multiple of m.

    Returns:
        (N,) int64, the numbers of the patches in that order, those of a window as they came; and (N,) bool, the first
        patch of each window in that order.
    """
    row, column = places // side
    number = (begins.cumsum(0) * (row.max() + 1) + row) * (column.max() + 1) + column
    number, order = number.sort(stable=True)
    return order, F.pad(number[1:] != number[:-1], (1, 0), value=True)


def put_rows(x: Tensor, here: Tensor, rows: Tensor, sizes: Tensor | None = None) -> Tensor:
    """x: (B, T, H) -> (B, T, H) with other rows in some places, in their order.

    Args:
        x: the embeddings of all tokens.
        here: (B, T) bool, as many of them true as there are rows.
        rows: (N, H).
        sizes: (n,) int64, how many of the rows each image or video has, whose places lie side by side; None if that
            does not matter.

    Raises:
        ValueError: there are more or fewer rows than places, or those of an image do not lie side by side. See
            `checked`.
    """
    count = here.sum()
    rows = checked(
        rows,
        count == len(rows),
        lambda: f"{len(rows)} embeddings of images or videos; expected {int(count)}, one for each token there",
    )
    where = (~here).flatten().to(torch.uint8).argsort(stable=True)[: len(rows)]  # `nonzero` has no size to compile
    if sizes is not None:
        sizes = sizes.to(where.device)
        ends = sizes.cumsum(0)
        first, last = (where[index.clamp(0, len(rows) - 1)] for index in (ends - sizes, ends - 1))
        rows = checked(
            rows,
            ((last - first == sizes - 1) & (first // x.shape[1] == last // x.shape[1])).all(),
            lambda: f"images or videos in parts; expected {sizes.tolist()} tokens side by side, in this order",
        )
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
        places: (B or 1, T) int64, see `Context.token_positions`.
        grids: one for each kind of image.
        segment_start: see `Context`.
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
