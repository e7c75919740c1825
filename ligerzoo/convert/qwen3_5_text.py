"""Converter for dense Qwen3.5 checkpoints, text only. Tensor names match ours.

Checkpoints of vision-language models have the prefix "model.language_model.", and tensors of a vision tower. Those and
the head for multi-token prediction (`mtp`) are not part of the model. Decay rates and norms of linear attention may be
in fp32 in bf16 files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import SILU, Architecture, is_rotary_buffer
from ligerzoo.convert.fields import partial_rotary_factor, rope_fields
from ligerzoo.models.hybrid import GatedDeltaConfig
from ligerzoo.models.qwen3_5_text import Qwen3_5Text, Qwen3_5TextConfig

_KEPT_IN_FP32 = re.compile(r".*\.linear_attn\.(A_log|dt_bias|norm\.weight)")
_MROPE = ("mrope_section", "mrope_interleaved")

ACCEPTED: Mapping[str, tuple[object, ...]] = {
    "attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",), "output_gate_type": SILU, "sliding_window": (),
    "use_sliding_window": (False,),
}  # fmt: skip
"""Entries that transformers ignores: other values would change the numbers."""

PREFIXES = {"model.": ("model.", "model.language_model.", "")}


def read_rope(raw: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """Reads `rope_theta`, `rope_scaling` and `partial_rotary_factor` from either spelling.

    The entries of M-RoPE have no effect on text, whose tokens have equal positions on all axes.
    """
    rope = rope_fields(raw, default_theta)
    if rope["rope_scaling"] is not None:
        rope["rope_scaling"] = {name: value for name, value in rope["rope_scaling"].items() if name not in _MROPE}
    return {**rope, "partial_rotary_factor": partial_rotary_factor(raw, GatedDeltaConfig.partial_rotary_factor)}


def is_extra_tensor(name: str) -> bool:
    """Returns whether a stored tensor is part of the head for multi-token prediction or of the vision tower."""
    return name.startswith("model.visual.") or is_prediction_head(name) or is_rotary_buffer(name)


def is_prediction_head(name: str) -> bool:
    """Returns whether a stored tensor is part of the head for multi-token prediction."""
    return name.startswith("mtp.")


def keeps_fp32(name: str) -> bool:
    """Returns whether a parameter stays in fp32 where files store it so."""
    return _KEPT_IN_FP32.fullmatch(name) is not None


ARCHITECTURE = Architecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    Qwen3_5Text,
    Qwen3_5TextConfig,
    accepted=ACCEPTED,
    read_rope=read_rope,
    prefixes=PREFIXES,
    is_extra_tensor=is_extra_tensor,
    keeps_fp32=keeps_fp32,
    classifier_class="Qwen3_5TextForSequenceClassification",
)
