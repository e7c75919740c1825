"""Converter for Qwen2-MoE checkpoints.

Checkpoints store one tensor per expert and projection. Checkpoints that transformers 5 saves in its in-memory layout
have our names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields, switched_window
from ligerzoo.convert.weights import Layout, PerExpert
from ligerzoo.models.moe import SparseStepMoEConfig
from ligerzoo.models.qwen2_moe import Qwen2Moe, Qwen2MoeConfig

_EXPERT = "mlp.experts.{expert}"

LAYOUTS = (
    Layout(
        (
            PerExpert((f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"), "mlp.experts.gate_up_proj"),
            PerExpert((f"{_EXPERT}.down_proj.weight",), "mlp.experts.down_proj"),
        )
    ),
    Layout(),
)


def config_from_hf(raw: Mapping[str, Any]) -> Qwen2MoeConfig:
    """Builds the config from config.json. Missing entries take the defaults of transformers' Qwen2MoeConfig."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return Qwen2MoeConfig(**{**shared_fields(raw, Qwen2MoeConfig), **rope_fields(raw), **switched_window(raw)})


def config_to_hf(config: SparseStepMoEConfig) -> dict[str, Any]:
    """Returns the entries of config.json, for Qwen2-MoE and Qwen3-MoE.

    A `head_dim` of None is omitted, since transformers accepts no null there.
    """
    entries = {"hidden_act": "silu", **asdict(config), "use_sliding_window": config.sliding_window is not None}
    return {name: value for name, value in entries.items() if not (name == "head_dim" and value is None)}


ARCHITECTURE = Architecture(
    model_type="qwen2_moe",
    hf_class="Qwen2MoeForCausalLM",
    model_class=Qwen2Moe,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=LAYOUTS,
)
