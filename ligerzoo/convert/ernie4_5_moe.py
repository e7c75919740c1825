"""Converter for ERNIE 4.5 MoE checkpoints, stored as Qwen2-MoE's, with other names of the biases of routers.

config.json calls our `num_experts` `moe_num_experts` and our `num_experts_per_tok` `moe_k`. Tensors of multi-token
prediction are kept. Routers that are stored in fp32 stay in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import ROTARY_BUFFERS, Architecture
from ligerzoo.convert.fields import first_spelling, written_as
from ligerzoo.convert.layout import Layout, Rename
from ligerzoo.convert.qwen2_moe import PER_EXPERT
from ligerzoo.models.ernie4_5_moe import Ernie4_5MoeConfig

_BIAS = "mlp.gate.e_score_correction_bias"
_read = first_spelling(
    num_experts=("moe_num_experts", "num_experts"), num_experts_per_tok=("moe_k", "num_experts_per_tok")
)
_write = written_as(num_experts="moe_num_experts", num_experts_per_tok="moe_k")


def _read_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json under the names of our fields. There is no sliding window."""
    return {**_read(raw), "sliding_window": None}


def _write_entries(config: Ernie4_5MoeConfig, entries: dict[str, Any]) -> dict[str, Any]:
    del entries["sliding_window"]
    return _write(config, entries)


ARCHITECTURE = Architecture(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    accepted={"moe_gate": ("topk",), "moe_use_aux_free": (True,), "compression_ratio": (1.0,)},
    read_entries=_read_entries,
    write_entries=_write_entries,
    layouts=lambda config: (
        Layout((Rename("mlp.moe_statics.e_score_correction_bias", _BIAS), *PER_EXPERT)),
        Layout((Rename("mlp.gate.moe_statics.e_score_correction_bias", _BIAS),)),
    ),
    kept_fp32=r".*\.mlp\.gate\.weight",
    extra_tensors=rf"{ROTARY_BUFFERS}|(model\.)?mtp_.+",
)
