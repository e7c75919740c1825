"""Converter for Qwen3.5 checkpoints, and the parts that its MoE models share.

config.json and the tensors of the vision tower are as in Qwen3-VL, without DeepStack; the decoder is that of
`qwen3_5_text`. The head for multi-token prediction (`mtp`) is not part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import object_entry, partial_rotary_factor, refuse
from ligerzoo.convert.qwen3_5_text import ACCEPTED, is_prediction_head, keeps_fp32
from ligerzoo.convert.qwen3_vl import LAYOUT, read_interleaved_rope, vision_lm
from ligerzoo.models.hybrid import GatedDeltaConfig
from ligerzoo.models.qwen3_5 import Qwen3_5, Qwen3_5Config


def _read_entries(raw: Mapping[str, Any], *, architecture: Architecture) -> dict[str, Any]:
    """Returns the entries of all levels of config.json under the names of our fields."""
    entries = dict(architecture.read_entries(raw))
    refuse(entries["vision_config"], "deepstack_visual_indexes", unless=(None, []))
    window = object_entry(raw, "text_config").get("sliding_window")  # which Qwen3-VL ignores
    return {**entries, "sliding_window": window}


def _read_rope(raw: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """Reads `rope_theta`, `rope_scaling`, `mrope_section` and `partial_rotary_factor` from either spelling."""
    factor = partial_rotary_factor(raw, GatedDeltaConfig.partial_rotary_factor)
    return {**read_interleaved_rope(raw, default_theta), "partial_rotary_factor": factor}


def hybrid_vision_lm(architecture: Architecture, accepted: Mapping[str, tuple[object, ...]]) -> Architecture:
    """Returns an architecture of Qwen3-VL's format with the decoder of Qwen3.5.

    Args:
        architecture: the architecture, see `ligerzoo.convert.qwen3_vl.vision_lm`.
        accepted: entries of the decoder that have no field, with their accepted values.
    """
    return replace(
        architecture,
        accepted=accepted,
        read_entries=partial(_read_entries, architecture=architecture),
        read_rope=_read_rope,
        is_extra_tensor=is_prediction_head,
        keeps_fp32=keeps_fp32,
    )


ARCHITECTURE = hybrid_vision_lm(
    vision_lm("qwen3_5", "Qwen3_5ForConditionalGeneration", Qwen3_5, Qwen3_5Config, (LAYOUT,)), ACCEPTED
)
