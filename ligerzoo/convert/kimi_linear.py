"""Converter for Kimi Linear checkpoints.

Checkpoints store the convolution of linear attention in three tensors, experts one by one, and MoE layers as
`block_sparse_moe`. In files that transformers 5 writes, dense MLPs have this name too. config.json has an object for
linear attention, whose lists of layers count from 1.
"""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.families import MIXTRAL, ROUTER
from ligerzoo.convert.fields import first_given, refuse
from ligerzoo.convert.layout import Cut, Layout, Rename
from ligerzoo.convert.olmo_hybrid import CONVOLUTIONS
from ligerzoo.entries import Entries, is_array, object_entry
from ligerzoo.errors import ConfigError
from ligerzoo.models.kimi_linear import KimiLinearConfig

_NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
}
"""Fields under other names in config.json. transformers reads either, and writes these."""

_LINEAR = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Fields of the object for linear attention, which takes precedence."""

_KINDS = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
_GATE = [
    Rename(f"self_attn.{name}", f"self_attn.forget_gate.{name}")
    for name in ("A_log", "dt_bias", "f_a_proj", "f_b_proj")
]


def _layer_types(linear: Entries) -> list[str] | None:
    """Returns the types of the layers that the object for linear attention lists; None without both lists."""
    lists = {name: linear.get(name) for name in _KINDS}
    if None in lists.values():
        return None
    types = {layer: _KINDS[name] for name, layers in lists.items() if is_array(layers) for layer in layers}
    count = sum(len(layers) for layers in lists.values() if is_array(layers))
    if sorted(types, key=str) != sorted(range(1, count + 1), key=str):
        expected = f"{' and '.join(_KINDS)} that list each layer once, counted from 1"
        raise ConfigError("invalid layers", where="linear_attn_config", got=str(lists)[:200], expected=expected)
    return [types[layer] for layer in range(1, count + 1)]


def _read_entries(raw: Entries) -> Entries:
    """Returns the entries of config.json under the names of our fields. `head_dim` has no meaning here."""
    linear = object_entry(raw, "linear_attn_config")
    refuse({"moe_renormalize": True, **raw}, "moe_renormalize", unless=(True, False))
    given = {field: first_given(raw, name, field) for field, name in _NAMES.items()}
    given["num_experts"] = first_given(raw, "num_experts", "num_local_experts")
    given |= {field: linear[name] for field, name in _LINEAR.items() if linear.get(name) is not None}
    if raw.get("layer_types") is None:
        given["layer_types"] = _layer_types(linear)
    size = raw.get("head_dim")
    return {**raw, **given, "head_dim": None if type(size) is int else size}


def _write_entries(config: KimiLinearConfig, entries: dict[str, object]) -> dict[str, object]:
    """Returns the entries of config.json, in the spelling of the first checkpoints."""
    linear = {name: entries.pop(field) for field, name in _LINEAR.items()}
    layers, types = range(config.num_hidden_layers), config.layer_types
    del entries["layer_types"]
    if types is not None:
        linear |= {name: [i + 1 for i in layers if types[i] == kind] for name, kind in _KINDS.items()}
    others = {_NAMES.get(name, name): value for name, value in entries.items() if name != "rope_scaling"}
    return {**others, "linear_attn_config": linear, "num_key_value_heads": config.num_attention_heads}


def _layouts(config: KimiLinearConfig) -> tuple[Layout, ...]:
    size = config.linear_num_heads * config.linear_head_dim
    convolutions = Cut(tuple(f"self_attn.{name}" for name in CONVOLUTIONS), "self_attn.conv1d", (size,) * 3)
    shared = Rename("block_sparse_moe.shared_experts", "mlp.shared_experts")
    rules = (convolutions, *_GATE, shared, *MIXTRAL)
    return Layout(rules), Layout((*rules, Rename("block_sparse_moe", "mlp"))), Layout()


ARCHITECTURE = Architecture(
    "kimi_linear",
    accepted={
        **ROUTER,
        "moe_router_activation_func": ("sigmoid",),
        "mla_use_nope": (True,),
        "use_grouped_topk": (True,),
    },
    read_entries=_read_entries,
    write_entries=_write_entries,
    layouts=_layouts,
    keeps_extra_layers=True,
    kept_fp32=r".*\.(forget_gate\.(A_log|dt_bias)|self_attn\.o_norm\.weight|mlp\.gate\.weight)",
)
