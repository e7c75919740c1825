"""Converter for Qwen3-Next checkpoints.

Checkpoints store the projections of linear attention in two tensors, key head by key head: queries, keys, values and
output gates in one, writing strengths and decays in the other. Experts are stored one by one, or stacked under our
names. The head for multi-token prediction (`mtp`) is not part of the model.
"""

from dataclasses import replace

from ligerzoo.convert.families import PER_EXPERT
from ligerzoo.convert.fields import first_spelling
from ligerzoo.convert.layout import FusedByHead, Layout
from ligerzoo.convert.qwen3_5_text import ARCHITECTURE as TEXT
from ligerzoo.models.qwen3_next import Qwen3NextConfig


def _layouts(config: Qwen3NextConfig) -> tuple[Layout, ...]:
    """Returns the layouts of checkpoints, which depend on the number of heads."""
    heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // heads
    values = group * config.linear_value_head_dim
    qkv, z, b, a = (f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))
    qkvz_parts = (qkv, keys, 0), (qkv, keys, heads * keys), (qkv, values, 2 * heads * keys), (z, values, 0)
    rules = (
        FusedByHead("linear_attn.in_proj_qkvz", qkvz_parts, heads),
        FusedByHead("linear_attn.in_proj_ba", ((b, group, 0), (a, group, 0)), heads),
    )
    return Layout((*rules, *PER_EXPERT)), Layout(rules)


ARCHITECTURE = replace(
    TEXT,
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    read_entries=first_spelling(num_experts=("num_local_experts", "num_experts")),
    layouts=_layouts,
    classifier_class="",
)
