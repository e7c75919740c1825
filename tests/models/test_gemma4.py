"""Tests of Gemma 4 beyond those of every architecture: shared keys and values, per-layer embeddings, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo import AutoModel
from ligerzoo.convert import architecture_of
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.layers import Context
from ligerzoo.models import CausalLM, Gemma4TextConfig
from tests.models.comparing import all_gradients
from tests.models.tiny_gemma4_text import CHECKPOINTS, FULL, GEMMA4_TEXT, MIXTURE, SLIDING, TIED


def tiny(**changes: Any) -> CausalLM:
    config = architecture_of("gemma4_text").config_from_hf({**GEMMA4_TEXT, **changes})
    model: CausalLM = AutoModel.from_config(config, dtype=torch.float32)
    model.init_weights(0.2)
    return model


def inputs(model: CausalLM) -> dict[str, Tensor]:
    tokens = torch.randint(model.config.vocab_size, (2, 24))
    return {"input_ids": tokens, "labels": tokens}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


@pytest.mark.parametrize(
    "changes", [{}, {**MIXTURE, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}], ids=["dense", "mixture"]
)
def test_recomputed_blocks_have_the_same_gradients(changes: dict[str, Any]) -> None:
    """The keys and values of a recomputed block reach the blocks that share them, and get their gradients."""
    model = tiny(**changes).train()
    given = inputs(model)
    expected = all_gradients(model, **given)
    assert expected["model.layers.1.self_attn.k_proj.weight"].abs().max() > 0
    model.gradient_checkpointing_enable()
    assert_equal(all_gradients(model, **given), expected)
    model.gradient_checkpointing_disable()
    for level in (Recompute.ELEMENTWISE, Recompute.MLP):
        model.model.activation_plan = (level,) * 4
        assert_equal(all_gradients(model, **given), expected)
    model.model.activation_plan = (Recompute.BLOCK, Recompute.NOTHING, Recompute.MLP, Recompute.BLOCK)
    assert_equal(all_gradients(model, **given), expected)


@torch.no_grad()
def test_tokens_can_be_removed_from_a_cache_of_fixed_size() -> None:
    """The layers that share keys and values have caches without tokens."""
    model = tiny()
    tokens = torch.randint(101, (1, 24))
    whole = model(tokens).logits
    for cache in (model.new_cache(capacity=40), model.new_cache()):
        if not cache.is_static:
            cache.keep_all_tokens()
        model(tokens[:, :12], past_key_values=cache)
        if cache.is_static:
            cache.set_length(12)
        model(torch.randint(101, (1, 5)), past_key_values=cache)
        cache.remove_last(5)
        got = torch.cat([model(piece, past_key_values=cache).logits for piece in tokens[:, 12:].split([1, 11], 1)], 1)
        torch.testing.assert_close(got, whole[:, 12:])
        assert cache.length == 24


def test_caches_hold_keys_and_values_once() -> None:
    model = tiny(**TIED)
    cache = model.new_cache(capacity=40)
    with torch.no_grad():
        model(torch.randint(101, (1, 24)), past_key_values=cache)
    assert cache.nbytes == 40 * 4 * 2 * (2 * 16 + 1 * 32)
    features = [layer.self_attn.cached_features for layer in model.model.layers]
    assert features == [2 * 2 * 16, 2 * 32, 0, 0]


@torch.no_grad()
def test_embeddings_need_the_inputs_of_the_blocks() -> None:
    model = tiny()
    tokens = torch.randint(101, (2, 9))
    x = model.model.embed_tokens(tokens)
    with pytest.raises(LigerzooError, match="per-layer embeddings need token ids; got embeddings; expected input_ids"):
        model(inputs_embeds=x)
    context = Context(x)
    context.block_inputs = model.model.block_inputs(x, model.model.embed_tokens_per_layer(tokens))
    torch.testing.assert_close(model.model(x, context), model.model(tokens), rtol=0, atol=0)
    plain = tiny(hidden_size_per_layer_input=0)
    torch.testing.assert_close(plain(inputs_embeds=plain.model.embed_tokens(tokens)).logits, plain(tokens).logits)


@torch.no_grad()
def test_trained_keys_are_saved(tmp_path: Path) -> None:
    """Loading keeps unused projections of the layers that share keys, but not those of the others, which change."""
    CHECKPOINTS[-1].write(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert {name.split(".")[2] for name in model.origin.extra_tensors} == {"3"}
    for parameter in model.parameters():
        parameter += 1
    model.save_pretrained(tmp_path)
    assert_equal(AutoModel.from_pretrained(tmp_path).state_dict(), model.state_dict())


OTHER_SIZES = {"1": {"head_dim": 32}, "3": {"head_dim": 48}}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers: .*got 3; expected fewer layers"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: .*got 4"),
        ({"layer_types": [SLIDING, SLIDING, SLIDING, FULL]}, "num_kv_shared_layers: .*got 2"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "num_global_key_value_heads: .*divisor .* 4"),
        ({"per_layer_config": OTHER_SIZES}, "per_layer_config: not supported.*equal for all full-attention layers"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config: not supported"),
        ({"per_layer_config": {"01": {"head_dim": 32}, "02": {"head_dim": 32}}}, "per_layer_config: not supported"),
        ({"per_layer_config": {str(i): {"sliding_window": 3} for i in (1, 3)}}, "per_layer_config: not supported"),
        ({"per_layer_config": {"9" * 5000: {}}}, "per_layer_config: not supported"),
        ({"per_layer_config": {"1": {}}, "num_hidden_layers": 2**31 - 1, "layer_types": None}, "per_layer_config"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input: .*at least vocab_size, 101"),
        ({"use_bidirectional_attention": True}, 'use_bidirectional_attention: .*"all" or "vision"'),
        ({"hidden_activation": "silu"}, "hidden_activation: not supported"),
        ({"global_head_dim": 33}, "head_dim: invalid number of rotated features; got 33"),
        ({"head_dim": 15}, "head_dim: invalid number of rotated features; got 15"),
        ({**MIXTURE, "top_k_experts": None}, "num_experts_per_tok: .*enable_moe_block"),
        ({**MIXTURE, "top_k_experts": 9}, "num_experts_per_tok: .*got 9; expected at most num_experts, 8"),
        ({"rope_theta": 5.0}, "rope_theta: not supported; got 5.0.* Use rope_parameters"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 5.0}}}, "rope_parameters, full_attention: missing"),
        ({"rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}}, "partial"),
        ({"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 1.5}}}, "at most 1"),
        (
            {"rope_parameters": {FULL: {"rope_theta": 5.0}, SLIDING: {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters, sliding_attention: not supported",
        ),
    ],
)
def test_refused_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture_of("gemma4_text").config_from_hf({**GEMMA4_TEXT, **changes})


@pytest.mark.parametrize("layers", [1, 5, 6, 7, 30])
def test_the_last_layer_uses_full_attention(layers: int) -> None:
    config = Gemma4TextConfig(num_hidden_layers=layers)
    full = [i for i in range(layers) if not config.is_sliding(i)]
    assert full == sorted({*range(5, layers, 6), layers - 1})
    sizes = {f"{i:02}": {"head_dim": 24} for i in full}
    read = architecture_of("gemma4_text").config_from_hf({"num_hidden_layers": layers, "per_layer_config": sizes})
    assert (read.global_head_dim, read.head_dim) == (24, 256)


def test_no_sizes_per_layer_are_those_of_all_layers() -> None:
    """As transformers writes it if both kinds of layers have heads of one size."""
    read = architecture_of("gemma4_text").config_from_hf({"per_layer_config": {}, "head_dim": 64})
    assert read.global_head_dim == 64
    assert architecture_of("gemma4_text").config_from_hf({}).global_head_dim == 512
