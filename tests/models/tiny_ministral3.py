"""Tiny text checkpoints of Ministral 3."""

from collections.abc import Iterator
from functools import partial

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.tiny_mistral import MISTRAL
from tests.models.variants import variant

ROPE = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 9,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
MINISTRAL3 = {
    **{key: value for key, value in MISTRAL.items() if key not in ("rope_theta", "torch_dtype")},
    "architectures": ["Ministral3ForCausalLM"],
    "dtype": "float32",
    "max_position_embeddings": 144,
    "model_type": "ministral3",
    "pad_token_id": None,  # transformers gives the embedding of its default, 11, no gradient
    "rope_parameters": ROPE,
}


def ministrals() -> Iterator[Tiny]:
    ministral3 = partial(variant, MINISTRAL3)
    yield ministral3("plain")
    yield ministral3(
        "no rope entry",
        {"rope_theta": 55.0, "head_dim": 128, "num_attention_heads": 8},
        absent=("rope_parameters", "num_key_value_heads", "rms_norm_eps", "sliding_window", "tie_word_embeddings"),
        stored_dtype=torch.bfloat16,
    )
    yield ministral3("saved by transformers", {"num_key_value_heads": 1}, by_transformers=True, shards=2)
    yield ministral3(
        "sliding window, tied, transformers 4 spelling",
        {
            "rope_scaling": {key: value for key, value in ROPE.items() if key not in ("rope_theta", "rope_type")},
            "rope_theta": 400.0,
            "sliding_window": 11,
            "tie_word_embeddings": True,
        },
        absent=("rope_parameters",),
        tensors=without(HEAD),
    )
    of_queries = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 7}
    yield ministral3("query scaling only", {"rope_parameters": {"rope_type": "default", **of_queries}})
    from_the_context = {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.3}
    yield ministral3("no original context", {"rope_parameters": from_the_context, "max_position_embeddings": 24})


CHECKPOINTS = list(ministrals())
