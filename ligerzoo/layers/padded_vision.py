"""Images as rows of patches, padded to one length, with the column and row of each patch (Gemma 4).

Shapes: n images, or frames of videos; L patches of an image with padding; D pixels of a patch; E features of the tower;
H features of the decoder; k^2 patches are pooled into one token; S = L / k^2 tokens of an image with padding; P rows of
a table of positions.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.layers.context import Context
from ligerzoo.layers.decoder import BlockStack
from ligerzoo.layers.linear import INIT_STD, Linear, initialize
from ligerzoo.layers.masks import Mask
from ligerzoo.layers.norm import LayerNorm
from ligerzoo.layers.plain import is_unmodified
from ligerzoo.layers.projection import LinearTerms
from ligerzoo.layers.shared_attention import SharingAttention
from ligerzoo.layers.vision import validated

M = TypeVar("M", bound=nn.Module)


class ClippedLinear(nn.Module):
    """A linear layer whose input and output are clipped to ranges, which the checkpoint has.

    Args:
        linear: the layer.
        clips: whether it clips; without ranges it is `linear` under another name.

    Attributes:
        input_min, input_max, output_min, output_max: the ranges, 0-d buffers; initially infinite.
    """

    ranges = ("input_min", "input_max", "output_min", "output_max")
    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, linear: Linear, *, clips: bool) -> None:
        super().__init__()
        self.linear, self.clips = linear, clips
        for name in self.ranges if clips else ():
            self.register_buffer(name, torch.empty((), device=linear.weight.device, dtype=linear.weight.dtype))
        initialize(self, ClippedLinear)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Makes the ranges infinite, whatever `std` is."""
        for name in self.ranges if self.clips else ():
            nn.init.constant_(getattr(self, name), -torch.inf if name.endswith("min") else torch.inf)

    @property
    def in_features(self) -> int:
        """See `torch.nn.Linear`."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """See `torch.nn.Linear`."""
        return self.linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., K) -> (..., N)."""
        if not self.clips:
            return self.linear(x)  # type: ignore[no-any-return]
        return self.linear(x.clamp(self.input_min, self.input_max)).clamp(self.output_min, self.output_max)  # type: ignore[no-any-return]

    def terms(self) -> LinearTerms | None:
        """See `Linear.terms`."""
        return None if self.clips or not is_unmodified(self, ClippedLinear) else self.linear.terms()


def with_clipped_linears(layer: M, *, clips: bool) -> M:
    """Returns an attention or MLP layer in which each linear layer is a `ClippedLinear`."""
    for name, part in list(layer.named_children()):
        if type(part) is Linear:
            setattr(layer, name, ClippedLinear(part, clips=clips))
    return layer


class HalvesRotaryAttention(SharingAttention):
    """`SharingAttention` in which the first half of each head rotates by the column, and the second by the row.

    The arguments are those of `SharingAttention`, with an `AxialRotaryEmbedding` of two axes. Each half pairs its own
    features, i and i + D/4.
    """

    def apply_rotary(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Returns queries (B, T, N, D) and keys (B, T, K, D), rotated and in another order of features."""
        return super().apply_rotary(_paired(q), _paired(k), context)


def _paired(x: Tensor) -> Tensor:
    """Moves the features that rotate together D/2 apart: (..., D) -> (..., D)."""
    halves = x.view(*x.shape[:-1], 2, 2, x.shape[-1] // 4)
    return halves.transpose(-3, -2).flatten(-3)


class AxialPatchEmbedding(nn.Module):
    """Linear map of patches with values from -1 to 1, plus learned embeddings of their column and row.

    Args:
        pixels: D.
        embed_dim: E.
        positions: P.
    """

    def __init__(
        self,
        pixels: int,
        embed_dim: int,
        positions: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_proj = Linear(pixels, embed_dim, bias=False, device=device, dtype=dtype)
        self.position_embedding_table = nn.Parameter(torch.empty(2, positions, embed_dim, device=device, dtype=dtype))
        initialize(self, AxialPatchEmbedding)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the embeddings of positions from N(0, std^2)."""
        nn.init.normal_(self.position_embedding_table, std=std)

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """patches: (n, L, D) with values from 0 to 1; positions: (n, L, 2), see `padded_positions` -> (n, L, E)."""
        x = self.input_proj((2 * (patches - 0.5)).to(self.input_proj.weight.dtype))
        return x + embedded_positions(self.position_embedding_table, positions)  # type: ignore[no-any-return]


class PatchProjector(nn.Module):
    """Projects patches of raw pixels to embeddings for a decoder, without a tower (Gemma 4 12B).

        norm(project(norm(x))) + positions -> norm -> `embedder`

    Args:
        pixels: D.
        embed_dim: E.
        positions: P.
        embedder: E features to H.
    """

    def __init__(
        self,
        pixels: int,
        embed_dim: int,
        positions: int,
        embedder: nn.Module,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.patch_ln1 = LayerNorm(pixels, device=device, dtype=dtype)
        self.patch_dense = Linear(pixels, embed_dim, device=device, dtype=dtype)
        self.patch_ln2 = LayerNorm(embed_dim, device=device, dtype=dtype)
        self.pos_embedding = nn.Parameter(torch.empty(positions, 2, embed_dim, device=device, dtype=dtype))
        self.pos_norm = LayerNorm(embed_dim, device=device, dtype=dtype)
        self.multimodal_embedder = embedder
        initialize(self, PatchProjector)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the embeddings of positions from N(0, std^2)."""
        nn.init.normal_(self.pos_embedding, std=std)

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """patches: (n, L, D), any floating dtype; positions: (n, L, 2), see `padded_positions` -> (n, L, H).

        Raises:
            ValueError: see `padded_positions`.
        """
        table, pixels = self.pos_embedding.transpose(0, 1), self.patch_dense.in_features
        patches, positions = padded_positions(patches, positions, pixels, table.shape[1])
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(patches.to(self.patch_dense.weight.dtype))))
        return self.multimodal_embedder(self.pos_norm(x + embedded_positions(table, positions)))  # type: ignore[no-any-return]


class NormedProjection(nn.Module):
    """A norm and a linear layer (Gemma 4): features of a vision tower to embeddings for a decoder.

    Args:
        norm: norm of E features.
        projection: E features to H.
    """

    def __init__(self, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.embedding_pre_projection_norm, self.embedding_projection = norm, projection

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., E) -> (..., H)."""
        return self.embedding_projection(self.embedding_pre_projection_norm(x))  # type: ignore[no-any-return]


class PaddedVisionTower(nn.Module):
    """Patches to features of pooled patches; patches attend to all patches of their image (Gemma 4).

    A token is the mean of k x k patches, times sqrt(E), and standardized by statistics of the checkpoint, if any.

    Args:
        patch_embedder: patches to features.
        encoder: the blocks.
        pool_size: k.
        standardize: whether the checkpoint has statistics.

    Attributes:
        std_bias, std_scale: (E,), the statistics, which are buffers; initially 0 and 1.
    """

    std_bias: Tensor
    std_scale: Tensor

    def __init__(
        self,
        patch_embedder: AxialPatchEmbedding,
        encoder: BlockStack,
        *,
        pool_size: int,
        standardize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.patch_embedder, self.encoder = patch_embedder, encoder
        self.pool_size, self.standardize = pool_size, standardize
        for name in ("std_bias", "std_scale") if standardize else ():
            statistics = torch.empty(patch_embedder.input_proj.out_features, device=device, dtype=dtype)
            self.register_buffer(name, statistics)
        initialize(self, PaddedVisionTower)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Sets the statistics to those of standardized features, whatever `std` is."""
        if self.standardize:
            nn.init.zeros_(self.std_bias)
            nn.init.ones_(self.std_scale)

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """patches: (n, L, D) with values from 0 to 1; positions: (n, L, 2), see `padded_positions` -> (n, S, E).

        Raises:
            ValueError: see `padded_positions` and `pooling_order`.
        """
        pixels, rows = self.patch_embedder.input_proj.in_features, self.patch_embedder.position_embedding_table.shape[1]
        patches, positions = padded_positions(patches, positions, pixels, rows)
        patches, order = pooling_order(patches, positions, self.pool_size)
        x = self.patch_embedder(patches, positions)
        x, _ = self.encoder(x, Context(x, _mask_of_patches(positions), positions.movedim(-1, 0)))
        if self.pool_size > 1:
            blocks = x.gather(1, order[..., None].expand_as(x)).view(len(x), -1, self.pool_size**2, x.shape[-1])
            x = blocks.mean(2, dtype=accumulation_dtype(x.dtype)).to(x.dtype)
        tokens = x.to(accumulation_dtype(x.dtype)) * x.shape[-1] ** 0.5
        if self.standardize:
            tokens = (tokens - self.std_bias.to(tokens.dtype)) * self.std_scale.to(tokens.dtype)
        return tokens.to(x.dtype)  # type: ignore[no-any-return]


def embedded_positions(table: Tensor, positions: Tensor) -> Tensor:
    """Returns the sum of the embeddings of column and row, 0 for padding; table: (2, P, E) -> (n, L, E).

    Args:
        table: embeddings of columns, and of rows.
        positions: (n, L, 2), see `padded_positions`.
    """
    columns, rows = (
        F.embedding(index.clamp(min=0), part) for index, part in zip(positions.unbind(-1), table, strict=True)
    )
    return (columns + rows).where(positions[..., :1] >= 0, 0.0)


def padded_positions(patches: Tensor, positions: Tensor, pixels: int, largest: int) -> tuple[Tensor, Tensor]:
    """Checks patches and their positions. Returns the patches, and the positions on their device.

    Args:
        patches: (n, L, D).
        positions: (n, L, 2) int, column and row of each patch, -1 for padding, which is last.
        pixels: D.
        largest: P.

    Raises:
        ValueError: a shape or a position is wrong.
    """
    shapes = tuple(patches.shape), tuple(positions.shape)
    if patches.ndim != 3 or shapes != ((*patches.shape[:2], pixels), (*patches.shape[:2], 2)):
        what, got = "patches and their positions do not match", f"{shapes[0]} and {shapes[1]}"
        raise LigerzooError(what, where="images", got=got, expected=f"(images, L, {pixels}) and (images, L, 2)")
    positions = positions.to(patches.device, torch.int64)
    is_padding = positions[..., :1] == -1
    fits = ((positions < largest) & (positions >= 0).where(~is_padding, positions == -1)).all()
    fits = fits & (is_padding[:, 1:] >= is_padding[:, :-1]).all()
    expected = f"columns and rows of patches, from 0 to {largest - 1}, and then -1 twice for each padding patch"
    return validated(patches, fits, lambda: _message("invalid positions of patches", expected)), positions


def pooling_order(patches: Tensor, positions: Tensor, pool_size: int) -> tuple[Tensor, Tensor]:
    """Orders patches by the squares of k x k patches that are pooled, row by row of squares, padding last.

    Returns the patches, checked, and (n, L) int64, the indices of the patches of each image in this order.

    Raises:
        ValueError: L is not a multiple of k^2, or a square lacks patches.
    """
    k, length = pool_size, patches.shape[1]
    expected = f"patches of whole squares of {k} x {k}, and padding to a multiple of {k**2}"
    if length % k**2:
        raise ValueError(_message("patches cannot be pooled", expected))
    is_patch = positions[..., 0] >= 0
    column, row = (positions // k).unbind(-1)
    square = column + (column.amax(1, keepdim=True) + 1) * row
    square, order = square.masked_fill(~is_patch, torch.iinfo(torch.int64).max).sort(dim=1, stable=True)
    index = torch.arange(length, device=square.device)
    fits = (square == index // k**2) | (index >= is_patch.sum(1, keepdim=True))
    return validated(patches, fits.all(), lambda: _message("patches cannot be pooled", expected)), order


def _mask_of_patches(positions: Tensor) -> Mask:
    """Returns the mask with which each patch sees all patches of its image, and no padding, which is last."""
    length = positions.shape[1]
    query = torch.arange(length, device=positions.device)[None].expand(len(positions), -1)
    last = (positions[..., 0] >= 0).sum(1, keepdim=True) - 1
    return Mask(query, torch.zeros_like(query), last.expand_as(query), length)


def _message(what: str, expected: str) -> str:
    return str(LigerzooError(what, where="images", expected=expected))
