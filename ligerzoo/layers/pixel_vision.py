"""Vision tower for images of any size, padded to one size, and a merger of their patches row by row (Pixtral).

Shapes: n images of C channels, padded at the right and the bottom to S_h x S_w pixels; P side of a patch in pixels; N
patches of all images, without padding; m x m patches become one token; M tokens of all images; E features of the tower,
H features of the decoder. Under torch.compile, which cannot know N and M, results have more rows: those after the
first N or M mean nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.activation import Activation, check_activation
from ligerzoo.layers.decoder import BlockStack, run_blocks
from ligerzoo.layers.linear import Linear
from ligerzoo.layers.projection import activate_and_project
from ligerzoo.layers.vision import PatchEmbedding, PatchSegments, image_of_patch, patch_positions, validated


class PixelVisionTower(nn.Module):
    """Images to patch features; patches attend to all patches of their image.

    Args:
        patch_conv: patches to features.
        ln_pre: norm before the blocks.
        transformer: the blocks.
        depth: number of blocks that run. Those after them have no effect.
    """

    def __init__(self, patch_conv: PatchEmbedding, ln_pre: nn.Module, transformer: BlockStack, *, depth: int) -> None:
        super().__init__()
        self.patch_conv, self.ln_pre, self.transformer, self.depth = patch_conv, ln_pre, transformer, depth

    def forward(self, pixel_values: Tensor, sizes: Tensor) -> Tensor:
        """pixel_values: (n, C, S_h, S_w), any floating dtype -> (N, E), row by row of each image.

        Args:
            pixel_values: see `checked`.
            sizes: (n, 2) int64, rows and columns of patches of each image; see `checked`.
        """
        channels, side = self.patch_conv.weight.shape[1:3]
        patches = pixel_values.unfold(2, side, side).unfold(3, side, side)  # (n, C, rows, columns, P, P)
        rows, columns = patches.shape[2:4]
        count = len(patches) * rows * columns if torch.compiler.is_compiling() else int(sizes.prod(1).sum())
        grid = F.pad(sizes, (1, 0), value=1)
        is_first, positions = patch_positions(grid, count, 1)
        source = (image_of_patch(grid, count) * rows + positions[0]) * columns + positions[1]
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, channels * side**2)[source.to(patches.device)]

        images = PatchSegments(is_first, positions, patches.device)
        x, checkpoints = self.ln_pre(self.patch_conv(patches)), self.transformer.gradient_checkpointing
        layers = self.transformer.layers[: self.depth]
        return run_blocks(layers, images.batch(x), images.context, checkpoints=checkpoints).flatten(0, 1)

    def checked(self, pixel_values: Tensor, image_sizes: Tensor, merge_size: int) -> tuple[Tensor, Tensor]:
        """Checks images. Returns them, see `validated`, and the rows and columns of their patches, (n, 2) int64.

        The latter are on the CPU, except under torch.compile. Pixels beyond the largest multiple of P are ignored.

        Args:
            pixel_values: (n, C, S_h, S_w).
            image_sizes: (n, 2) int, height and width of each image in pixels; on the CPU to avoid a host sync.
            merge_size: m, the least rows and columns.

        Raises:
            ValueError: a shape is wrong, or an image is smaller than a token or larger than its pixels.
        """
        channels, side = self.patch_conv.weight.shape[1:3]
        shapes = tuple(pixel_values.shape), tuple(image_sizes.shape)
        if pixel_values.ndim != 4 or shapes != ((len(pixel_values), channels, *shapes[0][2:]), (len(pixel_values), 2)):
            what, expected = "pixel_values and image_sizes do not match", f"(n, {channels}, height, width) and (n, 2)"
            raise LigerzooError(what, where="images", got=f"{shapes[0]} and {shapes[1]}", expected=expected)
        given = image_sizes.to(pixel_values.device if torch.compiler.is_compiling() else "cpu", torch.int64)
        least, largest = merge_size * side, given.new_tensor(shapes[0][2:])
        sizes = given.clamp(min=least).minimum(largest)
        expected = f"height and width of each image, at least {least} and at most {shapes[0][2:]}"
        message = f"image_sizes: got {{}}; expected {expected}"
        return validated(pixel_values, (sizes == given).all(), lambda: message.format(given.tolist())), sizes // side


class RasterPatchMerger(nn.Module):
    """Merges squares of m x m patches into one, by a linear layer (Mistral Small 3.1).

    The features of a square are ordered by feature, then by patch. Patches beyond the last whole square are ignored.

    Args:
        embed_dim: E.
        merge_size: m.
    """

    def __init__(
        self,
        embed_dim: int,
        merge_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.merge_size = merge_size
        self.merging_layer = Linear(embed_dim * merge_size**2, embed_dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """x: (N, E) -> (M, E), row by row of each image; `sizes` as in `PixelVisionTower`."""
        m, tokens = self.merge_size, F.pad(sizes // self.merge_size, (1, 0), value=1)
        count = len(x) // m**2 if torch.compiler.is_compiling() else int(tokens.prod(1).sum())
        image, (row, column) = image_of_patch(tokens, count), patch_positions(tokens, count, 1)[1]
        before, columns = sizes.prod(1).cumsum(0) - sizes.prod(1), sizes[:, 1]
        inner = torch.arange(m, device=sizes.device)
        first = before[image] + m * (row * columns[image] + column)
        index = first[:, None, None] + inner[:, None] * columns[image][:, None, None] + inner  # (M, m, m)
        squares = x[index.flatten(1).to(x.device)]
        return self.merging_layer(squares.transpose(1, 2).flatten(1))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"merge_size={self.merge_size}"


class MergingProjector(nn.Module):
    """Patch features to embeddings for a decoder: `linear_2(activation(linear_1(merge(norm(x)))))`.

    Args:
        norm: norm of E features.
        patch_merger: merges the patches of a token.
        embed_dim: E.
        hidden_size: H.
        activation: a name of `ligerzoo.kernels.activation.ACTIVATIONS`.
        bias: add biases to the two linear layers.
    """

    def __init__(
        self,
        norm: nn.Module,
        patch_merger: RasterPatchMerger,
        embed_dim: int,
        hidden_size: int,
        *,
        activation: Activation = "gelu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm, self.patch_merger = norm, patch_merger
        self.linear_1 = Linear(embed_dim, hidden_size, bias=bias, device=device, dtype=dtype)
        self.linear_2 = Linear(hidden_size, hidden_size, bias=bias, device=device, dtype=dtype)
        self.activation: Activation = check_activation(activation)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """x: (N, E) -> (M, H), row by row of each image; `sizes` as in `PixelVisionTower`."""
        x = self.linear_1(self.patch_merger(self.norm(x), sizes))
        return activate_and_project(x, self.activation, self.linear_2)
