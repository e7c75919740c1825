"""Converter for Mixtral checkpoints.

Checkpoints store one tensor per expert and matrix, under the names of the original code: w1 (gate), w2 (down) and w3
(up). Checkpoints that transformers 5 saves in its in-memory layout have our names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_told, refuse, rope_fields, shared_fields
from ligerzoo.convert.weights import Layout, PerExpert, Rename
from ligerzoo.models.mixtral import Mixtral, MixtralConfig

_EXPERT = "block_sparse_moe.experts.{expert}"


def config_from_hf(raw: Mapping[str, Any]) -> MixtralConfig:
    """Builds the config from config.json. `num_experts` takes precedence over `num_local_experts`."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    raw = {**raw, "num_experts": first_told(raw, "num_experts", "num_local_experts")}
    return MixtralConfig(**{**shared_fields(raw, MixtralConfig), **rope_fields(raw, MixtralConfig.rope_theta)})


def config_to_hf(config: MixtralConfig) -> dict[str, Any]:
    """Returns the entries of config.json."""
    entries = asdict(config)
    return {"hidden_act": "silu", "num_local_experts": entries.pop("num_experts"), **entries}


ARCHITECTURE = Architecture(
    model_type="mixtral",
    hf_class="MixtralForCausalLM",
    model_class=Mixtral,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=(
        Layout(
            (
                Rename("block_sparse_moe.gate", "mlp.gate"),
                PerExpert((f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"), "mlp.experts.gate_up_proj"),
                PerExpert((f"{_EXPERT}.w2.weight",), "mlp.experts.down_proj"),
            )
        ),
        Layout(),
    ),
)
