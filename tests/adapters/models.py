"""Tiny models for the tests of adapters."""

from typing import Any

import torch
from torch import Tensor

from ligerzoo.layers.lora import LoRALayer
from ligerzoo.models import (
    CausalLM,
    Gemma2,
    Gemma2Config,
    GptOss,
    GptOssConfig,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    Phi3,
    Phi3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1,
}  # fmt: skip


def llama(**options: Any) -> Llama:
    return Llama(LlamaConfig(**{**SIZES, **options})).eval()


def mixtral(**options: Any) -> Mixtral:
    return Mixtral(MixtralConfig(**{**SIZES, "num_experts": 4, **options})).eval()


def phi3() -> Phi3:
    return Phi3(Phi3Config(**SIZES)).eval()


def gemma2() -> Gemma2:
    """Has tied weights, a scaled embedding and soft caps."""
    return Gemma2(Gemma2Config(**SIZES, head_dim=8, sliding_window=8)).eval()


def gpt_oss() -> GptOss:
    """Has a router with a bias."""
    model = GptOss(GptOssConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2)).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.bias)
    return model


def token_ids(rows: int = 2, tokens: int = 9) -> Tensor:
    return torch.randint(3, SIZES["vocab_size"], (rows, tokens))


def randomize(model: CausalLM, scale: float = 0.2) -> None:
    """Changes the updates, which have no effect when they are new."""
    for layer in model.modules():
        if isinstance(layer, LoRALayer):
            for name, parameter in layer.update_parameters().items():
                noise = scale * torch.randn_like(parameter)
                parameter.data = parameter + noise.abs() if "magnitude" in name else noise


def gradients(model: CausalLM, ids: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of the loss by name, and clears them."""
    model(ids, labels=ids).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
