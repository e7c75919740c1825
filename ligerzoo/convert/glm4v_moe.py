"""Converter for GLM-4.5V checkpoints: the tower of GLM-4.1V's, and the decoder of GLM-4.5's."""

from ligerzoo.convert.families import FAMILIES, PER_EXPERT
from ligerzoo.convert.glm4v import glm4_vision

ARCHITECTURE = glm4_vision(
    "glm4v_moe",
    "Glm4vMoeForConditionalGeneration",
    FAMILIES["glm4_moe"],
    {"use_qk_norm": (False,)},
    PER_EXPERT,
    (),
)
