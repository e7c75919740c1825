"""Converter for text checkpoints of Ministral 3.

Tensor names match ours. config.json uses our field names, except for the rotary embedding, whose entry also holds the
parameters of the query scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import object_entry, refuse, rope_entry, rope_fields, shared_fields
from ligerzoo.models.ministral3 import Ministral3, Ministral3Config


def config_from_hf(raw: Mapping[str, Any]) -> Ministral3Config:
    """Builds the config from config.json. Without a rope entry the default YaRN scaling applies.

    As in transformers, a top-level `rope_theta` is then ignored.
    """
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    default = Ministral3Config()
    if not object_entry(raw, "rope_scaling") and raw.get("rope_parameters") is None:
        raw = {**raw, "rope_parameters": {"rope_theta": default.rope_theta, **(default.rope_scaling or {})}}
    fields = {**shared_fields(raw, Ministral3Config), **rope_fields(raw)}
    if fields["rope_scaling"] is None:  # the frequencies are not scaled, but the queries may be
        given = rope_entry(raw)
        of_queries = ("original_max_position_embeddings", "llama_4_scaling_beta")
        fields["rope_scaling"] = {name: given[name] for name in of_queries if name in given}
    max_position = fields.get("max_position_embeddings", default.max_position_embeddings)
    return Ministral3Config(**{**fields, "rope_scaling": _complete(fields["rope_scaling"], max_position)})


def config_to_hf(config: Ministral3Config) -> dict[str, Any]:
    """Returns the entries of config.json."""
    scaling = _complete(config.rope_scaling or {}, config.max_position_embeddings)
    return {"hidden_act": "silu", **asdict(config), "rope_scaling": scaling}


def _complete(scaling: Mapping[str, Any], max_position: int) -> dict[str, Any]:
    """Adds the entries that transformers requires for every rope type."""
    of_queries = {"original_max_position_embeddings": max_position, "llama_4_scaling_beta": 0.0}
    return {"rope_type": "default", **of_queries, **scaling}


ARCHITECTURE = Architecture(
    model_type="ministral3",
    hf_class="Ministral3ForCausalLM",
    model_class=Ministral3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
