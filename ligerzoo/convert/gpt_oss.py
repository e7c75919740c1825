"""Converter for gpt-oss checkpoints, in bf16 and in MXFP4.

Checkpoints store the experts' matrices transposed, for products x @ W, and gate and up projections in alternation:
even columns are the gate's. config.json calls our `num_experts` `num_local_experts`. As in transformers, its entries
`experts_per_token` and `initial_context_length` have no effect: they repeat `num_experts_per_tok` and an entry of the
rotary embedding.
"""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_spelling, rope_entry, rope_fields
from ligerzoo.convert.layout import Interleaved, Layout, ModuleRules, Rename, Transposed
from ligerzoo.entries import Entries
from ligerzoo.models.gpt_oss import YARN, GptOssConfig


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_theta` and `rope_scaling` from either spelling. Without a rope entry the default YaRN applies."""
    return rope_fields(raw if rope_entry(raw) else {**raw, "rope_scaling": YARN}, default_theta)


def _write_entries(config: GptOssConfig, entries: dict[str, object]) -> dict[str, object]:
    scaling = dict(config.rope_scaling or {"rope_type": "default"})  # transformers reads null as the default YaRN
    return {"num_local_experts": entries.pop("num_experts"), **entries, "rope_scaling": scaling}


RULES = (
    ModuleRules("model.layers.", (Rename("mlp.router", "mlp.gate"),)),
    Interleaved("mlp.experts.gate_up_proj", transposed=True),
    Interleaved("mlp.experts.gate_up_proj_bias"),
    Transposed("mlp.experts.down_proj"),
)

ARCHITECTURE = Architecture(
    "gpt_oss",
    accepted={"partial_rotary_factor": (1.0,)},
    read_entries=first_spelling(num_experts=("num_experts", "num_local_experts")),
    read_rope=_read_rope,
    write_entries=_write_entries,
    layouts=lambda config: (Layout(RULES),),
    quantized_formats=frozenset({"mxfp4"}),
)
