import copy
import re

import pytest
import torch
from torch import nn

from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.layers import set_backend
from ligerzoo.models import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab_size=33, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
TOKENS = torch.arange(6)[None]


@pytest.mark.skipif(INTERPRETING, reason="there Triton serves a CPU too")
def test_set_backend_affects_one_model_only() -> None:
    """On a CPU only the model set to Triton fails, in its first layer."""
    one, other = Llama(CONFIG), Llama(CONFIG)
    set_backend(one, "triton")
    other(TOKENS, labels=TOKENS).loss.backward()
    with pytest.raises(ValueError, match='backend="triton"'):
        one(TOKENS)
    with pytest.raises(ValueError, match='backend="triton"'):
        copy.deepcopy(one)(TOKENS)
    set_backend(one, "torch")
    assert torch.isfinite(one(TOKENS, labels=TOKENS).loss)


@pytest.mark.skipif(INTERPRETING, reason="there Triton serves a CPU too")
def test_every_layer_with_a_kernel_has_a_backend() -> None:
    """If any one of them is set to Triton, the model fails on a CPU."""
    model = Llama(CONFIG)
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "backend")}
    for name in ("model.norm", "model.layers.1.self_attn", "model.layers.0.mlp", "lm_head"):
        set_backend(model, "auto")
        layers[name].backend = "triton"  # type: ignore[assignment]
        with pytest.raises(ValueError, match='backend="triton"'):
            model(TOKENS, labels=TOKENS)


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match=re.escape('backend=\'cuda\'; expected "auto", "triton" or "torch"')):
        set_backend(Llama(CONFIG), "cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear contains no layer with a backend"):
        set_backend(nn.Linear(2, 2), "torch")
