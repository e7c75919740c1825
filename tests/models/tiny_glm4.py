"""Tiny GLM-4-0414 checkpoints."""

from collections.abc import Iterator
from functools import partial

import torch

from tests.models.tiny import Tiny
from tests.models.tiny_glm import FEW_KEYS, GLM
from tests.models.variants import variant

glm4 = partial(variant, {**GLM, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4"})


def glm4s() -> Iterator[Tiny]:
    yield glm4("plain")
    yield glm4("minimal config", {"hidden_size": 16}, absent=FEW_KEYS)
    yield glm4("no biases", {"attention_bias": False, "rms_norm_eps": 1e-05, "num_key_value_heads": 1})
    yield glm4("saved by transformers, bf16", stored_dtype=torch.bfloat16, shards=2, by_transformers=True)


CHECKPOINTS = list(glm4s())
