"""Converter for GLM-4-0414 checkpoints.

config.json is that of GLM-4. Checkpoints store the gate and up projections as one tensor.
"""

from ligerzoo.convert import glm
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.layout import Layout
from ligerzoo.models.glm4 import Glm4, Glm4Config

ARCHITECTURE = Architecture(
    "glm4",
    "Glm4ForCausalLM",
    Glm4,
    Glm4Config,
    read_rope=glm.read_rope,
    layouts=(Layout((glm.GATE_UP,)),),
)
