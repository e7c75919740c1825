"""Whole models under torch.func: gradients of `functional_call`, and gradients of each sample."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from ligerzoo.errors import LigerzooError
from ligerzoo.models import (
    CausalLM,
    Gemma2,
    Gemma2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    Qwen2Moe,
    Qwen2MoeConfig,
    Qwen3,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip

SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip

MODELS: dict[str, Callable[[], CausalLM]] = {
    "llama": lambda: Llama(LlamaConfig(**SIZES)),
    "tied llama": lambda: Llama(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3(Qwen3Config(**SIZES, head_dim=8)),
    "gemma2": lambda: Gemma2(Gemma2Config(**SIZES, head_dim=8, sliding_window=8)),
    "mixtral": lambda: Mixtral(MixtralConfig(**SIZES, num_experts=4, router_aux_loss_coef=0.1)),
    "qwen2_moe": lambda: Qwen2Moe(Qwen2MoeConfig(**SIZES, **SHARED_EXPERT)),
}

BATCH, TOKENS = 3, 20


@pytest.fixture
def batch(device: str) -> dict[str, Tensor]:
    ids = torch.randint(SIZES["vocab_size"], (BATCH, TOKENS), device=device)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, -4:], labels[0, -4:], labels[1, :5] = 0, -100, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def assert_gradients_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        assert e.abs().max() > 0, name
        torch.testing.assert_close(actual[name], e, rtol=1e-4, atol=1e-5 * float(e.abs().max()))


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_autograd_s(name: str, masked: bool, batch: dict[str, Tensor], device: str) -> None:
    model = MODELS[name]().to(device)
    if not masked:
        del batch["attention_mask"]

    def loss(parameters: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (), batch).loss

    def by_autograd(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(model(**batch).loss, list(parameters.values()))
        return dict(zip(parameters, gradients, strict=True))

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    assert_gradients_close(grad(loss)(parameters, batch), by_autograd(batch))

    def loss_of_sample(parameters: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        return loss(parameters, {name: t[None] for name, t in sample.items()})

    per_sample = vmap(grad(loss_of_sample), (None, 0))(parameters, batch)
    for i in range(BATCH):
        expected = by_autograd({name: t[i : i + 1] for name, t in batch.items()})
        assert_gradients_close({name: g[i] for name, g in per_sample.items()}, expected)


def test_vmap_over_models(batch: dict[str, Tensor], device: str) -> None:
    """An ensemble: the parameters have a dimension of models."""
    models = [MODELS["llama"]().to(device) for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(models)
    logits = vmap(lambda p: functional_call(models[0], p, (), batch).loss)({**parameters, **buffers})
    torch.testing.assert_close(logits, torch.stack([model(**batch).loss for model in models]))


def test_token_ids_outside_the_vocabulary_are_found_under_vmap(batch: dict[str, Tensor]) -> None:
    model = MODELS["llama"]()
    ids = batch["input_ids"].cpu()
    ids[1, 3] = 53
    with pytest.raises(LigerzooError, match=r"token ids outside the vocabulary.*53"):
        vmap(lambda ids: model(ids[None]).logits)(ids)
