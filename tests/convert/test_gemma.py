"""Tests of config.json for Gemma, Gemma 2 and Gemma 3: invalid values, and the two rotary embeddings of Gemma 3."""

from typing import Any

import pytest

from ligerzoo.convert import architecture_of
from ligerzoo.convert.gemma3_text import ARCHITECTURE
from ligerzoo.errors import ConfigError
from ligerzoo.models import Gemma3TextConfig

LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "model_type, entry, named",
    [
        ("gemma", {"hidden_act": "silu"}, "hidden_act: not supported; got 'silu'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: not supported"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: not supported; got 'gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: not supported"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: .* got 0; expected a positive number"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ("gemma3_text", {"hidden_activation": "relu"}, "hidden_activation"),
        ("gemma3_text", {"query_pre_attn_scalar": 1e-300}, "query_pre_attn_scalar"),
        ("gemma3_text", {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma3_text", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention: .* true or false"),
        ("gemma3_text", {"rope_parameters": [1]}, "rope_parameters: not an object"),
        ("gemma3_text", {"rope_parameters": {"full_attention": "linear"}}, "full_attention: not an object"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": LINEAR}},
            'rope_parameters, sliding_attention: not supported; .*; expected rope_type "default"',
        ),
    ],
)
def test_refusals(model_type: str, entry: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        architecture_of(model_type).config_from_hf(entry)


@pytest.mark.parametrize(
    "raw, theta, scaling, local_theta",
    [
        ({}, 1e6, None, 1e4),
        ({"rope_theta": 7.0, "rope_local_base_freq": 3.0, "rope_scaling": LINEAR}, 7.0, LINEAR, 3.0),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": None}, 1e6, LINEAR, 1e4),
        (
            {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 7.0}, "sliding_attention": None}},
            7.0,
            LINEAR,
            1e4,
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 7.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3.0},
                },
                "rope_theta": 8.0,
                "rope_local_base_freq": 4.0,
                "rope_scaling": LINEAR,
            },
            7.0,
            LINEAR,
            3.0,
        ),
    ],
)
def test_two_rotary_embeddings(raw: dict[str, Any], theta: float, scaling: object, local_theta: float) -> None:
    config = ARCHITECTURE.config_from_hf(raw)
    assert (config.rope_theta, config.rope_scaling, config.rope_local_base_freq) == (theta, scaling, local_theta)


def test_window_of_a_bidirectional_model() -> None:
    both_sides = Gemma3TextConfig(sliding_window=512, use_bidirectional_attention=True)
    assert [both_sides.window(layer) for layer in range(4, 7)] == [257, None, 257]
    assert Gemma3TextConfig(sliding_window=512).window(4) == 512
    assert Gemma3TextConfig(sliding_window=None, use_bidirectional_attention=True).window(4) is None


def test_null_head_dim_is_derived() -> None:
    config = ARCHITECTURE.config_from_hf({"head_dim": None, "num_key_value_heads": None, "hidden_size": 64})
    assert (config.head_size, config.kv_heads) == (8, 8)
