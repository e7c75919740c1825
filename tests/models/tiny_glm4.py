"""GLM-4-0414's checkpoints."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tests.models.tiny import Tiny
from tests.models.tiny_glm import FEW_KEYS, GLM


def glm4(name: str, changes: Mapping[str, Any] | None = None, absent: tuple[str, ...] = (), **options: Any) -> Tiny:
    config = {**GLM, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", **(changes or {})}
    return Tiny(f"glm4 {name}", {key: value for key, value in config.items() if key not in absent}, **options)


def glm4s() -> Iterator[Tiny]:
    yield glm4("plain")
    yield glm4("few keys", {"hidden_size": 16}, absent=FEW_KEYS)
    yield glm4("no biases", {"attention_bias": False, "rms_norm_eps": 1e-05, "num_key_value_heads": 1})
    yield glm4("saved by transformers, bf16", stored_dtype=torch.bfloat16, shards=2, by_transformers=True)


CHECKPOINTS = list(glm4s())
