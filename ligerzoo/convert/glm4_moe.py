"""Converter for GLM-4.5 checkpoints, whose experts are stored as in Qwen2-MoE.

config.json calls our `num_experts` `n_routed_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_given, refuse, written_as
from ligerzoo.convert.qwen2_moe import expert_layouts

ROUTER_ENTRIES: dict[str, tuple[object, ...]] = {
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)
}  # fmt: skip
"""Entries of DeepSeek's code, with the only values that transformers and we compute."""


def _read_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json; `n_routed_experts` takes precedence over `num_local_experts`.

    Raises:
        ConfigError: An option is null. transformers takes null as false, but an absent entry as true.
    """
    for name in ("norm_topk_prob", "rope_interleave"):
        refuse({name: True, **raw}, name, unless=(True, False))
    return {**raw, "num_experts": first_given(raw, "n_routed_experts", "num_local_experts")}


_write_entries = written_as(num_experts="n_routed_experts")

ARCHITECTURE = Architecture(
    "glm4_moe",
    accepted=ROUTER_ENTRIES,
    read_entries=_read_entries,
    write_entries=_write_entries,
    layouts=expert_layouts,
    keeps_extra_layers=True,
)
