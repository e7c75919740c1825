"""Converter for Gemma checkpoints. Tensor names match ours.

The first Gemma checkpoints have `"hidden_act": "gelu"` and a null `hidden_activation`; both mean the tanh approximation
of GELU. Both entries are written: transformers 5 reads `hidden_act`, transformers 4 `hidden_activation`.
"""

from ligerzoo.convert.architecture import GELU_TANH, Architecture
from ligerzoo.models.gemma import Gemma, GemmaConfig

ARCHITECTURE = Architecture(
    "gemma",
    "GemmaForCausalLM",
    Gemma,
    GemmaConfig,
    activations={"hidden_act": (GELU_TANH, "gelu")},
    accepted={"use_bidirectional_attention": (False,)},
    write_entries=lambda config, entries: {"hidden_activation": GELU_TANH, **entries},
)
