"""Converter for Gemma 2 checkpoints. Tensor names match ours. `hidden_act` is ignored."""

from ligerzoo.convert.architecture import GELU_TANH, Architecture
from ligerzoo.models.gemma2 import Gemma2, Gemma2Config

ARCHITECTURE = Architecture(
    "gemma2",
    "Gemma2ForCausalLM",
    Gemma2,
    Gemma2Config,
    activations={"hidden_activation": (GELU_TANH,)},
    accepted={"use_bidirectional_attention": (False,)},
)
