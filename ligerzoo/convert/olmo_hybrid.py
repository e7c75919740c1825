"""Converter for OLMo Hybrid checkpoints.

Checkpoints store the convolution of linear attention in three tensors, and call the norms of its blocks
`attention_layer_norm` and `feedforward_layer_norm`. Files that transformers 5 writes differ: it cuts the convolution in
three equal parts, whatever the sizes of queries, keys and values, and renames the norms of all blocks.
"""

from itertools import pairwise

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import rope_entry, rope_fields
from ligerzoo.convert.layout import Cut, Layout, ModuleRules, Rename
from ligerzoo.entries import Entries
from ligerzoo.models.olmo_hybrid import OlmoHybridConfig

CONVOLUTIONS = "q_conv1d", "k_conv1d", "v_conv1d"
_MLP_NORM = Rename("feedforward_layer_norm", "post_attention_layernorm")
_NORMS = Rename("attention_layer_norm", "input_layernorm"), _MLP_NORM


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads the fields of the rotary embedding. A theta that is null means none, one that is absent the default."""
    scaling = rope_entry(raw)
    holder = scaling if "rope_theta" in scaling else raw
    return {**rope_fields(raw, default_theta), "use_rope": holder.get("rope_theta", default_theta) is not None}


def _write_entries(config: OlmoHybridConfig, entries: dict[str, object]) -> dict[str, object]:
    """Returns the entries of config.json. transformers 5 rotates if `rope_parameters` is null or absent."""
    others = {name: value for name, value in entries.items() if name != "use_rope"}
    if config.use_rope:
        return others
    return {**others, "rope_theta": None, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}


def _layouts(config: OlmoHybridConfig) -> tuple[Layout, ...]:
    keys, values = (heads * size for heads, size in zip(config.linear_heads, config.linear_sizes, strict=True))
    channels = 2 * keys + values
    third = -(-channels // 3)
    bounds = [min(i * third, channels) for i in range(4)]

    def convolutions(*rows: int) -> Cut:
        return Cut(tuple(f"linear_attn.{name}" for name in CONVOLUTIONS), "linear_attn.conv1d", rows)

    linear = [i for i in range(config.num_hidden_layers) if config.is_linear(i)]
    norms = (ModuleRules(f"model.layers.{i}.", _NORMS) for i in linear)
    equal = convolutions(*(last - first for first, last in pairwise(bounds)))
    return Layout((convolutions(keys, keys, values), *norms)), Layout((equal, *_NORMS)), Layout()


ARCHITECTURE = Architecture(
    "olmo_hybrid",
    read_rope=_read_rope,
    write_entries=_write_entries,
    layouts=_layouts,
    kept_fp32=r".*\.linear_attn\.(A_log|dt_bias|o_norm\.weight)",
)
