"""Converter for Phi-3 checkpoints.

Checkpoints store the query, key and value projections as one tensor, and the gate and up projections as another.
"""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.families import GATE_UP
from ligerzoo.convert.fields import rope_fields
from ligerzoo.convert.layout import Fused, Layout
from ligerzoo.entries import Entries
from ligerzoo.models.phi3 import Phi3Config

_LONGROPE = ("longrope", "su", "yarn")
"""Rope types that all mean LongRoPE: early checkpoints call it `su` or `yarn`."""


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_theta` and `rope_scaling` from either spelling."""
    rope = rope_fields(raw, default_theta)
    if (scaling := rope["rope_scaling"]) is not None:
        scaling.pop("original_max_position_embeddings", None)  # the top-level entry applies
        if scaling["rope_type"] in _LONGROPE:
            scaling["rope_type"] = "longrope"
    return rope


def _write_entries(config: Phi3Config, entries: dict[str, object]) -> dict[str, object]:
    if config.rope_scaling is not None:  # transformers 4 accepts only `type` and the two lists of factors
        scaling = dict(config.rope_scaling)
        entries["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    return entries


QKV = Fused("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))

ARCHITECTURE = Architecture(
    "phi3", read_rope=_read_rope, write_entries=_write_entries, layouts=lambda config: (Layout((QKV, GATE_UP)),)
)
