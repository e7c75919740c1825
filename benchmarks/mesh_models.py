"""The shapes of the models that are trained, or predicted, on many GPUs."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.memory import LLAMA_8B
from benchmarks.meshes import EXPERTS
from ligerzoo.models import CausalLM, Llama, LlamaConfig, Qwen3Moe, Qwen3MoeConfig

MODELS: dict[str, dict[str, Any]] = {
    "8B": LLAMA_8B,
    "30B-A3B": EXPERTS | {"num_hidden_layers": 48},
    "70B": LLAMA_8B
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "235B-A22B": EXPERTS
    | {
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
}
"""The shapes of Llama 3 and Qwen3."""


def build(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "meta") -> CausalLM:
    if "num_experts" in config:
        return Qwen3Moe(Qwen3MoeConfig(**config), device=device, dtype=dtype)
    return Llama(LlamaConfig(**config), device=device, dtype=dtype)
