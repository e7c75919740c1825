"""Converter for LFM3 checkpoints. Gates of attention have other names in files than in transformers' modules."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.families import SHORT_CONV_MLP
from ligerzoo.convert.fields import first_spelling, refuse, rope_of_layer_types
from ligerzoo.convert.layout import Layout, Rename
from ligerzoo.entries import Entries, object_entry
from ligerzoo.models.lfm3 import Lfm3Config

_FULL = {"rope_type": "proportional", "partial_rotary_factor": 0.5}


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_parameters`, an object per layer type; transformers ignores other spellings."""
    both = object_entry(raw, "rope_parameters") or {"full_attention": {**_FULL, "rope_theta": default_theta}}
    for name in ("full_attention", "sliding_attention"):
        kind = object_entry(both, name)
        if kind.get("rope_type") != "proportional":
            refuse(kind, "partial_rotary_factor", unless=(None, 1.0))
    rope = rope_of_layer_types({"rope_parameters": both}, default_theta, None, Lfm3Config.rope_local_base_freq)
    for name in ("rope_theta", "rope_scaling"):
        refuse(raw, name, unless=(None, rope[name]), remedy="Use rope_parameters, with an object for each layer type.")
    return rope


def _write_entries(config: Lfm3Config, entries: dict[str, object]) -> dict[str, object]:
    full = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    sliding = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
    names = ("rms_norm_eps", "rope_theta", "rope_scaling", "rope_local_base_freq")
    return {
        **{name: value for name, value in entries.items() if name not in names},
        "norm_eps": config.rms_norm_eps,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }


def _layouts(config: Lfm3Config) -> tuple[Layout, ...]:
    """Returns the layouts of files, and of transformers' modules."""
    norms = {"operator_norm": "input_layernorm", "embedding_norm": "norm", "ffn_norm": "post_attention_layernorm"}
    if config.use_sandwich_norm:
        norms |= {"post_operator_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
        norms |= {"post_ffn_norm": "post_feedforward_layernorm"}
    rules = *(Rename(stored, own) for stored, own in norms.items()), *SHORT_CONV_MLP
    return Layout(rules), Layout((Rename("self_attn.g_proj", "self_attn.gate_proj"), *rules))


ARCHITECTURE = Architecture(
    "lfm3",
    accepted={"partial_rotary_factor": (1.0,)},
    read_entries=first_spelling(rms_norm_eps=("norm_eps", "rms_norm_eps")),
    read_rope=_read_rope,
    write_entries=_write_entries,
    layouts=_layouts,
)
