"""Converter for Mixtral checkpoints.

Checkpoints store one tensor per expert and matrix, under the names of the original code: w1 (gate), w2 (down) and w3
(up). Checkpoints that transformers 5 saves in its in-memory layout have our names. config.json calls our `num_experts`
`num_local_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_given
from ligerzoo.convert.layout import Layout, PerExpert, Rename
from ligerzoo.models.mixtral import Mixtral, MixtralConfig

_EXPERT = "block_sparse_moe.experts.{expert}"

RULES = (
    Rename("block_sparse_moe.gate", "mlp.gate"),
    PerExpert((f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"), "mlp.experts.gate_up_proj"),
    PerExpert((f"{_EXPERT}.w2.weight",), "mlp.experts.down_proj"),
)


def read_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json; `num_experts` takes precedence over `num_local_experts`."""
    return {**raw, "num_experts": first_given(raw, "num_experts", "num_local_experts")}


def write_entries(config: MixtralConfig, entries: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json from those named like the fields of the config."""
    return {"num_local_experts": entries.pop("num_experts"), **entries}


ARCHITECTURE = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    Mixtral,
    MixtralConfig,
    read_entries=read_entries,
    write_entries=write_entries,
    layouts=(Layout(RULES), Layout()),
)
