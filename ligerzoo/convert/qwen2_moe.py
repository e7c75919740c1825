"""Converter for Qwen2-MoE checkpoints.

Checkpoints store one tensor per expert and projection. Checkpoints that transformers 5 saves in its in-memory layout
have our names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import switched_window
from ligerzoo.convert.layout import Layout, PerExpert
from ligerzoo.models.moe import SparseStepMoEConfig

_EXPERT = "mlp.experts.{expert}"

PER_EXPERT = (
    PerExpert((f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"), "mlp.experts.gate_up_proj"),
    PerExpert((f"{_EXPERT}.down_proj.weight",), "mlp.experts.down_proj"),
)


def expert_layouts(config: object) -> tuple[Layout, ...]:
    """Returns the layouts of experts: stored one by one, or stacked under our names."""
    return Layout(PER_EXPERT), Layout()


def _read_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**raw, **switched_window(raw)}


def _write_entries(config: SparseStepMoEConfig, entries: dict[str, Any]) -> dict[str, Any]:
    return {**entries, "use_sliding_window": config.sliding_window is not None}


ARCHITECTURE = Architecture(
    "qwen2_moe", read_entries=_read_entries, write_entries=_write_entries, layouts=expert_layouts
)
