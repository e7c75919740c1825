"""Vision tower for images in tiles of one size; patches attend to all tiles of their image (Llama 3.2 Vision).

An image has 1 to t tiles in one of R arrangements of rows and columns. Arrangements are numbered from 1 to R; 0 means
no image. Images with fewer tiles are padded with zero pixels, and each tile with states up to a multiple of 8. States
of images attend to padding too.

Shapes: n images, t tiles, C channels, P states per tile (the class embedding, then the patches), E features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers.context import Context
from ligerzoo.layers.decoder import BlockStack
from ligerzoo.layers.embedding import Embedding
from ligerzoo.layers.linear import INIT_STD, initialize
from ligerzoo.layers.masks import Mask
from ligerzoo.layers.vision import PatchEmbedding


class TileEmbedding(nn.Module):
    """One learned vector per tile and arrangement, multiplied by the tanh of a learned gate that starts at 0.

    Args:
        arrangements: R.
        tiles: t.
        embed_dim: E.
    """

    def __init__(
        self,
        arrangements: int,
        tiles: int,
        embed_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tiles = tiles
        self.embedding = Embedding(arrangements + 1, tiles * embed_dim, device=device, dtype=dtype)
        self.gate = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        initialize(self, TileEmbedding)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Sets the gate to 0, whatever `std` is."""
        nn.init.zeros_(self.gate)

    def forward(self, arrangement: Tensor) -> Tensor:
        """arrangement: (n,) int -> (n, t, E)."""
        return self.gate.tanh() * self.embedding(arrangement).view(len(arrangement), self.tiles, -1)  # type: ignore[no-any-return]


class TilePositionEmbedding(nn.Module):
    """Learned positions within a tile, and positions that also depend on tile and arrangement.

    Adds `(1 - g) * embedding + g * tile_embedding`, where g is the tanh of a learned gate that starts at 0.

    Args:
        arrangements: R.
        tiles: t.
        length: P.
        embed_dim: E.
    """

    def __init__(
        self,
        arrangements: int,
        tiles: int,
        length: int,
        embed_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(length, embed_dim, device=device, dtype=dtype))
        self.tile_embedding = Embedding(arrangements + 1, tiles * length * embed_dim, device=device, dtype=dtype)
        self.gate = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        initialize(self, TilePositionEmbedding)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the positions within a tile from N(0, std^2) and sets the gate to 0."""
        nn.init.normal_(self.embedding, std=std)
        nn.init.zeros_(self.gate)

    def forward(self, x: Tensor, arrangement: Tensor) -> Tensor:
        """x: (n, t, P, E), arrangement: (n,) int -> (n, t, P, E)."""
        gate = self.gate.tanh()
        x = x + (1 - gate) * self.embedding
        return x + gate * self.tile_embedding(arrangement).view_as(x)  # type: ignore[no-any-return]


class TiledVisionTower(nn.Module):
    """Tiles to patch features: the output of the last block, and of some intermediate blocks (Llama 3.2 Vision).

    Args:
        patch_embedding: patches to features.
        pre_tile_positional_embedding: added to all patches of a tile.
        gated_positional_embedding: added to each state, including the class embedding.
        layernorm_pre: norm before the first blocks.
        transformer: the first blocks.
        layernorm_post: norm after the first blocks.
        post_tile_positional_embedding: added to all states of a tile after that norm.
        global_transformer: the last blocks.
        intermediate_layers: indices of the first blocks, counted from 0, whose outputs are features too.
    """

    MULTIPLE = 8  # each tile is padded to a multiple of 8 states, as in training

    def __init__(
        self,
        patch_embedding: PatchEmbedding,
        pre_tile_positional_embedding: TileEmbedding,
        gated_positional_embedding: TilePositionEmbedding,
        layernorm_pre: nn.Module,
        transformer: BlockStack,
        layernorm_post: nn.Module,
        post_tile_positional_embedding: TileEmbedding,
        global_transformer: BlockStack,
        *,
        intermediate_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.patch_embedding = patch_embedding
        self.pre_tile_positional_embedding = pre_tile_positional_embedding
        self.class_embedding = nn.Parameter(torch.empty_like(gated_positional_embedding.embedding[0]))
        self.gated_positional_embedding = gated_positional_embedding
        self.layernorm_pre = layernorm_pre
        self.transformer = transformer
        self.layernorm_post = layernorm_post
        self.post_tile_positional_embedding = post_tile_positional_embedding
        self.global_transformer = global_transformer
        self.intermediate_layers = intermediate_layers
        initialize(self, TiledVisionTower)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the class embedding from N(0, std^2)."""
        nn.init.normal_(self.class_embedding, std=std)

    @property
    def tile_length(self) -> int:
        """P."""
        return len(self.gated_positional_embedding.embedding)

    def forward(self, tiles: Tensor, arrangement: Tensor, is_tile: Tensor) -> Tensor:
        """tiles: (n, t, C, height, width) -> (n, t * P, E * (1 + intermediate layers)).

        Args:
            tiles: pixels, any floating dtype.
            arrangement: (n,) int, 0 to R.
            is_tile: (n, t), 1 for the tiles of an image, which come first, and 0 for padding; at least one tile.

        Raises:
            ValueError: an image has no tile, or padding before a tile; not checked under torch.compile.
        """
        n, t = tiles.shape[:2]
        patches = _patches(tiles, self.patch_embedding.weight.shape[-1])
        x = self.patch_embedding(patches) + self.pre_tile_positional_embedding(arrangement)[:, :, None]
        x = torch.cat([self.class_embedding.expand(n, t, 1, -1), x], 2)
        x = self.layernorm_pre(self.gated_positional_embedding(x, arrangement))

        length, padding = self.tile_length, -self.tile_length % self.MULTIPLE
        x = F.pad(
            x.flatten(1, 2), (0, 0, 0, t * padding)
        )  # after all tiles; equal to padding each tile, since attention ignores order
        context = Context(x, _tile_padding_mask(is_tile, length, keys=x.shape[1]))
        x, intermediate = self.transformer(x, context, self.intermediate_layers)
        by_tile = self.post_tile_positional_embedding(arrangement)
        by_state = torch.cat([by_tile.repeat_interleave(times, 1) for times in (length, padding)], 1)
        x, _ = self.global_transformer(self.layernorm_post(x) + by_state, context)

        x, *intermediate = (state[:, : t * length] for state in (x, *intermediate))
        return torch.cat([x, torch.stack(intermediate, -1).flatten(2)], -1) if intermediate else x


def _patches(images: Tensor, side: int) -> Tensor:
    """(..., C, height, width) -> (..., height / side * width / side, C * side * side), row by row."""
    *outer, channels, height, width = images.shape
    blocks = images.reshape(*outer, channels, height // side, side, width // side, side)
    return blocks.movedim((-4, -2), (-5, -4)).reshape(*outer, -1, channels * side * side)


def _tile_padding_mask(is_tile: Tensor, length: int, keys: int) -> Mask:
    """Returns the mask in which padding does not attend to padding; all other pairs of states are visible.

    Llama 3.2 Vision was trained with this mask. Padding comes last, so that each state sees the keys up to a last one.
    """
    tiles = is_tile.bool().sum(-1, keepdim=True)
    first = torch.arange(is_tile.shape[1], device=is_tile.device) < tiles.clamp(min=1)
    if not torch.compiler.is_compiling() and not torch.equal(first, is_tile.bool()):
        raise ValueError(f"is_tile: got {is_tile.int().tolist()}; expected rows of at least one 1, then 0")
    state = torch.arange(keys, device=is_tile.device)
    last = torch.where(state < tiles * length, keys - 1, tiles * length - 1)
    return Mask(state[None], torch.zeros_like(last), last, keys)
