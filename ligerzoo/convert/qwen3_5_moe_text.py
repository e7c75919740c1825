"""Converter for Qwen3.5 checkpoints with MoE, text only.

Experts are stored one by one, or stacked under our names. Otherwise as `qwen3_5_text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_given
from ligerzoo.convert.qwen2_moe import LAYOUTS
from ligerzoo.convert.qwen3_5_text import ACCEPTED, PREFIXES, is_extra_tensor, keeps_fp32, read_rope
from ligerzoo.models.qwen3_5_moe_text import Qwen3_5MoeText, Qwen3_5MoeTextConfig


def read_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json; `num_local_experts` takes precedence over `num_experts`."""
    return {**raw, "num_experts": first_given(raw, "num_local_experts", "num_experts")}


ARCHITECTURE = Architecture(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    Qwen3_5MoeText,
    Qwen3_5MoeTextConfig,
    accepted={**ACCEPTED, "norm_topk_prob": (True,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
    read_entries=read_entries,
    read_rope=read_rope,
    layouts=LAYOUTS,
    prefixes=PREFIXES,
    is_extra_tensor=is_extra_tensor,
    keeps_fp32=keeps_fp32,
)
