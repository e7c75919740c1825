"""Converter for ERNIE 4.5 MoE checkpoints, stored as Qwen2-MoE's, with other names of the biases of routers.

config.json calls our `num_experts` `moe_num_experts` and our `num_experts_per_tok` `moe_k`. Tensors of multi-token
prediction are kept.
Routers that are stored in fp32 stay in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture, is_rotary_buffer
from ligerzoo.convert.fields import first_given
from ligerzoo.convert.layout import Layout, Rename
from ligerzoo.convert.qwen2_moe import LAYOUTS
from ligerzoo.models.ernie4_5_moe import Ernie4_5Moe, Ernie4_5MoeConfig

_BIAS = "mlp.gate.e_score_correction_bias"
_MTP = re.compile(r"(model\.)?mtp_.+")


def read_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json under the names of our fields. There is no sliding window."""
    names = {
        "num_experts": first_given(raw, "moe_num_experts", "num_experts"),
        "num_experts_per_tok": first_given(raw, "moe_k", "num_experts_per_tok"),
    }
    return {**raw, **names, "sliding_window": None}


def write_entries(config: Ernie4_5MoeConfig, entries: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json from those named like the fields of the config."""
    del entries["sliding_window"]
    return {"moe_num_experts": entries.pop("num_experts"), "moe_k": entries.pop("num_experts_per_tok"), **entries}


ARCHITECTURE = Architecture(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    Ernie4_5Moe,
    Ernie4_5MoeConfig,
    accepted={"moe_gate": ("topk",), "moe_use_aux_free": (True,), "compression_ratio": (1.0,)},
    read_entries=read_entries,
    write_entries=write_entries,
    layouts=(
        Layout((Rename("mlp.moe_statics.e_score_correction_bias", _BIAS), *LAYOUTS[0].rules)),
        Layout((Rename("mlp.gate.moe_statics.e_score_correction_bias", _BIAS),)),
    ),
    keeps_fp32=lambda name: name.endswith(".mlp.gate.weight"),
    is_extra_tensor=lambda name: is_rotary_buffer(name) or _MTP.fullmatch(name) is not None,
)
