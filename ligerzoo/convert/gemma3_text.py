"""Converter for text-only Gemma 3 checkpoints. Tensor names match ours.

`hidden_act` and `attn_logit_softcapping` are ignored.
"""

from ligerzoo.convert.architecture import GELU_TANH, Architecture
from ligerzoo.convert.fields import rope_of_layer_types
from ligerzoo.entries import Entries
from ligerzoo.models.gemma3_text import Gemma3TextConfig


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_theta`, `rope_scaling` and `rope_local_base_freq` from either spelling.

    transformers 4 writes entries of these names. transformers 5 writes `rope_parameters`, an object per layer type,
    which takes precedence over `rope_theta` and `rope_local_base_freq`, but not over `rope_scaling`.
    """
    default = Gemma3TextConfig.rope_local_base_freq
    return rope_of_layer_types(raw, default_theta, raw.get("rope_local_base_freq"), default)


ARCHITECTURE = Architecture(
    "gemma3_text",
    "Gemma3ForCausalLM",
    accepted={"hidden_activation": (GELU_TANH,)},
    read_rope=_read_rope,
    classifier_class="Gemma3TextForSequenceClassification",
)
