"""Converter for Nemotron-H checkpoints.

Each block has one branch, `mixer`, of any kind. Files have the prefix "backbone.", transformers' modules "model.". The
layers for multi-token prediction (`mtp`) are not part of the model.
"""

from __future__ import annotations

from ligerzoo.checks import is_text
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.families import MAMBA_LIMITS
from ligerzoo.convert.fields import first_given, first_spelling, refuse, written_as
from ligerzoo.convert.layout import Layout, PerExpert, Rename
from ligerzoo.entries import Entries, is_array
from ligerzoo.models.nemotron_h import MIXER_TYPES, NemotronHConfig

_NAMES = {
    "mamba_n_heads": ("mamba_num_heads",),
    "mamba_d_head": ("mamba_head_dim",),
    "mamba_n_groups": ("mamba_n_groups", "n_groups"),
    "mamba_d_state": ("ssm_state_size",),
    "mamba_d_conv": ("mamba_d_conv", "conv_kernel"),
    "mamba_conv_bias": ("mamba_conv_bias", "use_conv_bias"),
    "mamba_proj_bias": ("use_bias",),
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "rms_norm_eps": ("layer_norm_epsilon",),
    "time_step_min": ("mamba_dt_min", "time_step_min"),
}
"""Names of fields in config.json; the last of those of Mamba-2 is written."""

_OLD_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}

_SHARED = (
    *(Rename("mixer", name) for name in ("mamba", "self_attn", "mlp")),
    Rename("norm", "input_layernorm"),
    Rename("model.norm_f", "model.norm"),
    Rename("embeddings", "embed_tokens"),
)
_EXPERTS = tuple(
    PerExpert((f"mixer.experts.{{expert}}.{name}.weight",), f"mlp.experts.{name}") for name in ("up_proj", "down_proj")
)


def _read_entries(raw: Entries) -> Entries:
    """Returns the entries of config.json under the names of our fields."""
    refuse(raw, "mamba_proj_bias", unless=(None, False), remedy="Set use_bias, which is used instead.")
    refuse(raw, "attention_head_dim", unless=(None, raw.get("head_dim", NemotronHConfig.head_dim)))
    types, pattern = first_given(raw, "layers_block_type", "layer_types"), raw.get("hybrid_override_pattern")
    if types is None:
        types = [MIXER_TYPES.get(letter, letter) for letter in pattern] if is_text(pattern) else pattern
    elif is_array(types):
        types = [_OLD_TYPES.get(kind, kind) if is_text(kind) else kind for kind in types]
    layers = len(types) if is_array(types) and types else None
    return {**first_spelling(**_NAMES)(raw), "layers_block_type": types, "num_hidden_layers": layers}


def _write_entries(config: NemotronHConfig, entries: dict[str, object]) -> dict[str, object]:
    letters = {kind: letter for letter, kind in MIXER_TYPES.items()}
    pattern = "".join(letters[kind] for kind in config.layers_block_type)
    names = {field: stored[0 if field == "num_experts" else -1] for field, stored in _NAMES.items()}
    omitted = ("layers_block_type", "rope_scaling", "mamba_expand")
    entries = {name: value for name, value in entries.items() if name not in omitted}
    return {**written_as(**names)(config, entries), "hybrid_override_pattern": pattern}


ARCHITECTURE = Architecture(
    "nemotron_h",
    accepted={
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "attention_bias": (False,),
        "n_shared_experts": (1,),
        "residual_in_fp32": (False,),
        "sliding_window": (),
        "tie_word_embeddings": (False,),
        "time_step_limit": MAMBA_LIMITS,
        "mamba_dt_limit": MAMBA_LIMITS,
    },
    read_entries=_read_entries,
    write_entries=_write_entries,
    layouts=lambda config: (
        Layout((*_EXPERTS, *_SHARED), (("model.", "backbone.", "model.", ""),)),
        Layout(_SHARED, (("model.", "model.", "backbone.", ""),)),
    ),
    extra_tensors=r"mtp\..*",
    kept_fp32=r".*\.mamba\.(A_log|dt_bias|D|norm\.weight)",
)
