"""Weight-only quantization with torchao: all linear layers and the head, generation, gradients, and saving."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

pytest.importorskip("torchao")

from torchao.prototype.safetensors.safetensors_support import (
    flatten_tensor_state_dict,
    unflatten_tensor_state_dict,
)
from torchao.quantization import Float8WeightOnlyConfig, FqnToConfig, Int8WeightOnlyConfig, quantize_

from ligerzoo.errors import CheckpointError
from ligerzoo.integrations.torchao import is_linear
from ligerzoo.layers import LMHead
from ligerzoo.models import (
    CausalLM,
    Ernie4_5Moe,
    Ernie4_5MoeConfig,
    Gemma2,
    Gemma2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1,
}  # fmt: skip

MODELS: dict[str, Callable[[], CausalLM]] = {
    "llama": lambda: Llama(LlamaConfig(**SIZES)),
    "tied llama": lambda: Llama(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "gemma2": lambda: Gemma2(Gemma2Config(**SIZES, head_dim=8, sliding_window=8)),
    "mixtral": lambda: Mixtral(MixtralConfig(**SIZES, num_experts=4)),
    "head with a bias": lambda: with_bias(Ernie4_5Moe(Ernie4_5MoeConfig(**SIZES, num_experts=8, use_bias=True))),
}
CONFIGS = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}

every_model = pytest.mark.parametrize("name", MODELS)
every_config = pytest.mark.parametrize("config", CONFIGS)


def with_bias(model: CausalLM) -> CausalLM:
    assert model.lm_head.bias is not None
    nn.init.normal_(model.lm_head.bias)
    return model


def quantized(model: CausalLM, config: str) -> CausalLM:
    quantize_(model, CONFIGS[config](), filter_fn=is_linear)
    return model


def with_dequantized_weights(model: CausalLM) -> CausalLM:
    """Returns a plain model with the dequantized weights of a model."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if is_linear(module, ""):
            module.weight = nn.Parameter(module.weight.dequantize())
    return plain


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(SIZES["vocab_size"], (2, 12))


@every_config
@every_model
def test_results_are_those_of_the_dequantized_weights(name: str, config: str, ids: Tensor) -> None:
    model = quantized(MODELS[name](), config)
    plain = with_dequantized_weights(model)
    for module_name, module in model.named_modules():
        if is_linear(module, module_name):
            assert type(module.weight) not in (Tensor, nn.Parameter), module_name
    assert type(model.lm_head.weight) is not nn.Parameter
    assert type(model.model.embed_tokens.weight) is nn.Parameter
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    torch.testing.assert_close(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    assert torch.equal(model.generate(ids, max_new_tokens=6), plain.generate(ids, max_new_tokens=6))


@every_config
def test_results_are_close_to_those_before_quantization(config: str, ids: Tensor) -> None:
    model = MODELS["llama"]()
    expected = model(ids).logits
    error = (quantized(model, config)(ids).logits - expected).norm() / expected.norm()
    assert 0 < error < {"int8": 0.02, "float8": 0.08}[config]


@every_config
def test_experts_compute_with_dequantized_weights(config: str, ids: Tensor) -> None:
    model = MODELS["mixtral"]()
    quantize_(model, FqnToConfig({r"re:.*\.experts\.(gate_up|down)_proj": CONFIGS[config]()}), filter_fn=None)
    plain = copy.deepcopy(model)
    for block in plain.model.layers:
        for name, parameter in block.mlp.experts.named_parameters():
            assert type(parameter) is not nn.Parameter
            setattr(block.mlp.experts, name, nn.Parameter(parameter.dequantize()))
    torch.testing.assert_close(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)


def test_without_the_filter_the_head_keeps_its_precision(ids: Tensor) -> None:
    model = MODELS["llama"]()
    quantize_(model, Int8WeightOnlyConfig())
    assert type(model.lm_head.weight) is nn.Parameter
    assert torch.isfinite(model(ids, labels=ids).loss)


@every_config
@every_model
def test_gradients_of_the_other_parameters_are_right(name: str, config: str, ids: Tensor) -> None:
    """Quantized weights are frozen; what is not quantized, such as norms, embeddings and adapters, trains."""
    model = quantized(MODELS[name](), config)
    plain = with_dequantized_weights(model)
    model(ids, labels=ids).loss.backward()
    plain(ids, labels=ids).loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(trained)
    assert not [name for name in trained if type(model.get_parameter(name)) is not nn.Parameter]
    for parameter in trained:
        torch.testing.assert_close(model.get_parameter(parameter).grad, expected[parameter])


def test_the_state_dict_saves_and_loads(ids: Tensor, tmp_path: Path) -> None:
    model = quantized(MODELS["llama"](), "int8")
    expected = model(ids).logits
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = MODELS["llama"]()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), assign=True)
    assert torch.equal(loaded(ids).logits, expected)


@every_config
def test_the_state_dict_saves_to_safetensors_with_torchao(config: str, ids: Tensor, tmp_path: Path) -> None:
    model = quantized(MODELS["llama"](), config)
    expected = model(ids).logits
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = list(file.keys())
        state, rest = unflatten_tensor_state_dict({k: file.get_tensor(k) for k in names}, file.metadata())
    assert not rest
    loaded = MODELS["llama"]()
    loaded.load_state_dict(state, assign=True)
    assert torch.equal(loaded(ids).logits, expected)


@every_config
@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_save_pretrained_refuses_a_quantized_model(name: str, config: str, tmp_path: Path) -> None:
    model = quantized(MODELS[name](), config)
    with pytest.raises(CheckpointError, match=r"q_proj.*got (Int8|Float8)Tensor.*Save the model before you quantize"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists() or not list((tmp_path / "model").iterdir())


def test_the_head_shows_its_sizes() -> None:
    model = quantized(MODELS["llama"](), "int8")
    assert isinstance(model.lm_head, LMHead)
    assert "64" in repr(model.lm_head)
