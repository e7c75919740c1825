"""Load-balancing loss of MoE models, and refusals of their configs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ligerzoo import AutoModel
from ligerzoo.errors import ConfigError
from ligerzoo.layers import Router, SigmoidRouter, load_balancing_loss
from ligerzoo.models import Mixtral, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from ligerzoo.models.moe import MoECausalLM, MoEConfig
from tests.models.tiny import Tiny
from tests.models.zoo import CHECKPOINTS

BALANCED = [row for row in CHECKPOINTS if row.config.get("output_router_logits")]
VOCABULARY = 101


@pytest.fixture(scope="module", params=BALANCED, ids=str)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[MoECausalLM, Any]:
    row: Tiny = request.param
    path = tmp_path_factory.mktemp("checkpoint")
    row.write(path)
    theirs: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    ours = AutoModel.from_pretrained(path)
    assert isinstance(ours, MoECausalLM)
    return ours, theirs


def padded(side: str | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns tokens, padding mask and labels."""
    tokens = torch.randint(VOCABULARY, (2, 40))
    if side is None:
        return tokens, None, tokens
    mask = torch.ones_like(tokens)
    mask[1, slice(None, 9) if side == "left" else slice(-9, None)] = 0
    return tokens, mask, tokens.masked_fill(mask == 0, -100)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_loss_matches_transformers(models: tuple[MoECausalLM, Any], side: str | None) -> None:
    tokens, mask, labels = padded(side)
    with torch.no_grad():
        got, expected = (model(tokens, attention_mask=mask, labels=labels) for model in models)
        without_labels = models[0](tokens, attention_mask=mask)
    assert got.aux_loss > 0.5
    torch.testing.assert_close(got.aux_loss, expected.aux_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=0)
    assert torch.equal(without_labels.aux_loss, got.aux_loss)


def balance_of(model: MoECausalLM, run: Callable[[], object], padding_mask: Tensor | None = None) -> Tensor:
    """Returns the load-balancing loss of the last tokens, from the router logits of a forward."""
    logits: list[Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, Router | SigmoidRouter)]
    hooks = [router.register_forward_hook(lambda _, __, out: logits.append(out[0]) and None) for router in routers]
    run()
    for hook in hooks:
        hook.remove()
    return load_balancing_loss(logits, model.config.num_experts_per_tok, padding_mask)


@torch.no_grad()
def test_cached_tokens_count_once(models: tuple[MoECausalLM, Any]) -> None:
    ours, _ = models
    tokens, mask, _ = padded("right")
    assert mask is not None
    for cache in (ours.new_cache(), ours.new_cache(capacity=50)):
        ours(tokens[:, :23], attention_mask=mask[:, :23], past_key_values=cache)
        got: list[Tensor] = []

        def rest(got: list[Tensor] = got, cache: Any = cache) -> None:
            got.append(ours(tokens[:, 23:], attention_mask=mask, past_key_values=cache).aux_loss)

        assert torch.equal(balance_of(ours, rest, mask[:, 23:]), got[0])


@torch.no_grad()
def test_padding_after_segments_is_excluded(models: tuple[MoECausalLM, Any]) -> None:
    ours, _ = models
    tokens = torch.randint(VOCABULARY, (1, 40))
    bounds = torch.tensor([0, 17, 33])
    got, expected = (ours(tokens[:, :end], cu_seqlens=bounds).aux_loss for end in (40, 33))
    torch.testing.assert_close(got, expected)


def test_gradient_checkpointing(models: tuple[MoECausalLM, Any]) -> None:
    ours, _ = models
    tokens, mask, labels = padded("left")
    found = []
    for switch in (ours.gradient_checkpointing_disable, ours.gradient_checkpointing_enable):
        switch()
        ours.zero_grad()
        ours(tokens, attention_mask=mask, labels=labels).loss.backward()
        found.append({name: weight.grad.clone() for name, weight in ours.named_parameters()})
    ours.gradient_checkpointing_disable()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_no_aux_loss_by_default() -> None:
    tiny = MixtralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=8
    )
    assert Mixtral(tiny)(torch.arange(5)[None]).aux_loss is None


@pytest.mark.parametrize(
    "config, entries, named",
    [
        (MixtralConfig, {"num_experts_per_tok": 9}, "num_experts_per_tok: .* got 9; expected at most num_experts, 8"),
        (MixtralConfig, {"num_experts": 0}, "num_experts"),
        (MixtralConfig, {"output_router_logits": 1}, "output_router_logits"),
        (MixtralConfig, {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef"),
        (MixtralConfig, {"router_jitter_noise": 1}, "router_jitter_noise: .* got 1; expected a number in \\[0, 1\\)"),
        (MixtralConfig, {"router_jitter_noise": math.nan}, "router_jitter_noise"),
        (Qwen2MoeConfig, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        (Qwen2MoeConfig, {"layer_types": ["full_attention"]}, "layer_types: .* a list of 24"),
        (Qwen3MoeConfig, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (Qwen3MoeConfig, {"mlp_only_layers": 3}, "mlp_only_layers: .* got 3; expected a list of integers"),
        (Qwen3MoeConfig, {"mlp_only_layers": [1, "2"]}, "mlp_only_layers"),
    ],
)
def test_refusals(config: type[MoEConfig], entries: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config(**entries)
