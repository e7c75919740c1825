"""Layers to compose transformers from. Constructors take plain numbers and modules, never a config."""

from ligerzoo.layers.attention import Attention, GatedAttention, RotaryNormAttention, SinkAttention
from ligerzoo.layers.attention_paths import attend
from ligerzoo.layers.backend import set_backend
from ligerzoo.layers.block import (
    GatedPreNormBlock,
    LinearAttentionBlock,
    PostNormBlock,
    PreNormBlock,
    SandwichBlock,
    ScaledPreNormBlock,
)
from ligerzoo.layers.cache import CrossAttentionLayerCache, LayerCache, RollingLayerCache, TokenCache
from ligerzoo.layers.context import Context, LayerOutputs, shifted_labels
from ligerzoo.layers.cross_attention import (
    CrossAttention,
    CrossAttentionBlock,
    CrossAttentionInputs,
    tile_cross_attention_inputs,
)
from ligerzoo.layers.decoder import BlockStack, Decoder
from ligerzoo.layers.deepstack import DeepStack, DeepStackVisionTower, MergerMLP, ResampledPositionEmbedding
from ligerzoo.layers.delta_net import CausalConv1d, GatedDeltaNet, GatedRMSNorm
from ligerzoo.layers.embedding import Embedding, ScaledEmbedding
from ligerzoo.layers.head import LMHead
from ligerzoo.layers.image_tower import ImageEmbedding, ImageTower, PoolingProjector
from ligerzoo.layers.kv_cache import KVCache
from ligerzoo.layers.latent_attention import LatentAttention
from ligerzoo.layers.linear import Linear
from ligerzoo.layers.masks import Mask, TileMask
from ligerzoo.layers.mlp import MLP, GatedMLP, UngatedMLP
from ligerzoo.layers.moe import DeepSeekMoE, Experts, MoE, SharedExpertMoE, load_balancing_loss
from ligerzoo.layers.norm import AllHeadsRMSNorm, LayerNorm, RMSNorm
from ligerzoo.layers.rotary import (
    AxialRotaryEmbedding,
    InterleavedSectionedRotaryEmbedding,
    ReversedRotaryEmbedding,
    RotaryEmbedding,
    SectionedRotaryEmbedding,
    interleaved,
    sectioned,
)
from ligerzoo.layers.routers import BiasedRouter, GroupedRouter, LogitRouter, Router, SigmoidRouter
from ligerzoo.layers.state_cache import RecurrentLayerCache, StaticRecurrentLayerCache
from ligerzoo.layers.static_cache import StaticLayerCache
from ligerzoo.layers.tiles import TiledVisionTower, TileEmbedding, TilePositionEmbedding
from ligerzoo.layers.vision import (
    Grids,
    PatchEmbedding,
    PatchMerger,
    VisionTower,
    WindowedVisionTower,
    grid_positions,
    masked_index,
    repeated_items,
    scatter_embeddings,
)
from ligerzoo.layers.xielu import XIELU

__all__ = [
    "MLP",
    "XIELU",
    "AllHeadsRMSNorm",
    "Attention",
    "AxialRotaryEmbedding",
    "BiasedRouter",
    "BlockStack",
    "CausalConv1d",
    "Context",
    "CrossAttention",
    "CrossAttentionBlock",
    "CrossAttentionInputs",
    "CrossAttentionLayerCache",
    "Decoder",
    "DeepSeekMoE",
    "DeepStack",
    "DeepStackVisionTower",
    "Embedding",
    "Experts",
    "GatedAttention",
    "GatedDeltaNet",
    "GatedMLP",
    "GatedPreNormBlock",
    "GatedRMSNorm",
    "Grids",
    "GroupedRouter",
    "ImageEmbedding",
    "ImageTower",
    "InterleavedSectionedRotaryEmbedding",
    "KVCache",
    "LMHead",
    "LatentAttention",
    "LayerCache",
    "LayerNorm",
    "LayerOutputs",
    "Linear",
    "LinearAttentionBlock",
    "LogitRouter",
    "Mask",
    "MergerMLP",
    "MoE",
    "PatchEmbedding",
    "PatchMerger",
    "PoolingProjector",
    "PostNormBlock",
    "PreNormBlock",
    "RMSNorm",
    "RecurrentLayerCache",
    "ResampledPositionEmbedding",
    "ReversedRotaryEmbedding",
    "RollingLayerCache",
    "RotaryEmbedding",
    "RotaryNormAttention",
    "Router",
    "SandwichBlock",
    "ScaledEmbedding",
    "ScaledPreNormBlock",
    "SectionedRotaryEmbedding",
    "SharedExpertMoE",
    "SigmoidRouter",
    "SinkAttention",
    "StaticLayerCache",
    "StaticRecurrentLayerCache",
    "TileEmbedding",
    "TileMask",
    "TilePositionEmbedding",
    "TiledVisionTower",
    "TokenCache",
    "UngatedMLP",
    "VisionTower",
    "WindowedVisionTower",
    "attend",
    "grid_positions",
    "interleaved",
    "load_balancing_loss",
    "masked_index",
    "repeated_items",
    "scatter_embeddings",
    "sectioned",
    "set_backend",
    "shifted_labels",
    "tile_cross_attention_inputs",
]
