"""Converter for GLM-4 checkpoints, which store the gate and up projections as one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import partial_rotary_factor, rope_fields
from ligerzoo.convert.layout import Fused, Layout
from ligerzoo.models.glm import Glm, GlmConfig

GATE_UP = Fused("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))


def read_rope(raw: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """Reads `rope_theta`, `rope_scaling` and `partial_rotary_factor` from either spelling."""
    partial = partial_rotary_factor(raw, GlmConfig.partial_rotary_factor)
    return {**rope_fields(raw, default_theta), "partial_rotary_factor": partial}


ARCHITECTURE = Architecture("glm", "GlmForCausalLM", Glm, GlmConfig, read_rope=read_rope, layouts=(Layout((GATE_UP,)),))
