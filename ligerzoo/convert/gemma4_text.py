"""Converter for text-only Gemma 4 checkpoints. Tensor names match ours.

transformers 5 writes `per_layer_config`, an object with the sizes of each full-attention layer, instead of
`global_head_dim` and `num_global_key_value_heads`. Layers that attend to keys and values of earlier ones may have
projections to keys and values in the files, which no forward uses; they are kept when saving.
"""

import re
from itertools import islice

from ligerzoo.checks import AT_LEAST_1
from ligerzoo.convert.architecture import GELU_TANH, ROTARY_BUFFERS, Architecture
from ligerzoo.convert.fields import refuse, rope_of_layer_types, shared_fields
from ligerzoo.entries import Entries, object_entry
from ligerzoo.errors import ConfigError
from ligerzoo.models.gemma4_config import PROPORTIONAL, Gemma4DecoderConfig

_KINDS = ("full_attention", "sliding_attention")
_LAYERS = ("num_hidden_layers", "layer_types")


def read_text(raw: Entries) -> dict[str, object]:
    """Returns the entries of the decoder under the names of our fields."""
    entries = {**raw, "num_experts_per_tok": raw.get("top_k_experts")}
    if "per_layer_config" in raw:
        sizes = _sizes_of_full_attention(raw)
        entries["global_head_dim"] = sizes.get("head_dim", raw.get("head_dim", Gemma4DecoderConfig.head_dim))
        entries["num_global_key_value_heads"] = sizes.get("num_key_value_heads")
    elif not raw.get("attention_k_eq_v") and AT_LEAST_1.accepts(raw.get("num_global_key_value_heads")):
        entries["num_global_key_value_heads"] = None  # as in transformers
    return entries


def _sizes_of_full_attention(raw: Entries) -> Entries:
    """Returns the entry that `per_layer_config` has for each full-attention layer, by its index with leading zeros."""
    sizes, given = object_entry(raw, "per_layer_config"), {n: raw[n] for n in _LAYERS if n in raw}
    decoder = Gemma4DecoderConfig(**shared_fields(given, Gemma4DecoderConfig))  # type: ignore[arg-type]
    layers = (i for i in range(decoder.num_hidden_layers) if not decoder.is_sliding(i))
    full = set(islice(layers, len(sizes) + 1))  # config.json may have any number of layers
    found = [object_entry(sizes, name) for name in sizes] or [{}]
    is_known = {*found[0]} <= {"head_dim", "num_key_value_heads"} and all(one == found[0] for one in found)
    if not is_known or (sizes and {int(n) if re.fullmatch("[0-9]{1,9}", n) else -1 for n in sizes} != full):
        what, expected = "not supported", "head_dim and num_key_value_heads, equal for all full-attention layers"
        raise ConfigError(what, where="per_layer_config", got=repr(sizes)[:200], expected=expected)
    return found[0]


def read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_parameters`, an object per layer type; transformers ignores other spellings."""
    both = object_entry(raw, "rope_parameters") or {"full_attention": {**PROPORTIONAL, "rope_theta": default_theta}}
    for name in _KINDS:
        kind = object_entry(both, name)
        if name == "full_attention" and not kind:
            raise ConfigError(
                "missing", where=f"rope_parameters, {name}", expected="an object with rope_type and rope_theta"
            )
        if kind.get("rope_type") != "proportional":
            refuse(kind, "partial_rotary_factor", unless=(None, 1.0))
    rope = rope_of_layer_types({"rope_parameters": both}, default_theta, None, Gemma4DecoderConfig.rope_local_base_freq)
    for name in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
        refuse(raw, name, unless=(None, rope[name]), remedy="Use rope_parameters, with an object for each layer type.")
    return rope


def write_text(config: Gemma4DecoderConfig, entries: dict[str, object]) -> dict[str, object]:
    """Returns the entries of config.json for those of the decoder, named like its fields."""
    full = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    sliding = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
    names = ("num_experts_per_tok", "rope_theta", "rope_scaling", "rope_local_base_freq")
    return {
        **{name: value for name, value in entries.items() if name not in names},
        "top_k_experts": config.num_experts_per_tok,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }


SHARED_KEYS = r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)"
"""Names of projections in the files of layers that attend to keys and values of earlier ones."""

ARCHITECTURE = Architecture(
    "gemma4_text",
    "Gemma4ForCausalLM",
    accepted={"hidden_activation": (GELU_TANH,)},
    read_entries=read_text,
    read_rope=read_rope,
    write_entries=write_text,
    extra_tensors=rf"{ROTARY_BUFFERS}|(model\.)?{SHARED_KEYS}",
)
