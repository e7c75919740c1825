import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import GemmaConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.clip.configuration_clip import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP

from ligerzoo.kernels.activation import Activation
from ligerzoo.layers import MLP, GatedMLP, Linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_matches_transformers_llama(bias: bool, dtype: torch.dtype, tolerance: float, device: str) -> None:
    theirs = LlamaMLP(LlamaConfig(hidden_size=24, num_attention_heads=4, intermediate_size=50, mlp_bias=bias)).to(
        device, dtype
    )
    ours = GatedMLP(24, 50, bias=bias, device=device, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 24, device=device, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=tolerance)


@pytest.mark.parametrize("activation, theirs", [("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")])
def test_matches_transformers_gemma(activation: Activation, theirs: str, device: str) -> None:
    config = GemmaConfig(hidden_size=24, intermediate_size=50)
    gemma = GemmaMLP(config).to(device)
    gemma.act_fn = ACT2FN[theirs]
    ours = GatedMLP(24, 50, activation=activation, device=device)
    ours.load_state_dict(gemma.state_dict())
    x = 20 * torch.randn(2, 7, 24, device=device)  # far enough from 0 for the two GELUs to differ
    expected = gemma(x)
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_matches_transformers_clip(activation: Activation, adapted: bool, device: str) -> None:
    theirs = CLIPMLP(CLIPVisionConfig(hidden_size=24, intermediate_size=50, hidden_act=activation)).to(device)
    ours = MLP(24, 50, activation=activation, device=device)
    ours.load_state_dict(theirs.state_dict())
    if adapted:
        ours.fc2 = nn.Sequential(ours.fc2)  # type: ignore[assignment]
    x = torch.randn(2, 7, 24, device=device)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
def test_backend_is_passed_to_the_kernels(adapted: bool) -> None:
    mlp = GatedMLP(24, 50, backend="triton", dtype=torch.float64)  # not supported by the kernels
    if adapted:
        mlp.down_proj = LowRank(mlp.down_proj).double()  # type: ignore[assignment]
    with pytest.raises(ValueError, match='backend="triton"'):
        mlp(torch.randn(3, 24, dtype=torch.float64))


class LowRank(nn.Module):
    """An adapter as in PEFT: a module that replaces the linear layer it wraps."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_adapter_of_a_projection_is_called(name: str) -> None:
    mlp, x = GatedMLP(24, 50, bias=True), torch.randn(3, 24)
    before = mlp(x)
    adapter = LowRank(getattr(mlp, name))
    setattr(mlp, name, adapter)
    after = mlp(x)
    assert not torch.allclose(before, after)
    after.sum().backward()
    assert adapter.a.weight.grad is not None
    nn.init.zeros_(adapter.b.weight)
    torch.testing.assert_close(mlp(x), before)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_on_a_projection_fire(name: str, register: str) -> None:
    mlp, fired = GatedMLP(24, 50), []
    handle = getattr(getattr(mlp, name), register)(lambda *_: fired.append(name))
    x = torch.randn(3, 24, requires_grad=True)
    mlp(x).sum().backward()
    assert fired == [name]
    handle.remove()
    mlp(x).sum().backward()
    assert fired == [name]


def test_replaced_forward_is_called() -> None:
    """As accelerate replaces it to offload weights."""
    mlp = GatedMLP(24, 50)
    mlp.down_proj.forward = lambda x: torch.full((3, 24), 7.0)  # type: ignore[method-assign]
    assert mlp(torch.randn(3, 24)).eq(7).all()


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_forward_of_a_subclass_is_called(name: str, has_gradients: bool) -> None:
    """It inherits `terms`, which describe `Linear` only."""

    class Constant(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(len(x), self.out_features)

    mlp = GatedMLP(24, 50)
    projection = getattr(mlp, name)
    setattr(mlp, name, Constant(projection.in_features, projection.out_features, bias=False))
    with torch.set_grad_enabled(has_gradients):
        assert mlp(torch.randn(3, 24)).eq(0).all()


def test_parametrization_is_applied() -> None:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    mlp, x = GatedMLP(24, 50), torch.randn(3, 24)
    before = mlp(x)
    parametrize.register_parametrization(mlp.down_proj, "weight", Halved())
    torch.testing.assert_close(mlp(x), before / 2)


def test_weights_that_are_not_parameters() -> None:
    """As libraries that flatten parameters leave views of them."""
    mlp, x = GatedMLP(24, 50, bias=True), torch.randn(3, 24)
    before = mlp(x)
    for layer in mlp.children():
        for name in ("weight", "bias"):
            value = getattr(layer, name).detach()
            delattr(layer, name)
            setattr(layer, name, value)
    torch.testing.assert_close(mlp(x), before, rtol=0, atol=0)


def test_unknown_activation_or_backend() -> None:
    with pytest.raises(ValueError, match="activation='gelu_pytorch_tanh'; expected one of 'silu'"):
        GatedMLP(24, 50, activation="gelu_pytorch_tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend='cuda'; expected"):
        GatedMLP(24, 50, backend="cuda")  # type: ignore[arg-type]
