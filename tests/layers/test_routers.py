"""Routers: their definition, and the dtype of the balancing bias."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.kernels.linear_fp32 import linear_fp32, reference
from ligerzoo.layers import DeepSeekMoE, Experts, GatedMLP, GroupedRouter, LogitRouter, SigmoidRouter


def router(**options: object) -> SigmoidRouter:
    torch.manual_seed(0)
    gate = SigmoidRouter(16, 12, 3, **options)  # type: ignore[arg-type]
    gate.init_weights(0.5)
    gate.e_score_correction_bias.normal_(std=0.3)
    return gate


@pytest.mark.parametrize("renormalize", [False, True])
def test_each_token_by_definition(renormalize: bool) -> None:
    gate, x = router(num_groups=4, num_selected_groups=2, renormalize=renormalize, scale=2.5), torch.randn(20, 16)
    logits, expert_ids, weights = gate(x)
    torch.testing.assert_close(logits, x @ gate.weight.T)
    for token in range(20):
        scores = logits[token].sigmoid().tolist()
        biased = [s + b for s, b in zip(scores, gate.e_score_correction_bias.tolist(), strict=True)]
        groups = sorted(range(4), key=lambda g: -sum(sorted(biased[3 * g : 3 * g + 3])[-2:]))[:2]
        selectable = [e for e in range(12) if e // 3 in groups]
        chosen = sorted(selectable, key=lambda e: -biased[e])[:3]
        assert expert_ids[token].tolist() == chosen
        total = sum(scores[e] for e in chosen) if renormalize else 1.0
        assert weights[token].tolist() == pytest.approx([2.5 * scores[e] / total for e in chosen], rel=1e-5)


def test_each_token_of_a_grouped_router_by_definition() -> None:
    torch.manual_seed(0)
    gate, x = GroupedRouter(16, 12, 3, num_groups=4, num_selected_groups=2, scale=2.5), torch.randn(20, 16)
    gate.init_weights(0.5)
    _, expert_ids, weights = gate(x)
    for token, logits in enumerate(x @ gate.weight.T):
        p = logits.softmax(0).tolist()
        groups = sorted(range(4), key=lambda g: -max(p[3 * g : 3 * g + 3]))[:2]
        chosen = sorted((e for e in range(12) if e // 3 in groups), key=lambda e: -p[e])[:3]
        assert expert_ids[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx([2.5 * p[e] for e in chosen], rel=1e-5)


@pytest.mark.parametrize("balanced", [False, True])
def test_each_token_of_a_logit_router_by_definition(balanced: bool) -> None:
    torch.manual_seed(0)
    gate, x = LogitRouter(16, 12, 3, balanced=balanced), torch.randn(20, 16)
    bias = torch.randn(12) if balanced else torch.zeros(12)
    if balanced:
        gate.e_score_correction_bias.copy_(bias)
        assert gate.bfloat16().e_score_correction_bias.dtype == torch.float32
        gate.float()
    assert list(gate.state_dict()) == ["weight"] + ["e_score_correction_bias"] * balanced
    logits, expert_ids, weights = gate(x)
    assert torch.equal(expert_ids, (logits + bias).topk(3).indices)
    scores = logits.sigmoid().gather(1, expert_ids)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))


@pytest.mark.parametrize("options", [{"num_groups": 5}, {"num_groups": 2, "num_selected_groups": 3}, {"num_groups": 6}])
def test_groups_that_do_not_fit_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"^GroupedRouter: num_experts_per_token=3, .* expected a multiple"):
        GroupedRouter(16, 12, 3, **options)


def test_gradients_per_sample() -> None:
    """`torch.func.vmap` maps over the selection of groups too."""
    gate, x = router(num_groups=4, num_selected_groups=2), torch.randn(3, 5, 16)
    weight = gate.weight.detach()

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(gate, {"weight": weight}, (x,))[2].square().sum()

    got = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
    torch.testing.assert_close(got, torch.stack([torch.func.grad(loss)(weight, sample) for sample in x]))


CONVERSIONS: list[Callable[[nn.Module], nn.Module]] = [
    lambda module: module.to(torch.bfloat16),
    lambda module: module.half(),
    lambda module: module.bfloat16().to("meta").to_empty(device="cpu"),
    lambda module: copy.deepcopy(module.bfloat16()),
    lambda module: router(dtype=torch.bfloat16),
]


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_the_bias_stays_in_fp32(convert: Callable[[nn.Module], nn.Module]) -> None:
    gate = router()
    bias = gate.e_score_correction_bias.clone()
    converted = nn.Sequential(gate)
    converted = convert(converted) if convert is not CONVERSIONS[-1] else nn.Sequential(convert(converted))
    [half] = converted
    assert half.weight.dtype in (torch.bfloat16, torch.float16)
    assert half.e_score_correction_bias.dtype == torch.float32
    if convert not in CONVERSIONS[2:3]:  # `to_empty` leaves it uninitialized
        assert torch.equal(half.e_score_correction_bias, bias)


def test_the_bias_can_be_wider() -> None:
    assert router().double().e_score_correction_bias.dtype == torch.float64
    assert router(dtype=torch.float64).e_score_correction_bias.dtype == torch.float64


def test_the_bias_is_not_trained() -> None:
    gate = router()
    gate.requires_grad_(True)
    assert list(dict(gate.named_parameters())) == ["weight"]
    assert list(gate.state_dict()) == ["weight", "e_score_correction_bias"]
    _, _, weights = gate(torch.randn(5, 16))
    weights.square().sum().backward()
    assert gate.weight.grad is not None
    assert gate.e_score_correction_bias.grad is None


def test_logits_of_bf16_tokens_are_in_fp32() -> None:
    gate, x = router().bfloat16(), torch.randn(9, 16).bfloat16()
    expected = x.float() @ gate.weight.float().T
    assert torch.equal(gate(x)[0], expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate(x)[0], expected)
    rounded = router(in_fp32=False).bfloat16()(x)[0]
    assert rounded.dtype == torch.bfloat16


def test_shared_experts_are_added() -> None:
    torch.manual_seed(0)
    gate, x = DeepSeekMoE(router(), Experts(16, 8, 12), GatedMLP(16, 24)), torch.randn(2, 5, 16)
    tokens = x.flatten(0, 1)
    routed = gate.experts(tokens, *gate.gate(tokens)[1:]).view(x.shape)
    torch.testing.assert_close(gate(x), routed + gate.shared_experts(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_fp32_has_the_gradients_of_its_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in ((2, 7, 16), (5, 16))]
    dy = torch.randn(2, 7, 5)
    results: list[tuple[Tensor, ...]] = []
    for function in (linear_fp32, reference):
        x, weight = (t.clone().requires_grad_() for t in inputs)
        y = function(x, weight)
        y.backward(dy)
        assert x.grad is not None and weight.grad is not None  # noqa: PT018
        results.append((y.detach(), x.grad, weight.grad))
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)


def test_linear_fp32_keeps_no_fp32_copies() -> None:
    x, weight = (torch.randn(n, 16).bfloat16().requires_grad_() for n in (30, 5))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        linear_fp32(x, weight)
    assert [t.dtype for t in kept] == [torch.bfloat16] * 2


def test_linear_fp32_checks_shapes() -> None:
    with pytest.raises(ValueError, match=r"^linear_fp32: x is \(3, 4\) and weight \(2, 5\); expected"):
        linear_fp32(torch.zeros(3, 4), torch.zeros(2, 5))
