"""Converter for Apertus checkpoints, which have other names of norms.

transformers ignores `post_norm`, `qk_norm` and `mlp_bias`. Values that should change the model are refused.
"""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import rope_fields
from ligerzoo.convert.layout import Layout, Rename
from ligerzoo.entries import Entries, object_entry
from ligerzoo.models.apertus import ApertusConfig


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_theta` and `rope_scaling` from either spelling.

    Without an object `rope_parameters`, the default scaling applies unless `rope_scaling` has entries. As in
    transformers, a top-level `rope_theta` is then ignored, and a `rope_scaling` without theta takes it.
    """
    if raw.get("rope_parameters") is None and not object_entry(raw, "rope_scaling"):
        default = ApertusConfig()
        return {"rope_theta": default.rope_theta, "rope_scaling": default.rope_scaling}
    return rope_fields(raw, default_theta)


def _write_entries(config: ApertusConfig, entries: dict[str, object]) -> dict[str, object]:
    return {**entries, "rope_scaling": {"rope_type": "default", **(config.rope_scaling or {})}}


RULES = (Rename("attention_layernorm", "input_layernorm"), Rename("feedforward_layernorm", "post_attention_layernorm"))

ARCHITECTURE = Architecture(
    "apertus",
    accepted={"hidden_act": ("xielu",), "post_norm": (False,), "qk_norm": (True,), "mlp_bias": (False,)},
    read_rope=_read_rope,
    write_entries=_write_entries,
    layouts=lambda config: (Layout(RULES),),
)
