"""Qwen3's checkpoints. Tensors on disk have our names; config.json has our field names, but for the rotary
embedding's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields
from ligerzoo.models.qwen3 import Qwen3, Qwen3Config


def config_from_hf(raw: Mapping[str, Any]) -> Qwen3Config:
    """config.json -> Qwen3Config; an absent entry means what it means in transformers' Qwen3Config."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return Qwen3Config(**{**shared_fields(raw, Qwen3Config), **rope_fields(raw)})


def config_to_hf(config: Qwen3Config) -> dict[str, Any]:
    """Qwen3Config -> the entries of config.json, spelled so that transformers 4 and 5 and vLLM read them."""
    return {"hidden_act": "silu", **asdict(config), "head_dim": config.head_size}  # absence means 128, and null nothing


ARCHITECTURE = Architecture(
    model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    model_class=Qwen3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
