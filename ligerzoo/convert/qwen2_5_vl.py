"""Converter for Qwen2.5-VL checkpoints, which have the format of Qwen2-VL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.qwen2_vl import LAYOUTS, PREFIXES, vision_lm_config, vision_lm_entries
from ligerzoo.models.qwen2_5_vl import Qwen2_5VL, Qwen2_5VLConfig, Qwen2_5VLVisionConfig


def config_from_hf(raw: Mapping[str, Any]) -> Qwen2_5VLConfig:
    """Builds the config from config.json. Missing entries take the defaults of transformers' two configs."""
    return vision_lm_config(raw, Qwen2_5VLConfig, Qwen2_5VLVisionConfig, ("silu", "swish"))


def config_to_hf(config: Qwen2_5VLConfig) -> dict[str, Any]:
    """Returns the entries of config.json; see `vision_lm_entries`."""
    return vision_lm_entries(config, "silu")


ARCHITECTURE = Architecture(
    model_type="qwen2_5_vl",
    hf_class="Qwen2_5_VLForConditionalGeneration",
    model_class=Qwen2_5VL,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=LAYOUTS,
    prefixes=PREFIXES,
)
