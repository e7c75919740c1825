"""Converter for OLMo 3 checkpoints. Tensor names match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import rope_of_layer_types
from ligerzoo.entries import Entries, object_entry
from ligerzoo.models.olmo3 import Olmo3Config


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_theta`, `rope_scaling` and `rope_local_base_freq` from either spelling.

    transformers 4 writes `rope_theta` for all layers and `rope_scaling` for full-attention layers. transformers 5
    writes `rope_parameters`, an object per layer type. It reads a `rope_theta` of version 4 for full-attention layers
    only; here, as in version 4, it applies to all.
    """
    rope = rope_of_layer_types(raw, default_theta, raw.get("rope_theta"), default_theta)
    has_local = object_entry(raw, "rope_parameters").get("sliding_attention") is not None
    if not has_local or rope["rope_local_base_freq"] == rope["rope_theta"]:
        rope["rope_local_base_freq"] = None
    return rope


def _write_entries(config: Olmo3Config, entries: dict[str, object]) -> dict[str, object]:
    """Returns the entries of config.json in the spelling of transformers 4, if version 5 reads the same thetas from it.

    Version 5 gives sliding-window layers its default theta then.
    """
    local_theta = entries.pop("rope_local_base_freq") or config.rope_theta
    if local_theta == Olmo3Config.rope_theta:
        return entries
    full = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    sliding = {"rope_type": "default", "rope_theta": local_theta}
    return {**entries, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


ARCHITECTURE = Architecture("olmo3", read_rope=_read_rope, write_entries=_write_entries)
