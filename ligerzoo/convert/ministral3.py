"""Converter for text checkpoints of Ministral 3.

Tensor names match ours. The rotary embedding's entry in config.json also holds the parameters of the query scaling.
"""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import rope_entry, rope_fields, shared_fields
from ligerzoo.entries import Entries, object_entry
from ligerzoo.models.ministral3 import Ministral3Config

_QUERY_SCALING = ("original_max_position_embeddings", "llama_4_scaling_beta")


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_theta` and `rope_scaling` from either spelling.

    Without a rope entry the default YaRN scaling applies. As in transformers, a top-level `rope_theta` is then ignored,
    and a rope entry without theta means 10000.
    """
    default = Ministral3Config()
    if not object_entry(raw, "rope_scaling") and raw.get("rope_parameters") is None:
        raw = {**raw, "rope_parameters": {"rope_theta": default_theta, **(default.rope_scaling or {})}}
    rope = rope_fields(raw)
    given = rope_entry(raw)
    scaling = rope["rope_scaling"]
    if scaling is None:  # the frequencies are not scaled, but the queries may be
        scaling = {name: given[name] for name in _QUERY_SCALING if name in given}
    max_position = shared_fields(raw, Ministral3Config).get("max_position_embeddings", default.max_position_embeddings)
    return {**rope, "rope_scaling": _complete(scaling, max_position)}


def _write_entries(config: Ministral3Config, entries: dict[str, object]) -> dict[str, object]:
    return {**entries, "rope_scaling": _complete(config.rope_scaling or {}, config.max_position_embeddings)}


def _complete(scaling: Entries, max_position: object) -> dict[str, object]:
    """Adds the entries that transformers requires for every rope type."""
    defaults = dict(zip(_QUERY_SCALING, (max_position, 0.0), strict=True))
    return {"rope_type": "default", **defaults, **scaling}


ARCHITECTURE = Architecture("ministral3", read_rope=_read_rope, write_entries=_write_entries)
