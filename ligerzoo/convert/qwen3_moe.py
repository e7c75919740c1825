"""Converter for Qwen3-MoE checkpoints, whose tensors are stored as in Qwen2-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ligerzoo.convert.fields import first_given, switched_window
from ligerzoo.convert.qwen2_moe import ARCHITECTURE as QWEN2_MOE


def _read_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`num_local_experts`, written by transformers 5, takes precedence over `num_experts`."""
    return {**raw, **switched_window(raw), "num_experts": first_given(raw, "num_local_experts", "num_experts")}


ARCHITECTURE = replace(
    QWEN2_MOE,
    model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    read_entries=_read_entries,
    quantized_formats=frozenset({"fp8"}),
)
