"""Converter for Qwen3.5 checkpoints with MoE.

The matrices of all experts of a layer are one tensor, as on the hub, or one tensor each, as transformers 5 saves them.
Otherwise as `qwen3_5`.
"""

from ligerzoo.convert.layout import Layout
from ligerzoo.convert.qwen2_moe import LAYOUTS
from ligerzoo.convert.qwen3_5 import hybrid_vision_lm
from ligerzoo.convert.qwen3_5_moe_text import ARCHITECTURE as TEXT
from ligerzoo.convert.qwen3_vl import LAYOUT, vision_lm
from ligerzoo.models.qwen3_5_moe import Qwen3_5Moe, Qwen3_5MoeConfig

_PER_EXPERT, _ = LAYOUTS

ARCHITECTURE = hybrid_vision_lm(
    vision_lm(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        Qwen3_5Moe,
        Qwen3_5MoeConfig,
        (LAYOUT, Layout((*_PER_EXPERT.rules, *LAYOUT.rules))),
    ),
    TEXT.accepted,
)
