"""Models that torchao has quantized decode through captured graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao")

from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int4Tensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerGroup,
    PerTensor,
    quantize_,
)

from ligerzoo.generate import rows as rows_module
from ligerzoo.generate import slots
from ligerzoo.generate.graphs import model_graphs
from ligerzoo.integrations.torchao import is_linear
from ligerzoo.layers.capture import can_capture
from ligerzoo.layers.quantized import as_int8, is_quantized, stored_tensors
from ligerzoo.models import CausalLM
from tests.generate.graphs import replace_graphs
from tests.generate.models import NO_END, VOCAB
from tests.generate.test_captured import build
from tests.kernels.machine import ON_GPU

CONFIGS: dict[str, Callable[[], Any]] = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}
every_config = pytest.mark.parametrize("config", CONFIGS)


class OnGPU:
    """Equals every device, and says that it is a GPU."""

    type = "cuda"

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(CausalLM, "device", OnGPU())
        monkeypatch.setattr("ligerzoo.layers.capture.uses_triton", lambda tensor, backend: True)


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch, device: str) -> Callable[..., Tensor]:
    """Generates eagerly, or through graphs, which run eagerly on a CPU."""
    if device == "cpu":
        replace_graphs(monkeypatch)

    def run(model: Any, ids: Tensor, *, capture: bool) -> Tensor:
        for module in (rows_module, slots):
            monkeypatch.setattr(module, "can_capture", lambda model: capture)
        tokens: Tensor = model.generate(ids, max_new_tokens=12, eos_token_id=NO_END, pad_token_id=0)
        return tokens

    return run


def quantized(device: str, config: Any, name: str = "llama") -> Any:
    model = build(name, device).float()
    quantize_(model, config, filter_fn=is_linear)
    return model


def int4_weight(weight: Tensor, **options: Any) -> nn.Parameter:
    """A weight of torchao's class for int4. Its products need another package."""
    rows, features = weight.shape
    data = torch.zeros(rows, features // 2, dtype=torch.int8, device=weight.device)
    scale = torch.ones(features // 16, rows, device=weight.device)
    tensor = Int4Tensor(data, scale, scale.clone(), [1, 16], weight.shape, **options)
    return nn.Parameter(tensor, requires_grad=False)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
@every_config
def test_weight_only_quantized_models_can_be_captured(name: str, config: str, device: str) -> None:
    model = quantized(device, CONFIGS[config](), name)
    assert is_quantized(model.lm_head.weight)
    assert can_capture(model)
    hook = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *arguments: None)
    assert not can_capture(model)
    hook.remove()
    assert can_capture(model)


@pytest.mark.usefixtures("on_gpu")
def test_int4_weights_can_be_captured(device: str) -> None:
    model = build("llama", device)
    layer = model.model.layers[0].mlp.up_proj
    weight = layer.weight
    layer.weight = int4_weight(weight)
    assert [tensor.dtype for tensor in stored_tensors(layer.weight)] == [torch.int8, torch.float32, torch.float32]
    assert can_capture(model)
    layer.weight = int4_weight(weight, activation_dtype=torch.float8_e4m3fn)
    assert not can_capture(model)


class OtherTensor(torch.Tensor):
    pass


@pytest.mark.usefixtures("on_gpu")
def test_other_tensor_subclasses_cannot_be_captured(device: str) -> None:
    assert can_capture(build("mixtral", device))
    assert not can_capture(quantized(device, Int8DynamicActivationInt8WeightConfig()))
    experts = build("mixtral", device).float()
    quantize_(experts, FqnToConfig({r"re:.*\.experts\.(gate_up|down)_proj": Int8WeightOnlyConfig()}), filter_fn=None)
    assert is_quantized(experts.model.layers[0].mlp.experts.down_proj)
    assert not can_capture(experts)
    for name in ("q_proj.weight", "q_proj.bias"):
        model = build("llama", device)
        module, _, parameter = name.partition(".")
        other = nn.Parameter(torch.zeros(48, device=device).as_subclass(OtherTensor))
        model.model.layers[0].self_attn.get_submodule(module).register_parameter(parameter, other)
        assert not can_capture(model), name


@every_config
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_captured_tokens_are_the_eager_ones(
    name: str, config: str, generate: Callable[..., Tensor], device: str
) -> None:
    model = quantized(device, CONFIGS[config](), name)
    ids = torch.randint(VOCAB, (2, 7), device=device)
    expected = generate(model, ids, capture=False)
    for _ in range(2):
        assert torch.equal(generate(model, ids, capture=True), expected)


@every_config
def test_replaced_weights_are_noticed(config: str, generate: Callable[..., Tensor], device: str) -> None:
    model = quantized(device, CONFIGS[config]())
    ids = torch.randint(VOCAB, (2, 7), device=device)
    before = generate(model, ids, capture=True)
    graphs = dict(model_graphs(model)._idle)
    assert torch.equal(generate(model, ids, capture=True), before)
    assert model_graphs(model)._idle == graphs  # none is captured again
    layer = model.model.layers[0].mlp.up_proj
    other = nn.Linear(*layer.weight.shape[::-1], bias=False, device=device)
    quantize_(other, CONFIGS[config]())
    layer.weight = other.weight
    after = generate(model, ids, capture=True)
    assert torch.equal(after, generate(model, ids, capture=False))
    assert not torch.equal(after, before)
    assert not set(map(id, model_graphs(model)._idle.values())) & set(map(id, graphs.values()))


def test_which_weights_are_read_as_int8() -> None:
    def weight(config: Any) -> Tensor:
        layer = nn.Linear(32, 16)
        quantize_(layer, config)
        return layer.weight

    int8 = as_int8(weight(Int8WeightOnlyConfig()))
    assert int8 is not None
    assert (int8.data.dtype, int8.data.shape, int8.scale.dtype, int8.scale.shape) == (
        torch.int8, (16, 32), torch.float32, (16,)
    )  # fmt: skip
    others = [
        Int8WeightOnlyConfig(granularity=PerTensor()), Int8WeightOnlyConfig(granularity=PerGroup(16)),
        Float8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig(),
    ]  # fmt: skip
    assert [as_int8(weight(config)) for config in others] == [None] * 4
    assert as_int8(nn.Parameter(torch.ones(16, 32))) is None
