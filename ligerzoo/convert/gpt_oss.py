"""Converter for gpt-oss checkpoints in bf16.

Checkpoints store the experts' matrices transposed, for products x @ W, and gate and up projections in alternation:
even columns are the gate's. config.json has some entries twice, and calls our `num_experts` `num_local_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_given, refuse, rope_entry, rope_fields
from ligerzoo.convert.weights import Interleaved, Layout, Rename, Transposed
from ligerzoo.models.gpt_oss import YARN, GptOss, GptOssConfig


def read_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json; `num_experts` takes precedence over `num_local_experts`.

    Raises:
        ConfigError: `experts_per_token`, another name of `num_experts_per_tok`, has another value.
    """
    refuse(
        raw, "experts_per_token", unless=(None, raw.get("num_experts_per_tok", GptOssConfig.num_experts_per_tok)),
        remedy="It must equal num_experts_per_tok.",
    )  # fmt: skip
    return {**raw, "num_experts": first_given(raw, "num_experts", "num_local_experts")}


def read_rope(raw: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """Reads `rope_theta` and `rope_scaling` from either spelling. Without a rope entry the default YaRN applies."""
    return rope_fields(raw if rope_entry(raw) else {**raw, "rope_scaling": YARN}, default_theta)


def write_entries(config: GptOssConfig, entries: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json from those named like the fields of the config."""
    scaling = config.rope_scaling or {"rope_type": "default"}
    types = ["sliding_attention" if config.is_sliding(i) else "full_attention" for i in range(config.num_hidden_layers)]
    return {
        "num_local_experts": entries.pop("num_experts"), **entries, "rope_scaling": dict(scaling), "layer_types": types
    }  # fmt: skip


ARCHITECTURE = Architecture(
    "gpt_oss",
    "GptOssForCausalLM",
    GptOss,
    GptOssConfig,
    read_entries=read_entries,
    read_rope=read_rope,
    write_entries=write_entries,
    layouts=(
        Layout(
            (
                Rename("mlp.router", "mlp.gate"),
                Interleaved("mlp.experts.gate_up_proj", transposed=True),
                Interleaved("mlp.experts.gate_up_proj_bias"),
                Transposed("mlp.experts.down_proj"),
            )
        ),
    ),
)
