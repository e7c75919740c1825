import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from ligerzoo.layers import AllHeadsRMSNorm, LayerNorm, RMSNorm
from ligerzoo.layers.norm import add_and_normalize

GEMMA = {"weight_offset": 1.0, "round_before_scale": False}
OLMO2 = {"round_before_scale": False}


def assert_same(ours: nn.Module, theirs: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Equal values; bitwise equal on a CPU below fp32."""
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=1)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 33, device=device, dtype=dtype) * 3
    tolerance = 2e-6 if dtype == torch.float32 else 0 if device == "cpu" else 2**-7
    torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model, options", [(LlamaRMSNorm, {}), (Gemma2RMSNorm, GEMMA), (Olmo2RMSNorm, OLMO2)])
def test_matches_transformers(model: type[nn.Module], options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    theirs = model(33, eps=1e-5).to(device, dtype)
    ours = RMSNorm(33, eps=1e-5, **options, device=device, dtype=dtype)
    assert torch.equal(ours.weight, theirs.weight)  # as initialized
    assert_same(ours, theirs, device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_learned_scale(dtype: torch.dtype, device: str) -> None:
    theirs = nn.RMSNorm(33, eps=1e-5, elementwise_affine=False)
    ours = RMSNorm(33, eps=1e-5, elementwise_affine=False, device=device, dtype=dtype)
    assert not list(ours.parameters())
    assert repr(ours) == "RMSNorm(33, eps=1e-05, elementwise_affine=False)"
    assert_same(ours, theirs, device, dtype)
    x, residual = torch.randn(2, 5, 33, device=device, dtype=dtype), torch.randn(2, 5, 33, device=device, dtype=dtype)
    normalized, summed = add_and_normalize(x, residual, ours)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normalized, ours(summed))


def test_all_heads_are_normalized_together(device: str) -> None:
    plain, together = (kind(12, **OLMO2, device=device) for kind in (RMSNorm, AllHeadsRMSNorm))
    nn.init.normal_(plain.weight)
    together.load_state_dict(plain.state_dict())
    heads = torch.randn(2, 3, 5, 4, device=device).transpose(1, 2)[:, :, :3]
    assert torch.equal(together(heads), plain(heads.flatten(-2)).unflatten(-1, (3, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_matches_torch(bias: bool, dtype: torch.dtype, device: str) -> None:
    theirs = nn.LayerNorm(33, eps=1e-3, bias=bias, device=device, dtype=dtype)
    ours = LayerNorm(33, 1e-3, bias, device=device, dtype=dtype)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter)
    assert_same(ours, theirs, device, dtype)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_eps_keeps_zeros_finite(norm: type[nn.Module], device: str) -> None:
    zeros = torch.zeros(3, 4, device=device)
    assert torch.equal(norm(4, device=device)(zeros), zeros)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_backend_is_passed_to_the_kernel(norm: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r'backend="triton" with tensors torch\.float64'):
        norm(4, backend="triton", dtype=torch.float64)(torch.ones(3, 4, dtype=torch.float64))


def test_repr() -> None:
    assert repr(RMSNorm(12, 1e-5)) == "RMSNorm(12, eps=1e-05)"
    assert repr(RMSNorm(12, weight_offset=1.0)) == "RMSNorm(12, eps=1e-06, weight_offset=1.0)"
    assert repr(LayerNorm(12, 1e-5)) == "LayerNorm(12, eps=1e-05, bias=True)"


@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0, "round_before_scale": False}], ids=str)
@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_add_and_normalize(norm: type[nn.Module], options: dict[str, Any], device: str) -> None:
    """For our norms, torch's, one with a hook, and a wrapped one."""
    ours = norm(33, device=device, **(options if norm is RMSNorm else {}))
    x, residual = torch.randn(2, 3, 33, device=device), torch.randn(2, 3, 33, device=device)
    calls: list[object] = []
    hooked = copy.deepcopy(ours)
    hooked.register_forward_hook(lambda *_: calls.append(_))
    for module in (ours, nn.LayerNorm(33, device=device), hooked, nn.Sequential(ours)):
        normalized, summed = add_and_normalize(x, residual, module)
        assert torch.equal(summed, x + residual)
        torch.testing.assert_close(normalized, module(x + residual), rtol=1e-6, atol=1e-6)
    assert len(calls) == 2  # as the argument of `add_and_normalize`, and when called
