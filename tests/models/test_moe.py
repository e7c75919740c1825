"""Load-balancing loss of MoE models, and refusals of their configs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ligerzoo import AutoModel
from ligerzoo.errors import ConfigError
from ligerzoo.layers import (
    Attention,
    BiasedRouter,
    Context,
    Decoder,
    Embedding,
    Experts,
    GroupedRouter,
    Linear,
    LMHead,
    LogitRouter,
    MoE,
    PreNormBlock,
    RMSNorm,
    Router,
    SigmoidRouter,
    load_balancing_loss,
)
from ligerzoo.models import CausalLM, Mixtral, MixtralConfig, Qwen2MoeConfig, Qwen3Moe, Qwen3MoeConfig
from ligerzoo.models.config import DecoderConfig
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


@dataclass(frozen=True, kw_only=True)
class PlainConfig(DecoderConfig):
    """A user's config without fields for experts."""

    vocab_size: int = 31
    hidden_size: int = 16
    num_attention_heads: int = 2


@dataclass(frozen=True, kw_only=True)
class AskingConfig(PlainConfig):
    """A user's config that asks for the loss, under another name for the number of experts."""

    top_k: int = 2
    output_router_logits: bool = True


@dataclass(frozen=True, kw_only=True)
class WeightedConfig(AskingConfig):
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.5


class Records(nn.Module):
    """A user's mixture, which stores its logits, or not."""

    def __init__(self, stores: bool) -> None:
        super().__init__()
        self.router, self.stores = Linear(16, 4), stores

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.stores and context.router_logits is not None:
            context.router_logits.append(self.router(x).flatten(0, 1))
        return x


def layers_of_library(k: int = 2, router: Callable[..., nn.Module] = Router) -> nn.Module:
    return MoE(router(16, 4, k), Experts(16, 8, 4))


class Own(CausalLM):
    """A user's model of these mixtures."""

    def __init__(self, config: DecoderConfig, *mixtures: nn.Module) -> None:
        blocks = [
            PreNormBlock(RMSNorm(16), Attention(16, 2, rotary=None), RMSNorm(16), mixture) for mixture in mixtures
        ]
        super().__init__(config, Decoder(Embedding(31, 16), blocks, RMSNorm(16)), LMHead(16, 31))


@pytest.mark.parametrize("config, weight", [(PlainConfig, 0.001), (AskingConfig, 0.001), (WeightedConfig, 0.5)])
@pytest.mark.parametrize("router", [Router, SigmoidRouter, BiasedRouter, GroupedRouter, LogitRouter])
def test_models_of_users_add_the_load_balancing_loss(config: Any, weight: float, router: Any) -> None:
    model, tokens = Own(config(), *(layers_of_library(2, router) for _ in range(2))), torch.randint(31, (2, 9))
    asked = {"output_router_logits": True} if config is PlainConfig else {}
    mask = torch.ones_like(tokens).index_fill(1, torch.tensor([7, 8]), 0)
    labels = tokens.masked_fill(mask == 0, -100)
    inputs: dict[str, Any] = {"attention_mask": mask, "labels": labels}
    without, out = model(tokens, **inputs, output_router_logits=False), model(tokens, **inputs, **asked)
    assert without.aux_loss is None
    torch.testing.assert_close(out.aux_loss, load_balancing_loss(out.router_logits, 2, mask))
    torch.testing.assert_close(out.loss, without.loss + weight * out.aux_loss)
    gradients = torch.autograd.grad(out.aux_loss, [layer.mlp.gate.weight for layer in model.model.layers])
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_routers_of_users_add_it_too() -> None:
    model, tokens = Own(WeightedConfig(), Records(True)), torch.randint(31, (2, 9))
    assert model(tokens, labels=tokens).aux_loss > 0.5
    router = Records(True)
    router.num_experts_per_token = 2
    assert Own(AskingConfig(), router)(tokens, labels=tokens).aux_loss > 0.5
    Own.aux_loss_weight, before = 7.0, Own.aux_loss_weight
    try:
        assert Own(AskingConfig(), Records(True)).aux_loss_weight == 7.0
        assert Own(WeightedConfig(), Records(True)).aux_loss_weight == 0.5
    finally:
        Own.aux_loss_weight = before


@pytest.mark.parametrize(
    "config, mixtures, message",
    [
        (WeightedConfig, [Records(False)], "output_router_logits: no layer of Own has router logits.*context.router_l"),
        (
            AskingConfig,
            [Records(True)],
            r"output_router_logits: unknown number of experts.*num_experts_per_tok of .*AskingConfig",
        ),
        (
            AskingConfig,
            [layers_of_library(2), layers_of_library(3)],
            "output_router_logits: .*; expected .* one num_experts_per_token of all routers",
        ),
        (
            WeightedConfig,
            [layers_of_library(), MoE(Router(16, 3, 2), Experts(16, 8, 3))],
            r"router_logits have shapes \[\(18, 3\), \(18, 4\)\]",
        ),
    ],
)
def test_a_load_balancing_loss_that_is_not_defined_is_refused(config: Any, mixtures: Any, message: str) -> None:
    tokens = torch.randint(31, (2, 9))
    with pytest.raises(ValueError, match=message):
        Own(config(), *mixtures)(tokens, labels=tokens)


def test_a_config_without_mixtures_needs_no_router_logits() -> None:
    """As transformers, such a checkpoint asks for them in vain."""
    config = Qwen3MoeConfig(
        vocab_size=31, hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8, output_router_logits=True, mlp_only_layers=[0],
    )  # fmt: skip
    tokens = torch.arange(5)[None]
    out = Qwen3Moe(config)(tokens, labels=tokens)
    assert (out.aux_loss, out.router_logits) == (None, None)


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
