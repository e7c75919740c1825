"""Families of checkpoints in a table: names of tensors, and almost all names in config.json, are ours."""

from __future__ import annotations

from typing import Any

from ligerzoo.convert.architecture import GELU_TANH, Architecture
from ligerzoo.convert.layout import Fused, Layout

GATE_UP = Fused("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
"""Gate and up projections in one tensor."""


def _without_null_types(config: Any, entries: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if name != "layer_types" or value is not None}


_FAMILIES = (
    Architecture("arcee", accepted={"hidden_act": ("relu2",)}),
    Architecture("ernie4_5", accepted={"compression_ratio": (1.0,)}),
    # The first Gemma checkpoints have `"hidden_act": "gelu"` and a null `hidden_activation`; both mean the tanh
    # approximation. Both entries are written: transformers 5 reads `hidden_act`, transformers 4 `hidden_activation`.
    Architecture(
        "gemma",
        accepted={"hidden_act": (GELU_TANH, "gelu"), "use_bidirectional_attention": (False,)},
        write_entries=lambda config, entries: {"hidden_activation": GELU_TANH, **entries},
    ),
    # `hidden_act` is ignored.
    Architecture("gemma2", accepted={"hidden_activation": (GELU_TANH,), "use_bidirectional_attention": (False,)}),
    Architecture("glm", layouts=lambda config: (Layout((GATE_UP,)),)),
    Architecture("glm4", layouts=lambda config: (Layout((GATE_UP,)),)),
    Architecture("granite"),
    Architecture("llama"),
    Architecture("ministral"),
    # A missing `sliding_window` means 4096; null means full attention. `layer_types` selects the window per layer, as
    # in Ministral; so does transformers' AutoConfig.
    Architecture("mistral", write_entries=_without_null_types),
    Architecture("nanochat", accepted={"hidden_act": ("relu2",)}),
    Architecture("olmo2"),
    Architecture("qwen2"),
    Architecture("qwen3", quantized_formats=frozenset({"fp8"})),
    Architecture("seed_oss"),
    Architecture("smollm3"),
)

FAMILIES = {architecture.model_type: architecture for architecture in _FAMILIES}
