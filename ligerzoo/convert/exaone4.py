"""Converter for EXAONE 4 checkpoints. Tensor names match ours.

transformers requires `layer_types` without a sliding window. There it has no effect.
"""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.entries import Entries, is_array
from ligerzoo.models.exaone4 import Exaone4Config


def _read_entries(raw: Entries) -> Entries:
    """Returns config.json, without a `layer_types` that has no effect."""
    types = raw.get("layer_types")
    count, window = (raw.get(name, getattr(Exaone4Config, name)) for name in ("num_hidden_layers", "sliding_window"))
    is_plain = window is None and is_array(types) and len(types) == count and set(types) == {"full_attention"}
    return {**raw, "layer_types": None} if is_plain else raw


def _write_entries(config: Exaone4Config, entries: dict[str, object]) -> dict[str, object]:
    if config.sliding_window is None and config.layer_types is None:
        entries["layer_types"] = ["full_attention"] * config.num_hidden_layers
    return entries


ARCHITECTURE = Architecture("exaone4", read_entries=_read_entries, write_entries=_write_entries)
