"""Layers to compose transformers from. Constructors take plain numbers and modules, never a config.

docs/catalogue.md has an example of each layer, docs/composing.md says how they fit together, and docs/recipes.md how to
write your own. `help(ligerzoo.layers.Attention)` lists the arguments of one.

Attention
    Attention                             attention with grouped queries
    SinkAttention                         attention with sinks
    GatedAttention                        attention with an output gate
    GateProjectionAttention               an output gate with its own projection
    SharingAttention                      norms of values, and sharing of keys and values
    TiedValueAttention                    keys as values
    SharedKeysAttention                   attention to the keys and values of an earlier layer
    HalvesRotaryAttention                 halves of heads that rotate by column and row
    AllHeadsRMSNorm                       norms of queries and keys over all heads
    RotaryNormAttention                   norms of queries and keys after rotation
    LatentAttention                       latent attention (MLA)
    GatedDeltaNet                         linear attention (gated delta rule)
    SeparateDeltaNet                      linear attention with separate projections
    KimiDeltaAttention                    linear attention with a decay per channel (KDA)
    Mamba2Mixer                           a state-space model (Mamba-2)
    Mamba2Scales                          constant factors of Mamba-2's parts
    CausalConv1d                          a short causal convolution
    ShortConv                             a gated short convolution in place of attention
    CrossAttention                        cross-attention
    CrossAttentionInputs                  what cross-attention attends to
    attend                                attention as a function

Positions
    RotaryEmbedding                       rotary embedding (RoPE)
    ReversedRotaryEmbedding               rotation by negative angles
    SectionedRotaryEmbedding              positions in time, height and width (M-RoPE)
    InterleavedSectionedRotaryEmbedding   interleaved M-RoPE
    AxialRotaryEmbedding                  positions in rows and columns
    AlternatingRotaryEmbedding            rows and columns that alternate from frequency to frequency
    sectioned                             sections of angles
    interleaved                           interleaved sections of angles

Norms
    RMSNorm                               RMSNorm
    GatedRMSNorm                          RMSNorm with an output gate
    LayerNorm                             LayerNorm, with or without a bias

MLPs and activations
    GatedMLP                              an MLP with a gate (SwiGLU)
    MLP                                   an MLP without a gate
    ScaledGatedMLP                        a gate and an output times constants
    UngatedMLP                            squared ReLU
    XIELU                                 a trainable activation

Mixtures of experts
    MoE                                   a mixture of experts
    Experts                               the experts
    Router                                a softmax router
    SigmoidRouter                         a router without softmax (sigmoid, balancing bias)
    LogitRouter                           a router that selects by logits
    ScaledRouter                          a softmax router of normalized tokens, with factors
    BiasedRouter                          a softmax router with a balancing bias
    GroupedRouter                         a softmax router within groups of experts
    DeepSeekMoE                           shared experts
    ScaledInputMoE                        router weights on the experts' inputs
    LatentMoE                             experts in a latent space
    SharedExpertMoE                       a shared expert with a gate
    load_balancing_loss                   a load-balancing loss

Blocks
    PreNormBlock                          norms before the branches (pre-norm)
    PostNormBlock                         norms after the branches (OLMo 2)
    ResidualNormBlock                     norms of the residual sums (BERT)
    SandwichBlock                         norms before and after (sandwich)
    ScaledSandwichBlock                   a sandwich times a number
    ParallelMixture                       a mixture of experts parallel to the MLP of a block
    LayerInput                            a further input of a block
    ScaledPreNormBlock                    branches times a constant (muP)
    GatedPreNormBlock                     branches times a learned gate
    LinearAttentionBlock                  a block of linear attention
    ConvBlock                             a block with a short convolution
    ConvSandwichBlock                     a block with a short convolution, norms before and after
    MambaBlock                            a block with a state-space model
    ScaledMambaBlock                      a state-space model, branches times a constant
    ParallelMambaBlock                    attention and a state-space model in parallel
    MixerBlock                            a block of attention alone
    MambaMixerBlock                       a block of a state-space model alone
    MLPBlock                              a block of an MLP alone
    CrossAttentionBlock                   a block of cross-attention

Embeddings, decoder and head
    Embedding                             embeddings of tokens
    ScaledEmbedding                       embeddings times a constant (Gemma)
    NormalizedEmbedding                   embeddings with a norm
    Linear                                a linear layer
    Decoder                               a whole decoder
    AbsolutePositionDecoder               a decoder with learned positions and token types
    PerLayerDecoder                       a decoder with per-layer embeddings
    PerLayerInputs                        the inputs of its blocks
    BlockStack                            blocks alone
    LMHead                                the head, with a loss that never holds all logits
    shifted_labels                        the targets of labels

Embeddings of texts
    Pooling                               one vector of the hidden states of each text
    Dense                                 a projection of such vectors
    Normalize                             vectors of length 1

Masks, packed rows and outputs
    Context                               padding, positions and packed rows
    Mask                                  a mask of intervals
    TileMask                              a mask of tiles
    LayerOutputs                          attention probabilities, router logits, hidden states

Caches
    KVCache                               the cache of a decoder
    LayerCache                            what every cache of a layer has
    TokenCache                            a cache that grows
    RollingLayerCache                     a cache of a sliding window
    CachePair                             the caches of attention and a recurrent layer in one block
    StaticLayerCache                      a cache of fixed size
    CrossAttentionLayerCache              a cache of image states
    RecurrentLayerCache                   a cache of the states of linear attention
    StaticRecurrentLayerCache             a cache of such states of fixed size

Images
    PatchEmbedding                        patches of any images
    ImageEmbedding                        images of one size
    ImageTower                            a vision tower for images of one size
    PoolingProjector                      the mean of squares of patches
    PatchMerger                           one embedding of several patches
    MergerMLP                             the same as one MLP
    VisionTower                           a vision tower for images and videos of any size
    WindowedVisionTower                   a vision tower with windows
    RasterVisionTower                     a vision tower of patches row by row
    PositionedPatchEmbedding              patches with learned positions
    PixelVisionTower                      a vision tower for padded images
    RasterPatchMerger                     a merger of patches row by row
    MergingProjector                      a merger and a projection
    DownsamplingVisionTower               a vision tower with a convolution that merges patches
    ProjectedGatedMLP                     an MLP with a gate after a projection and a norm
    PaddedVisionTower                     a vision tower for padded rows of patches
    AxialPatchEmbedding                   patches with learned columns and rows
    PatchProjector                        patches without a tower
    NormedProjection                      from a tower to a decoder
    ClippedLinear                         a linear layer that clips
    with_clipped_linears                  a layer of such linear layers
    DeepStackVisionTower                  a vision tower with features of inner blocks (DeepStack)
    DeepStack                             features that are added between blocks
    ResampledPositionEmbedding            learned positions for images of any size
    BicubicPositionEmbedding              learned positions for images of any size, bicubic
    TileEmbedding                         embeddings of tiles
    TilePositionEmbedding                 positions within tiles
    TiledVisionTower                      a vision tower for images in tiles
    tile_cross_attention_inputs           which tiles a token attends to
    scatter_embeddings                    embeddings in the positions of image tokens
    masked_index                          indices of image tokens
    Grids                                 images as grids of tokens
    grid_positions                        positions of images in a text (M-RoPE)
    repeated_items                        images of repeated rows

All layers
    set_backend                           a backend for all layers
"""

from typing import TYPE_CHECKING

from ligerzoo.exports import renamed
from ligerzoo.layers.absolute_positions import AbsolutePositionDecoder
from ligerzoo.layers.attention import (
    Attention,
    GatedAttention,
    GateProjectionAttention,
    RotaryNormAttention,
    SinkAttention,
)
from ligerzoo.layers.attention_paths import attend
from ligerzoo.layers.backend import set_backend
from ligerzoo.layers.balanced_routers import BiasedRouter, LogitRouter, SigmoidRouter
from ligerzoo.layers.block import (
    ConvBlock,
    ConvSandwichBlock,
    GatedPreNormBlock,
    LinearAttentionBlock,
    MambaBlock,
    MambaMixerBlock,
    MixerBlock,
    MLPBlock,
    ParallelMambaBlock,
    PostNormBlock,
    PreNormBlock,
    ResidualNormBlock,
    SandwichBlock,
    ScaledMambaBlock,
    ScaledPreNormBlock,
)
from ligerzoo.layers.cache import CachePair, CrossAttentionLayerCache, LayerCache, RollingLayerCache, TokenCache
from ligerzoo.layers.context import Context, shifted_labels
from ligerzoo.layers.cross_attention import (
    CrossAttention,
    CrossAttentionBlock,
    CrossAttentionInputs,
    tile_cross_attention_inputs,
)
from ligerzoo.layers.decoder import BlockStack, Decoder
from ligerzoo.layers.deepstack import DeepStack, DeepStackVisionTower, MergerMLP, ResampledPositionEmbedding
from ligerzoo.layers.delta_net import GatedDeltaNet, SeparateDeltaNet
from ligerzoo.layers.downsampling_vision import BicubicPositionEmbedding, DownsamplingVisionTower, ProjectedGatedMLP
from ligerzoo.layers.embedding import Embedding, NormalizedEmbedding, ScaledEmbedding
from ligerzoo.layers.head import LMHead
from ligerzoo.layers.image_tower import ImageEmbedding, ImageTower, PoolingProjector
from ligerzoo.layers.kimi_delta_attention import KimiDeltaAttention
from ligerzoo.layers.kv_cache import KVCache
from ligerzoo.layers.latent_attention import LatentAttention
from ligerzoo.layers.layer_outputs import LayerOutputs
from ligerzoo.layers.linear import Linear
from ligerzoo.layers.mamba2 import Mamba2Mixer, Mamba2Scales
from ligerzoo.layers.masks import Mask, TileMask
from ligerzoo.layers.mlp import MLP, GatedMLP, ScaledGatedMLP, UngatedMLP
from ligerzoo.layers.moe import (
    DeepSeekMoE,
    Experts,
    LatentMoE,
    MoE,
    ScaledInputMoE,
    SharedExpertMoE,
    load_balancing_loss,
)
from ligerzoo.layers.norm import AllHeadsRMSNorm, GatedRMSNorm, LayerNorm, RMSNorm
from ligerzoo.layers.padded_vision import (
    AxialPatchEmbedding,
    ClippedLinear,
    HalvesRotaryAttention,
    NormedProjection,
    PaddedVisionTower,
    PatchProjector,
    with_clipped_linears,
)
from ligerzoo.layers.per_layer_inputs import (
    LayerInput,
    ParallelMixture,
    PerLayerDecoder,
    PerLayerInputs,
    ScaledSandwichBlock,
)
from ligerzoo.layers.pixel_vision import MergingProjector, PixelVisionTower, RasterPatchMerger
from ligerzoo.layers.pooling import Dense, Normalize, Pooling
from ligerzoo.layers.raster_vision import PositionedPatchEmbedding, RasterVisionTower
from ligerzoo.layers.rotary import (
    AlternatingRotaryEmbedding,
    AxialRotaryEmbedding,
    InterleavedSectionedRotaryEmbedding,
    ReversedRotaryEmbedding,
    RotaryEmbedding,
    SectionedRotaryEmbedding,
    interleaved,
    sectioned,
)
from ligerzoo.layers.routers import GroupedRouter, Router, ScaledRouter
from ligerzoo.layers.shared_attention import SharedKeysAttention, SharingAttention, TiedValueAttention
from ligerzoo.layers.short_conv import CausalConv1d, ShortConv
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
    "AbsolutePositionDecoder",
    "AllHeadsRMSNorm",
    "AlternatingRotaryEmbedding",
    "Attention",
    "AxialPatchEmbedding",
    "AxialRotaryEmbedding",
    "BiasedRouter",
    "BicubicPositionEmbedding",
    "BlockStack",
    "CachePair",
    "CausalConv1d",
    "ClippedLinear",
    "Context",
    "ConvBlock",
    "ConvSandwichBlock",
    "CrossAttention",
    "CrossAttentionBlock",
    "CrossAttentionInputs",
    "CrossAttentionLayerCache",
    "Decoder",
    "DeepSeekMoE",
    "DeepStack",
    "DeepStackVisionTower",
    "Dense",
    "DownsamplingVisionTower",
    "Embedding",
    "Experts",
    "GateProjectionAttention",
    "GatedAttention",
    "GatedDeltaNet",
    "GatedMLP",
    "GatedPreNormBlock",
    "GatedRMSNorm",
    "Grids",
    "GroupedRouter",
    "HalvesRotaryAttention",
    "ImageEmbedding",
    "ImageTower",
    "InterleavedSectionedRotaryEmbedding",
    "KVCache",
    "KimiDeltaAttention",
    "LMHead",
    "LatentAttention",
    "LatentMoE",
    "LayerCache",
    "LayerInput",
    "LayerNorm",
    "LayerOutputs",
    "Linear",
    "LinearAttentionBlock",
    "LogitRouter",
    "MLPBlock",
    "Mamba2Mixer",
    "Mamba2Scales",
    "MambaBlock",
    "MambaMixerBlock",
    "Mask",
    "MergerMLP",
    "MergingProjector",
    "MixerBlock",
    "MoE",
    "Normalize",
    "NormalizedEmbedding",
    "NormedProjection",
    "PaddedVisionTower",
    "ParallelMambaBlock",
    "ParallelMixture",
    "PatchEmbedding",
    "PatchMerger",
    "PatchProjector",
    "PerLayerDecoder",
    "PerLayerInputs",
    "PixelVisionTower",
    "Pooling",
    "PoolingProjector",
    "PositionedPatchEmbedding",
    "PostNormBlock",
    "PreNormBlock",
    "ProjectedGatedMLP",
    "RMSNorm",
    "RasterPatchMerger",
    "RasterVisionTower",
    "RecurrentLayerCache",
    "ResampledPositionEmbedding",
    "ResidualNormBlock",
    "ReversedRotaryEmbedding",
    "RollingLayerCache",
    "RotaryEmbedding",
    "RotaryNormAttention",
    "Router",
    "SandwichBlock",
    "ScaledEmbedding",
    "ScaledGatedMLP",
    "ScaledInputMoE",
    "ScaledMambaBlock",
    "ScaledPreNormBlock",
    "ScaledRouter",
    "ScaledSandwichBlock",
    "SectionedRotaryEmbedding",
    "SeparateDeltaNet",
    "SharedExpertMoE",
    "SharedKeysAttention",
    "SharingAttention",
    "ShortConv",
    "SigmoidRouter",
    "SinkAttention",
    "StaticLayerCache",
    "StaticRecurrentLayerCache",
    "TiedValueAttention",
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
    "with_clipped_linears",
]

if not TYPE_CHECKING:  # a type checker reports a missing name itself
    __getattr__ = renamed(__name__)
