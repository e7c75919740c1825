"""Converter for Qwen3.5 checkpoints with MoE.

The matrices of all experts of a layer are one tensor, as on the hub, or one tensor each, as transformers 5 saves them.
Otherwise as `qwen3_5`.
"""

from dataclasses import replace

from ligerzoo.convert.families import PER_EXPERT
from ligerzoo.convert.qwen3_5 import hybrid_vision
from ligerzoo.convert.qwen3_5_moe_text import ARCHITECTURE as TEXT
from ligerzoo.convert.qwen3_vl import LAYOUT

ARCHITECTURE = hybrid_vision(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    TEXT.accepted,
    replace(LAYOUT, rules=(*PER_EXPERT, *LAYOUT.rules)),
)
