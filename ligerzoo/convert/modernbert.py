"""Converter for ModernBERT checkpoints: names of tensors, and fields of the config that have other names."""

from ligerzoo.convert.encoder import EncoderArchitecture
from ligerzoo.convert.fields import first_given, rope_of_layer_types, written_as
from ligerzoo.convert.layout import Fused, Layout, Rename
from ligerzoo.entries import Entries
from ligerzoo.models.modernbert import ModernBertConfig

_RULES = (
    Fused("attn.Wqkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Fused("mlp.Wi", ("mlp.gate_proj", "mlp.up_proj")),
    Rename("attn.Wo", "self_attn.o_proj"),
    Rename("mlp.Wo", "mlp.down_proj"),
    Rename("attn_norm", "input_layernorm"),
    Rename("mlp_norm", "post_attention_layernorm"),
    Rename("model.embeddings.tok_embeddings", "model.embed_tokens"),
    Rename("model.embeddings.norm", "model.input_norm"),
    Rename("model.final_norm", "model.norm"),
    Rename("decoder", "lm_head"),
)


def _read_entries(raw: Entries) -> Entries:
    """Returns the entries of config.json under the names of our fields."""
    window = raw.get("local_attention", ModernBertConfig.sliding_window)
    return {**raw, "rms_norm_eps": raw.get("norm_eps"), "sliding_window": window}


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads the rotary embedding from either spelling.

    transformers 4 writes `global_rope_theta` and `local_rope_theta`, null for the same. transformers 5 writes
    `rope_parameters`, an object per layer type, which takes precedence.
    """
    default, theta = ModernBertConfig.rope_local_base_freq, raw.get("global_rope_theta")
    local_theta = raw.get("local_rope_theta", default)
    local_theta = first_given({"local": local_theta, "global": theta}, "local", "global")
    return rope_of_layer_types({**raw, "rope_theta": theta}, default_theta, local_theta, default_theta)


def _write_entries(config: ModernBertConfig, entries: dict[str, object]) -> dict[str, object]:
    """Returns the entries of config.json in the spelling of transformers 4, with `rope_parameters` if RoPE scales."""
    names = {"rms_norm_eps": "norm_eps", "sliding_window": "local_attention"}
    thetas = {"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"}
    scaling = entries.pop("rope_scaling")
    if scaling is not None:
        full = {**(config.rope_scaling or {}), "rope_theta": config.rope_theta}
        local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
        entries["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return written_as(**names, **thetas)(config, entries)


ARCHITECTURE = EncoderArchitecture(
    "modernbert",
    "ModernBertForMaskedLM",
    accepted={
        "hidden_activation": ("gelu",),
        "classifier_activation": ("gelu",),
        "rope_scaling": (),
        "sparse_pred_ignore_index": (-100,),
    },
    read_entries=_read_entries,
    read_rope=_read_rope,
    write_entries=_write_entries,
    layouts=lambda config: (Layout(_RULES),),
)
