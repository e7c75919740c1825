"""Vision towers for images and videos of any size, and the positions of their tokens in the sequence (Qwen2-VL).

An image or video is a grid of t frames of h x w patches. Patches are ordered by frame, then by block of m x m patches.
Each block is merged into one token, so that a frame has h/m x w/m tokens, row by row.

Shapes: N patches of all images, n images, C channels, P side of a patch, F frames per patch, E features of the tower, H
features of the decoder; B batch, T tokens.
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
from ligerzoo.layers.linear import INIT_STD, init_matrix, initialize


class PatchEmbedding(nn.Module):
    """Linear map of patches: a convolution whose stride equals its kernel size (Dosovitskiy et al. 2021).

    Args:
        patch: shape of a patch: channels, frames (for videos only), height, width.
        embed_dim: E.
        bias: add a bias.
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
        initialize(self, PatchEmbedding)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2) and sets the bias to 0."""
        init_matrix(self.weight, self.bias, std)

    def forward(self, patches: Tensor) -> Tensor:
        """patches: (..., C * F * P * P), any floating dtype -> (..., E)."""
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)

    def extra_repr(self) -> str:
        embed_dim, *patch = self.weight.shape
        return f"{tuple(patch)}, {embed_dim}"


class PatchMerger(nn.Module):
    """Merges blocks of patches into one embedding each: norm, concatenation, MLP (Qwen2-VL).

    Args:
        norm: norm of E features.
        mlp: m^2 * E features to H.
        merged: m^2, patches per block.
    """

    def __init__(self, norm: nn.Module, mlp: nn.Module, *, merged: int) -> None:
        super().__init__()
        self.merged = merged
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., E), N patches in all, ordered by block -> (N / m^2, H)."""
        return self.mlp(self.norm(x).reshape(-1, self.merged * x.shape[-1]))  # type: ignore[no-any-return]


class PatchSegments:
    """Consecutive patches in segments, such as frames or windows, that do not attend to each other.

    Segments of equal size become the rows of a batch, which needs no mask. Segments of different sizes, and all
    segments under torch.compile, are packed into one row.

    Args:
        is_first: (N,) bool, the first patch of each segment; on the CPU to avoid a host sync.
        positions: (A, N) int64, positions of the patches on A axes.
        device: device of the patches.

    Attributes:
        shape: (B, T) of the batch.
        context: positions and mask for the blocks.
    """

    def __init__(self, is_first: Tensor, positions: Tensor, device: torch.device) -> None:
        index = torch.arange(len(is_first), device=is_first.device)
        segment_start: Tensor | None = (index * is_first).cummax(0).values
        self.shape = (1, len(is_first))
        if not torch.compiler.is_compiling():
            sizes = F.pad(is_first.nonzero()[:, 0], (0, 1), value=len(is_first)).diff()
            if bool((sizes == sizes[0]).all()):
                self.shape, segment_start = (len(sizes), int(sizes[0])), None
        position_ids = positions.to(device).view(-1, *self.shape)
        context = Context(position_ids[0], position_ids=position_ids)
        start = None if segment_start is None else segment_start.to(device)[None]
        self.context = context if start is None else context.replace(segment_start=start)

    def batch(self, x: Tensor) -> Tensor:
        """x: (..., E), N patches in all -> (B, T, E)."""
        return x.view(*self.shape, x.shape[-1])


class VisionTower(nn.Module):
    """Patches to embeddings for a decoder; patches attend to all patches of their frame.

    Args:
        patch_embed: patches to features.
        blocks: blocks, called as `PreNormBlock`.
        merger: patch features to embeddings, such as `PatchMerger`.
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
            patches: patches of all images, in order.
            grid_thw: (n, 3) int, t, h and w of each image; on the CPU to avoid a host sync.

        Raises:
            ValueError: the number of patches or a side does not match the grids.
        """
        patches, is_first, positions = self.checked(patches, grid_thw, self.merge_size)
        frames = PatchSegments(is_first, positions, patches.device)
        x = frames.batch(self.patch_embed(patches))
        x = run_blocks(self.blocks, x, frames.context, checkpoints=self.gradient_checkpointing)
        return self.merger(x)  # type: ignore[no-any-return]

    def checked(self, patches: Tensor, grid_thw: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Checks the grids. Returns the patches, see `validated`, and their `patch_positions`.

        Positions are on the CPU, except under torch.compile.

        Args:
            patches: see `forward`, as for `grid_thw`.
            grid_thw: t, h and w of each image.
            side: side of the blocks of patches that order them; 1 for row by row.
        """
        if grid_thw.ndim != 2 or grid_thw.shape[1] != 3:
            raise ValueError(f"grid_thw has shape {tuple(grid_thw.shape)}; expected (images, 3): t, h and w of each")
        count, compiles = len(patches), torch.compiler.is_compiling()
        grid = grid_thw.to(patches.device if compiles else "cpu", torch.int64)
        fits = ((grid > 0) & (grid <= count)).all() & (grid[:, 1:] % self.merge_size == 0).all()
        patches = validated(
            patches,
            fits & (grid.clamp(0, count).prod(1).sum() == max(count, 1)),
            lambda: (
                f"got {count} patches with grids {grid.tolist()}; expected the sum of t * h * w, "
                f"and h and w to be multiples of {self.merge_size}"
            ),
        )
        return patches, *patch_positions(grid, count, side)


class WindowedVisionTower(VisionTower):
    """Vision tower with windowed attention (Qwen2.5-VL, Bai et al. 2025, section 2.1).

    In most blocks a patch attends only within a square window of its frame. Windows at the right and bottom edges are
    cropped. Patches are reordered by window, so that those of a window, and those of a frame, are consecutive.

    Args:
        window: side of a window in tokens, of m x m patches each.
        full_blocks: indices of the blocks in which a patch attends to its whole frame.
        parts: positional arguments of `VisionTower`.
        options: keyword arguments of `VisionTower`.
    """

    def __init__(self, *parts: Any, window: int, full_blocks: Iterable[int], **options: Any) -> None:
        super().__init__(*parts, **options)
        self.window, self.full_blocks = window, frozenset(full_blocks)

    def forward(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """See `VisionTower.forward`."""
        patches, is_first, positions = self.checked(patches, grid_thw, self.merge_size)
        order, is_first_in_window = window_order(is_first, positions, self.window * self.merge_size)
        frames, windows = (
            PatchSegments(first, positions[:, order], patches.device) for first in (is_first, is_first_in_window)
        )
        order = order.to(patches.device)
        token_order = order[:: self.merge_size**2] // self.merge_size**2

        checkpoints = self.gradient_checkpointing
        x = self.patch_embed(patches[order])
        for index, block in enumerate(self.blocks):
            segments = frames if index in self.full_blocks else windows
            x = run_blocks([block], segments.batch(x), segments.context, checkpoints=checkpoints)
        tokens = self.merger(x)
        return torch.empty_like(tokens).index_copy(0, token_order, tokens)


def validated(x: Tensor, is_valid: Tensor, message: Callable[[], str]) -> Tensor:
    """Returns `x` if `is_valid`, 0-d bool, is true.

    Raises:
        ValueError: with `message()`, if it is false. A compiled graph cannot raise: there the result is NaN.
    """
    if torch.compiler.is_compiling():
        return x.where(is_valid.to(x.device), math.nan)
    if not bool(is_valid):
        raise ValueError(message())
    return x


def patch_positions(grid: Tensor, count: int, merge_size: int) -> tuple[Tensor, Tensor]:
    """Returns the position of each patch in its frame, in the order of the patches.

    Args:
        grid: (n, 3) int64, t, h and w of each image.
        count: N, number of patches in all.
        merge_size: m.

    Returns:
        (N,) bool, whether a patch is the first of its frame; and (2, N) int64, row and column of each patch.
    """
    m, image = merge_size, image_of_patch(grid, count)
    frames, height, width = grid.clamp(min=1).unbind(1)
    ends = (frames * height * width).cumsum(0)
    index = torch.arange(count, device=grid.device)
    in_frame = (index - F.pad(ends, (1, 0))[image]) % (height * width)[image]
    block, in_block = in_frame // m**2, in_frame % m**2
    blocks = (width // m).clamp(min=1)[image]  # per row
    positions = [block // blocks * m + in_block // m, block % blocks * m + in_block % m]
    return in_frame == 0, torch.stack(positions)


def image_of_patch(grid: Tensor, count: int) -> Tensor:
    """Returns the index of the image of each patch, (N,) int64. The arguments are those of `patch_positions`."""
    ends = grid.clamp(min=1).prod(1).cumsum(0)
    index = torch.arange(count, device=grid.device)
    return torch.searchsorted(ends, index, right=True).clamp(max=len(grid) - 1)


def image_sizes(grid_thw: Tensor, positions: Tensor) -> Tensor:
    """Returns the rows and columns of the image of each patch, (2, N) int64.

    Args:
        grid_thw: see `VisionTower.forward`.
        positions: (2, N), see `patch_positions`.
    """
    grid = grid_thw.to(positions.device, torch.int64)
    return grid[:, 1:].T[:, image_of_patch(grid, positions.shape[1])].clamp(min=1)


def window_order(is_first: Tensor, positions: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Returns the order of the patches by frame, then by window, row by row of windows.

    Args:
        is_first: (N,) bool, the first patch of each frame.
        positions: (2, N) int64, see `patch_positions`.
        side: side of a window in patches; a multiple of m.

    Returns:
        (N,) int64, indices of the patches in that order, stable within a window; and (N,) bool, whether a patch in that
        order is the first of its window.
    """
    row, column = positions // side
    number = (is_first.cumsum(0) * (row.max() + 1) + row) * (column.max() + 1) + column
    number, order = number.sort(stable=True)
    return order, F.pad(number[1:] != number[:-1], (1, 0), value=True)


def masked_index(mask: Tensor, count: int) -> Tensor:
    """Returns the indices of `count` True entries of a mask in its flattened form, (count,) int64, in order."""
    return (~mask).flatten().to(torch.uint8).argsort(stable=True)[:count]  # static shape, unlike `nonzero`


def scatter_embeddings(
    x: Tensor, mask: Tensor, embeddings: Tensor, runs: Tensor | None = None, is_valid: Tensor | None = None
) -> Tensor:
    """Replaces the embeddings of masked tokens, in order; x: (B, T, H) -> (B, T, H).

    Args:
        x: embeddings of all tokens.
        mask: (B, T) bool, True for N tokens.
        embeddings: (N, H); or more, of which N are valid.
        runs: (n, 2) int64, for each image or video its number of runs of adjacent tokens, and the tokens of a run; None
            to skip this check.
        is_valid: which embeddings are valid, bool; None for all.

    Raises:
        ValueError: the number of masked tokens is not N, or the tokens of an image are not adjacent. See `validated`.
    """
    count = mask.sum()
    given = len(embeddings) if is_valid is None else is_valid.sum()
    embeddings = validated(
        embeddings,
        count == given,
        lambda: (
            f"got {int(given)} embeddings of images or videos; expected {int(count)}, "
            "the number of image or video tokens in input_ids"
        ),
    )
    if is_valid is not None:
        embeddings = embeddings[masked_index(is_valid, min(len(embeddings), mask.numel()))]
    index = masked_index(mask, len(embeddings))
    token = torch.arange(len(embeddings), device=index.device)
    if runs is not None:
        number, size = runs.to(index.device).clamp(min=1).unbind(1)
        ends = (number * size).cumsum(0)
        item = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
        begins_run = (token - F.pad(ends, (1, 0))[item]) % size[item] == 0
        row = index // x.shape[1]
        is_next = (index.diff() == 1) & (row.diff() == 0)
        embeddings = validated(
            embeddings,
            (begins_run | (token >= count))[1:].logical_or(is_next).all(),
            lambda: (
                "input_ids: the tokens of an image or video are not adjacent; expected runs of "
                f"{[tokens for number, tokens in runs.tolist() for _ in range(number)]} tokens, in this order"
            ),
        )
    tokens, embeddings = x.flatten(0, 1), embeddings.to(x.dtype)
    if is_valid is not None:
        embeddings = embeddings.where((token < count)[:, None], tokens[index])
    return tokens.index_copy(0, index, embeddings).view_as(x)


class Grids(NamedTuple):
    """All images of a batch, or all its videos, as grids of tokens.

    Attributes:
        mask: (B, T) bool, True for their tokens.
        sizes: (n, 3) int, number of frames, rows and columns of tokens of each.
        interval: (n,) or 0-d, increase of the temporal position from frame to frame; the product with the frame index
            is rounded down.
        separate_frames: text separates the frames, which have the positions of images (Qwen3-VL). `interval` is unused.
    """

    mask: Tensor
    sizes: Tensor
    interval: Tensor
    separate_frames: bool = False

    @property
    def runs(self) -> Tensor:
        """(n, 2), see `scatter_embeddings`."""
        t, h, w = self.sizes.long().unbind(1)
        return torch.stack([t, h * w] if self.separate_frames else [t.new_ones(len(t)), t * h * w], 1)


def grid_positions(
    token_positions: Tensor,
    grids: Iterable[Grids],
    segment_start: Tensor | None = None,
    *,
    frames_advance: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes positions on three axes: time, height and width (M-RoPE, Wang et al. 2024, section 2.1).

    Tokens of an image that starts at position p have the coordinates of their frame, row and column, plus p. The tokens
    after it continue at p + max(h, w) on all axes. So each image skips t * h * w - max(h, w) positions.

    Args:
        token_positions: (B or 1, T) int64, see `Context.token_positions`.
        grids: one for the images, one for the videos.
        segment_start: see `Context`.
        frames_advance: tokens after a video also continue after its last frame.

    Returns:
        The positions, (3, B, T) int64; and the offset of positions of future tokens, (B, 1) int64.
    """
    positions, skipped = token_positions.expand(3, -1, -1), torch.zeros_like(token_positions)
    for mask, sizes, interval, separate_frames in grids:
        t, h, w = sizes.to(token_positions.device, torch.int64).unbind(1)
        interval = interval.to(token_positions.device).expand_as(t)
        tokens = t * h * w
        ends = tokens.cumsum(0)
        count = (mask.flatten().cumsum(0) - 1).view(mask.shape)  # masked tokens before each masked token
        image = torch.searchsorted(ends, count, right=True).clamp(max=len(tokens) - 1)
        token = count - (ends - tokens)[image]
        if separate_frames:
            t, tokens = torch.ones_like(t), h * w
            token = token % tokens[image]
        h_, w_ = h[image], w[image]
        time = (token // (h_ * w_) * interval[image]).long()
        coordinates = torch.stack([time, token // w_ % h_, token % w_])
        positions = positions + (coordinates - token) * mask
        advance = torch.maximum(h, w)
        if frames_advance:
            advance = torch.maximum(advance, ((t - 1) * interval).long() + 1)
        is_last = mask & (token == tokens[image] - 1)
        skipped = skipped + (tokens - advance)[image] * is_last
    before = skipped.cumsum(1) - skipped
    if segment_start is not None:
        before = before - before.gather(1, segment_start.expand_as(before))
    return positions - before, -(before + skipped)[:, -1:]


def repeated_items(mask: Tensor, tokens: Tensor, repeats: int) -> list[int]:
    """Returns the indices of images or videos that repeat those of each row: rows a, b become a, a, b, b.

    Args:
        mask: (B, T) bool, the tokens of images or videos.
        tokens: (n,) int, tokens of each image or video, in order of their occurrence in the rows.
        repeats: number of copies of each row.
    """
    ends = mask.sum(1).cumsum(0)
    row_of_item = torch.searchsorted(ends, (tokens.cumsum(0) - tokens).to(ends.device), right=True).tolist()
    items_of_row = [[i for i, row in enumerate(row_of_item) if row == index] for index in range(len(mask))]
    return [item for items in items_of_row for _ in range(repeats) for item in items]
