"""The models that are examined where none is given: a few layers of common shapes with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ligerzoo.models import CausalLM, Llama, LlamaConfig, Qwen3, Qwen3Config, Qwen3Moe, Qwen3MoeConfig

SHARED: Mapping[str, int] = {"num_hidden_layers": 2, "vocab_size": 32000, "max_position_embeddings": 4096}
HEADS: Mapping[str, int] = {"num_attention_heads": 32, "num_key_value_heads": 8}
EXPERTS: Mapping[str, int] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}

ON_A_CPU: Mapping[str, int] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "vocab_size": 500,
}
"""What replaces the sizes of layers on a CPU. Heads keep their size."""


def default_models(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, CausalLM]]:
    """Yields the name and the model of 2 layers each of Llama 3.2 1B, Qwen3 8B and Qwen3 30B-A3B.

    Their vocabulary has 32,000 tokens. On a CPU, layers have the sizes `ON_A_CPU`.
    """
    table: tuple[tuple[str, Any, Any, Mapping[str, int]], ...] = (
        ("Llama 3.2 1B", Llama, LlamaConfig, {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}),
        ("Qwen3 8B", Qwen3, Qwen3Config, {"hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}),
        ("Qwen3 30B-A3B", Qwen3Moe, Qwen3MoeConfig, {"hidden_size": 2048, "head_dim": 128, **EXPERTS}),
    )
    for name, model_class, config_class, sizes in table:
        entries = {**SHARED, **HEADS, **sizes}
        if device.type == "cpu":
            name = f"{name}, small"
            entries |= {key: value for key, value in ON_A_CPU.items() if key in entries}
        model: Any = model_class(config_class(**entries), device=device, dtype=dtype)
        yield f"2 layers of {name}", model.eval()
