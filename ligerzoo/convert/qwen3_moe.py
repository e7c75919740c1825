"""Converter for Qwen3-MoE checkpoints, whose tensors are stored as in Qwen2-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_given, switched_window
from ligerzoo.convert.qwen2_moe import layouts, write_entries


def read_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json under the names of our fields.

    `num_local_experts`, written by transformers 5, takes precedence over `num_experts`.
    """
    return {**raw, **switched_window(raw), "num_experts": first_given(raw, "num_local_experts", "num_experts")}


ARCHITECTURE = Architecture(
    "qwen3_moe",
    read_entries=read_entries,
    write_entries=write_entries,
    layouts=layouts,
    quantized_formats=frozenset({"fp8"}),
)
