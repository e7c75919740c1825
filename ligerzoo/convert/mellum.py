"""Converter for Mellum checkpoints. Tensors for multi-token prediction are kept."""

from ligerzoo.convert.architecture import ROTARY_BUFFERS, Architecture
from ligerzoo.convert.families import expert_layouts
from ligerzoo.convert.fields import first_spelling, refuse, rope_of_layer_types
from ligerzoo.entries import Entries, object_entry
from ligerzoo.models.mellum import MellumConfig


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_parameters`, an object per layer type; transformers ignores the older spelling."""
    both = object_entry(raw, "rope_parameters")
    for name in ("rope_type", "rope_theta"):
        refuse(both, name, unless=(None,), remedy="Give an object for each layer type.")
    for kind in ("full_attention", "sliding_attention"):
        refuse(object_entry(both, kind), "partial_rotary_factor", unless=(None, 1.0))
    rope = rope_of_layer_types({"rope_parameters": both}, default_theta, None, MellumConfig.rope_local_base_freq)
    for name, unless in (("rope_theta", (None, rope["rope_theta"])), ("rope_scaling", (None, {}))):
        refuse(raw, name, unless=unless, remedy="Use rope_parameters, with an object for each layer type.")
    return rope


def _write_entries(config: MellumConfig, entries: dict[str, object]) -> dict[str, object]:
    full = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    sliding = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
    names = ("num_experts", "rope_theta", "rope_scaling", "rope_local_base_freq")
    return {
        "num_local_experts": config.num_experts,
        **{name: value for name, value in entries.items() if name not in names},
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }


ARCHITECTURE = Architecture(
    "mellum",
    accepted={"partial_rotary_factor": (1.0,), "decoder_sparse_step": (1,), "use_sliding_window": (True,)},
    read_entries=first_spelling(num_experts=("num_local_experts", "num_experts")),
    read_rope=_read_rope,
    write_entries=_write_entries,
    layouts=expert_layouts,
    extra_tensors=rf"{ROTARY_BUFFERS}|(model\.)?mtp\..+",
)
