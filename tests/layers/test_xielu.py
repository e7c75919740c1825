"""Tests of xIELU against transformers, and of its gradients."""

import pytest
import torch
from transformers.activations import XIELUActivation

from ligerzoo.layers import XIELU, UngatedMLP


def test_values_and_gradients_match_transformers(device: str) -> None:
    ours, theirs = XIELU(device=device), XIELUActivation(dtype=torch.float32).to(device)
    for name, tensor in theirs.state_dict().items():  # the same initial values
        torch.testing.assert_close(ours.state_dict()[name], tensor)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    ours.load_state_dict(theirs.state_dict())
    x = torch.cat([torch.linspace(-6, 6, 1000), torch.tensor([0.0, -0.0, -1e-7, 1e-7, 30.0, -100.0])]).to(device)
    upstream = torch.randn_like(x)
    results = []
    for module in (ours, theirs):
        inputs = [x.clone().requires_grad_(), *module.parameters()]
        y = module(inputs[0])
        results.append([y.detach(), *torch.autograd.grad(y, inputs, upstream)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def test_bf16_is_rounded_once(device: str) -> None:
    module, x = XIELU(device=device, dtype=torch.bfloat16), torch.linspace(-6, 6, 1001, device=device).bfloat16()
    truth = XIELU(device=device)
    truth.load_state_dict(module.state_dict())
    assert torch.equal(module(x), truth(x.float()).bfloat16())


def test_an_ungated_mlp_takes_a_name_or_a_module() -> None:
    assert [n for n, _ in UngatedMLP(4, 6, activation=XIELU()).named_parameters()] == [
        "act_fn.alpha_p", "act_fn.alpha_n", "up_proj.weight", "down_proj.weight"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="expected one of 'silu'"):
        UngatedMLP(4, 6, activation="relu")  # type: ignore[arg-type]
