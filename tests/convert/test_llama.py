"""Tests of config.json for Llama: rope scaling and invalid values."""

import contextlib
import dataclasses
import math
from typing import Any

import pytest
import torch

from ligerzoo.convert import architecture_of
from ligerzoo.errors import ConfigError
from ligerzoo.models import Llama, LlamaConfig
from tests.models.tiny_llama import LLAMA, LLAMA3_SCALING, LONGROPE, YARN

NONSENSE = [-1, 0, True, "8", 1.5, math.nan, math.inf, 10**400, 2**31, [], [1], ["a"], {"a": 1}, "x" * 10**5]


def try_out(raw: dict[str, Any]) -> None:
    """Checks that config.json gives a model that runs, or a ConfigError."""
    with contextlib.suppress(ConfigError), torch.device("meta"):
        model = Llama(architecture_of("llama").config_from_hf({**raw, "num_hidden_layers": 1}))
        assert model(torch.empty(1, 40, dtype=torch.int64)).logits.shape == (1, 40, model.config.vocab_size)
        with torch.device("cpu"):
            model.model.layers[0].self_attn.rotary(torch.arange(40)[None], torch.float32)


@pytest.mark.parametrize("scaling", [LLAMA3_SCALING, YARN, LONGROPE, {"rope_type": "dynamic", "factor": 2.0}])
def test_invalid_rope_scaling(scaling: dict[str, Any]) -> None:
    optional = (
        "rope_theta",
        "type",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "factor",
    )
    for key in {*scaling, *optional}:
        for value in (*NONSENSE, 1e-300, 1e300, None):
            try_out({**LLAMA, "rope_scaling": {**scaling, key: value}})


@pytest.mark.parametrize(
    "entry, named",
    [
        ({"vocab_size": 0}, "vocab_size: invalid value; got 0; expected an integer, 1 or more"),
        ({"hidden_size": -32}, "hidden_size"),
        ({"hidden_size": 32.0}, "hidden_size"),
        ({"intermediate_size": "56"}, "intermediate_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "num_key_value_heads: .* got 2; expected a divisor of num_attention_heads, 3"),
        ({"num_attention_heads": 64}, "head_dim"),
        ({"hidden_size": 34}, "num_attention_heads: .* got 4; expected a divisor of 34, hidden_size, or head_dim"),
        ({"head_dim": 7}, "head_dim: .* got 7; expected an even number"),
        ({"head_dim": 2**31 - 2}, "head_dim"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: .* got nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: .* expected true or false"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"bos_token_id": [1]}, "bos_token_id"),
        ({"pad_token_id": 10**30}, "pad_token_id"),
        ({"hidden_act": "gelu"}, "hidden_act: not supported; got 'gelu'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling: unknown rope type; got 'mrope'; expected one of default"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: invalid factor of rope type yarn"),
    ],
)
def test_refusals(entry: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        architecture_of("llama").config_from_hf({**LLAMA, **entry})


def test_config_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LlamaConfig().hidden_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        LlamaConfig(32000)  # type: ignore[call-arg]
