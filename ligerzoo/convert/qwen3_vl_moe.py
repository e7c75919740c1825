"""Converter for Qwen3-VL-MoE checkpoints, which have the format of Qwen3-VL.

The matrices of all experts of a layer are one tensor: on the hub transposed, for products x @ W, and in files of
transformers 5 as in our parameters. The names are the same, but the shapes differ: if 2I = H, the down projections',
and if I = H, the gate and up projections' (I features of an expert, H hidden features).
"""

from dataclasses import replace

from ligerzoo.convert.layout import Transposed
from ligerzoo.convert.qwen3_vl import LAYOUT, qwen3_vision

_TRANSPOSED = (Transposed("mlp.experts.gate_up_proj"), Transposed("mlp.experts.down_proj"))

ARCHITECTURE = qwen3_vision(
    "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", replace(LAYOUT, rules=(*_TRANSPOSED, *LAYOUT.rules))
)
