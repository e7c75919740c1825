"""Entries of config.json that transformers ignores or that change the head: refused by name."""

import pytest

from ligerzoo.convert import architecture_of
from ligerzoo.errors import ConfigError


@pytest.mark.parametrize(
    "model_type, name, value",
    [
        ("apertus", "post_norm", True), ("apertus", "qk_norm", False), ("apertus", "mlp_bias", True),
        ("ernie4_5", "compression_ratio", 2.0), ("ernie4_5_moe", "moe_gate", "top2_fused"),
        ("ernie4_5_moe", "moe_use_aux_free", False), ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "norm_topk_prob", True), ("deepseek_v2", "moe_layer_freq", 2), ("deepseek_v2", "n_group", 8),
        ("deepseek_v2", "topk_method", "noaux_tc"), ("deepseek_v2", "rope_interleave", False),
        ("deepseek_v2", "mlp_bias", True), ("mellum", "rope_theta", 7.0), ("mellum", "rope_scaling", {"factor": 2.0}),
        ("mellum", "use_sliding_window", False), ("flint", "partial_rotary_factor", 0.5),
        ("granite_swa", "partial_rotary_factor", 0.5), ("kolibri1", "mlp_only_layers", [0]),
        ("muse_glimmer_text", "partial_rotary_factor", 0.5), ("muse_glimmer_text", "hidden_activation", "gelu"),
        ("exaone", "activation_function", "gelu"), ("exaone", "partial_rotary_factor", 0.5),
        ("sarvam_mla", "use_qkv_bias", True), ("sarvam_moe", "use_bias", True),
        ("sarvam_moe", "score_function", "softmax"), ("sarvam_moe", "moe_router_enable_expert_bias", False),
    ],
)  # fmt: skip
def test_refused_by_name(model_type: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: not supported"):
        architecture_of(model_type).config_from_hf({name: value})


@pytest.mark.parametrize(
    "parameters, name",
    [
        ({"rope_type": "default", "rope_theta": 7.0}, "rope_type"),
        ({"full_attention": {"rope_theta": 7.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"sliding_attention": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters, sliding_attention"),
    ],
)
def test_parameters_of_a_layer_type_that_mellum_refuses(parameters: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: not supported"):
        architecture_of("mellum").config_from_hf({"rope_parameters": parameters})


def test_groups_of_a_deepseek_v2_with_too_few_experts_are_refused() -> None:
    """Transformers would select experts with scores of 0."""
    entries = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 1, "num_experts_per_tok": 9}
    with pytest.raises(ConfigError, match="topk_group: more experts per token than the selected groups have"):
        architecture_of("deepseek_v2").config_from_hf(entries)


@pytest.mark.parametrize("thetas", [[0, 7.0], [0, 1e4, 1e4], 1e4])
def test_bases_of_single_layers_that_transformers_ignores(thetas: object) -> None:
    """Where a layer of Muse Glimmer has a base, transformers rotates by that of all layers."""
    entries = {"num_hidden_layers": 2, "layer_rope_theta": thetas}
    with pytest.raises(ConfigError, match=r"layer_rope_theta: invalid rotary bases; .* each 0 or rope_theta, 10000\.0"):
        architecture_of("muse_glimmer_text").config_from_hf(entries)


@pytest.mark.parametrize(
    "model_type, name",
    [
        *((name, "attention_multiplier") for name in ("granite", "granite_swa", "granitemoe_swa", "granitemoehybrid")),
        ("falcon_h1", "key_multiplier"), ("hyperclovax", "attention_multiplier"),
        ("muse_glimmer_text", "qk_scale_factor"),
    ],
)  # fmt: skip
def test_scores_without_a_scale_are_refused(model_type: str, name: str) -> None:
    """PyTorch's attention returns NaN for a scale of 0."""
    with pytest.raises(ConfigError, match=rf"{name}: invalid value; got 0\.0; expected a positive number"):
        architecture_of(model_type).config_from_hf({name: 0.0})


def test_a_value_that_may_only_be_absent_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"clip_qkv: not supported; got 8\.0; expected no entry$"):
        architecture_of("olmoe").config_from_hf({"clip_qkv": 8.0})
