"""The parts to compose a transformer from: plain numbers in, `nn.Module`s out."""

from ligerzoo.layers.attention import Attention, attend
from ligerzoo.layers.backend import set_backend
from ligerzoo.layers.block import PreNormBlock
from ligerzoo.layers.cache import KVCache, LayerCache
from ligerzoo.layers.decoder import Decoder
from ligerzoo.layers.head import LMHead
from ligerzoo.layers.masks import causal_mask
from ligerzoo.layers.mlp import GatedMLP
from ligerzoo.layers.norm import LayerNorm, RMSNorm
from ligerzoo.layers.rotary import RotaryEmbedding, sectioned

__all__ = [
    "Attention",
    "Decoder",
    "GatedMLP",
    "KVCache",
    "LMHead",
    "LayerCache",
    "LayerNorm",
    "PreNormBlock",
    "RMSNorm",
    "RotaryEmbedding",
    "attend",
    "causal_mask",
    "sectioned",
    "set_backend",
]
