"""Random initialization of every architecture."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ligerzoo.convert import architecture_of
from ligerzoo.errors import LigerzooError
from ligerzoo.layers import (
    XIELU,
    CrossAttentionBlock,
    Decoder,
    Embedding,
    GatedMLP,
    GatedPreNormBlock,
    GatedRMSNorm,
    LayerNorm,
    Linear,
    LMHead,
    Mamba2Mixer,
    RMSNorm,
    Router,
    TileEmbedding,
    TilePositionEmbedding,
)
from ligerzoo.layers.kimi_delta_attention import ForgetGate
from ligerzoo.models import CausalLM, Llama, LlamaConfig
from tests.models.zoo import CHECKPOINTS


def new_model(model_type: str, **changes: Any) -> CausalLM:
    raw = next(row.config for row in CHECKPOINTS if row.config["model_type"] == model_type)
    architecture = architecture_of(model_type)
    return architecture.model_class(dataclasses.replace(architecture.config_from_hf(raw), **changes))  # type: ignore[call-arg]


class InitCounter(TorchFunctionMode):
    """Counts by storage how often each tensor is initialized, and keeps the tensors alive so that none share one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = kwargs["tensor"] if getattr(func, "__module__", None) == nn.init.__name__ else None
        if func in (Tensor.zero_, Tensor.fill_, Tensor.normal_, Tensor.uniform_):
            tensor = args[0]
        if tensor is not None:
            self.tensors.append(tensor)
            self.counts[tensor.data_ptr()] += 1
        return func(*args, **kwargs)


every_architecture = pytest.mark.parametrize("model_type", sorted({row.config["model_type"] for row in CHECKPOINTS}))


@every_architecture
def test_every_module_that_owns_parameters_initializes_them(model_type: str) -> None:
    for name, module in new_model(model_type).named_modules():
        if list(module.parameters(recurse=False)):
            assert hasattr(module, "init_weights"), f"{name} ({type(module).__name__}) has no init_weights"


@every_architecture
def test_each_parameter_is_initialized_once(model_type: str) -> None:
    with InitCounter() as counter:
        model = new_model(model_type, initializer_range=0.02)
    for name, parameter in model.named_parameters():
        assert counter.counts[parameter.data_ptr()] == 1, name


@every_architecture
def test_init_weights_replaces_every_value(model_type: str) -> None:
    model = new_model(model_type)
    for parameter in model.parameters():
        nn.init.constant_(parameter, math.nan)
    model.init_weights()
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name


@every_architecture
def test_meta_model_is_initialized_after_to_empty(model_type: str) -> None:
    with torch.device("meta"):
        model = new_model(model_type)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, math.nan)
    model.tie_weights()
    torch.manual_seed(3)
    model.init_weights()
    expected = new_model(model_type)
    torch.manual_seed(3)
    expected.init_weights()
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other), name


@every_architecture
def test_manual_seed_reproduces_the_weights(model_type: str) -> None:
    first, second, third = (torch.manual_seed(seed) and new_model(model_type) for seed in (0, 0, 1))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.model.embed_tokens.weight, third.model.embed_tokens.weight)


@every_architecture
@pytest.mark.parametrize("std", [0.02, 0.1])
def test_statistics(model_type: str, std: float) -> None:
    model = new_model(model_type, initializer_range=std)
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm | LayerNorm) and own == "weight":
                offset = module.weight_offset if isinstance(module, RMSNorm) else 0.0
                assert (parameter + offset == 1).all(), name
            elif isinstance(module, XIELU):
                expected = 0.8 if own == "alpha_p" else 0.3
                torch.testing.assert_close(nn.functional.softplus(parameter.data), torch.tensor([expected]))
            elif isinstance(module, ForgetGate | Mamba2Mixer) and own == "dt_bias":
                steps = nn.functional.softplus(parameter)
                assert 0.00099 < steps.min().item() < steps.max().item() < 0.101, name
            elif isinstance(module, GatedRMSNorm) or own in ("dt_bias", "D"):
                assert (parameter == 1).all(), name
            elif own == "A_log":  # of rates between 0 and 16
                assert math.log(0.01) <= parameter.min().item() < parameter.max().item() <= math.log(16), name
            elif own.endswith("bias"):
                assert (parameter == 0).all(), name
            elif isinstance(module, CrossAttentionBlock) or own == "gate":
                assert isinstance(module, CrossAttentionBlock | TileEmbedding | TilePositionEmbedding), name
                assert parameter.item() == 0, name
            elif isinstance(module, GatedPreNormBlock):
                assert 0 < abs(parameter.item()) < 5 * std, name
            else:
                n = parameter.numel()
                assert abs(parameter.mean().item()) < 5 * std / n**0.5, (name, own)
                assert abs(parameter.std().item() / std - 1) < 5 / (2 * n) ** 0.5, (name, own)


def test_modules_without_init_weights_keep_their_weights() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((8,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class Custom(CausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config, Decoder(nn.Embedding(9, 8), [], RMSNorm(8)), LMHead(8, 9), gain=Gain())

    model = Custom(LlamaConfig(initializer_range=0.5, vocab_size=9, hidden_size=8, num_attention_heads=2))
    embedding = model.model.embed_tokens.weight.clone()
    model.init_weights(0.1)
    assert (model.gain.weight == 3).all()  # type: ignore[union-attr]
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert 0.05 < model.lm_head.weight.std() < 0.2


class Own(CausalLM):
    """A user's model with torch's layers, and another part."""

    def __init__(self, config: LlamaConfig, part: nn.Module) -> None:
        norm = nn.LayerNorm(config.hidden_size)
        decoder = Decoder(nn.Embedding(config.vocab_size, config.hidden_size), [], norm)
        super().__init__(config, decoder, LMHead(config.hidden_size, config.vocab_size), part=part)


class WithParameter(Own):
    """A model that owns a parameter itself."""

    def __init__(self, config: LlamaConfig, part: nn.Module) -> None:
        super().__init__(config, part)
        self.gain = nn.Parameter(torch.ones(3))


class Initializing(WithParameter):
    """A model that initializes what it owns."""

    def init_weights(self, std: float | None = None) -> None:
        super().init_weights(std)
        nn.init.ones_(self.gain)


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(3), persistent=False)


def emptied(
    make: Callable[[LlamaConfig, nn.Module], CausalLM], part: Callable[[], nn.Module], wrapped: bool
) -> CausalLM:
    """A model built on meta, with memory that holds NaN."""
    config = LlamaConfig(vocab_size=9, hidden_size=8, num_attention_heads=2)
    with torch.device("meta"):
        model = make(config, part())
    (nn.ModuleList([model]) if wrapped else model).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            nn.init.constant_(tensor, math.nan)
    return model


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("make", [Own, Initializing])
def test_layers_of_torch_are_initialized_after_to_empty(make: Any, wrapped: bool) -> None:
    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.Identity(), Linear(8, 1))

    model = emptied(make, part, wrapped)
    model.init_weights()
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name
    assert (model.model.norm.weight == 1).all()
    assert 0.5 < model.model.embed_tokens.weight.std() < 1.5
    trained = model.part[0].weight.clone()  # type: ignore[index]
    model.init_weights()  # it has values now, which a layer of torch keeps
    assert torch.equal(model.part[0].weight, trained)  # type: ignore[index]


@pytest.mark.parametrize(
    "make, part, named",
    [
        (Own, lambda: nn.ParameterList([torch.ones(3), torch.ones(2)]), "got part.0, part.1\\. "),
        (Own, lambda: nn.Sequential(WithBuffer()), "got part.0.angles\\. "),
        (Own, lambda: nn.MultiheadAttention(8, 2), "got part.in_proj_weight, part.in_proj_bias\\. "),
        (WithParameter, nn.Identity, "got gain\\. "),
        (Own, lambda: nn.ParameterList([torch.ones(1)] * 12), r"part.9, \.\.\. "),
    ],
)
def test_what_cannot_be_initialized_after_to_empty_is_refused_by_name(make: Any, part: Any, named: str) -> None:
    with pytest.raises(LigerzooError, match=f"^init_weights of {make.__name__}: .*{named}"):
        emptied(make, part, False).init_weights()


class TemperatureRouter(Router):
    """A router with one more parameter, which `init_weights` of `Router` does not set."""

    def __init__(self) -> None:
        super().__init__(8, 4, 1, renormalize=False)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("counts", torch.zeros(4), persistent=False)
        self.init_weights()


class InitializedRouter(TemperatureRouter):
    """Its method, which reads what its constructor makes, sets both as transformers' models do."""

    def init_weights(self, std: float = 0.02) -> None:
        super().init_weights(std)
        self.temperature.data.fill_(2)
        self.counts = torch.zeros(4)


def test_parameters_that_no_init_weights_sets_are_refused_by_name_after_to_empty() -> None:
    model = emptied(Own, TemperatureRouter, False)
    message = "^TemperatureRouter 'part': init_weights of TemperatureRouter has not set temperature, counts, which"
    for _ in range(2):
        with pytest.raises(LigerzooError, match=message):
            model.init_weights()
    initialized = emptied(Own, InitializedRouter, True)
    initialized.init_weights()
    assert initialized.part.temperature == 2  # type: ignore[union-attr]
    assert all(tensor.isfinite().all() for tensor in (*initialized.parameters(), *initialized.buffers()))
    with torch.no_grad():
        initialized.model.embed_tokens.weight[0] = math.nan
    initialized.init_weights()  # it has values now, whatever they are


def test_constructors_leave_the_parameters_of_a_subclass_to_it() -> None:
    class Quiet(LMHead):
        def init_weights(self, std: float = 0.02) -> None:
            super().init_weights(std / 10)

    class Scaled(Llama):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.gain = nn.Parameter(torch.empty(3))
            self.init_weights()

        def init_weights(self, std: float | None = None) -> None:
            super().init_weights(std)
            nn.init.ones_(self.gain)

    assert InitializedRouter().temperature == 2
    assert Quiet(64, 64).weight.std().item() == pytest.approx(0.002, rel=0.1)  # no constructor, so it is complete
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    assert (Scaled(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.5)).gain == 1).all()


def test_std_argument_overrides_the_config() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )  # fmt: skip
    model = Llama(config)
    model.init_weights(0.3)
    assert model.lm_head.weight.std().item() == pytest.approx(0.3, rel=0.1)


def test_linear_and_embedding_are_torch_s_classes_with_another_initialization() -> None:
    linear, embedding = Linear(64, 256), Embedding(256, 64, padding_idx=3)
    assert isinstance(linear, nn.Linear)
    assert isinstance(embedding, nn.Embedding)
    assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (linear.bias == 0).all()
    for _ in range(2):
        assert (embedding.weight[3] == 0).all()
        embedding.init_weights(0.5)
    x = torch.randn(2, 64)
    plain = nn.Linear(64, 256)
    plain.load_state_dict(linear.state_dict())
    assert torch.equal(linear(x), plain(x))


def test_fused_mlp_accepts_both_linear_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("ligerzoo.layers.projection.compute_glu_linear", lambda *_, **__: calls.append(1))
    mlp = GatedMLP(8, 12)
    mlp(torch.randn(2, 8))
    mlp.down_proj = nn.Linear(12, 8, bias=False)  # type: ignore[assignment]
    mlp(torch.randn(2, 8))
    assert len(calls) == 2
