import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ligerzoo.errors import WrongTypeError
from ligerzoo.kernels.activation import ACTIVATIONS
from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.layers import GatedMLP, set_backend
from ligerzoo.layers.balanced_routers import LogitRouter, SigmoidRouter
from ligerzoo.layers.moe import Experts, MoE, SharedExpertMoE, load_balancing_loss
from ligerzoo.layers.routers import Router

H, I, E, K, SHARED = 24, 10, 6, 2, 14  # noqa: E741


@dataclass
class Context:
    router_logits: list[Tensor] = field(default_factory=list)


def moe(
    num_experts: int = E, k: int = K, *, renormalize: bool = True, jitter_noise: float = 0.0, **factory_kwargs: Any
) -> MoE:
    router = Router(H, num_experts, k, renormalize=renormalize, **factory_kwargs)
    return drawn(MoE(router, Experts(H, I, num_experts, **factory_kwargs), jitter_noise=jitter_noise))


def shared_expert_moe(
    num_experts: int = E, k: int = K, *, renormalize: bool = True, **factory_kwargs: Any
) -> SharedExpertMoE:
    router = Router(H, num_experts, k, renormalize=renormalize, **factory_kwargs)
    gate = nn.Linear(H, 1, bias=False, **factory_kwargs)
    return drawn(
        SharedExpertMoE(
            router, Experts(H, I, num_experts, **factory_kwargs), GatedMLP(H, SHARED, **factory_kwargs), gate
        )
    )


def drawn(module: Any) -> Any:
    """Gives the module weights large enough for every part to affect the output."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def mixtral(num_experts: int, k: int, jitter: float = 0.0) -> nn.Module:
    config = MixtralConfig(
        hidden_size=H, intermediate_size=I, num_local_experts=num_experts, num_experts_per_tok=k,
        router_jitter_noise=jitter,
    )  # fmt: skip
    return MixtralSparseMoeBlock(eager(config))


def qwen2(num_experts: int, k: int, renormalize: bool = False) -> nn.Module:
    config = Qwen2MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=num_experts, num_experts_per_tok=k,
        norm_topk_prob=renormalize, shared_expert_intermediate_size=SHARED,
    )  # fmt: skip
    return Qwen2MoeSparseMoeBlock(eager(config))


def qwen3(num_experts: int, k: int, renormalize: bool = False) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=num_experts, num_experts_per_tok=k,
        norm_topk_prob=renormalize,
    )  # fmt: skip
    return Qwen3MoeSparseMoeBlock(eager(config))


def eager(config: Any) -> Any:
    config._experts_implementation = "eager"
    return config


BLOCKS: dict[str, tuple[Callable[..., nn.Module], Callable[..., MoE]]] = {
    "Mixtral": (mixtral, moe),
    "Qwen2-MoE": (qwen2, lambda *sizes: shared_expert_moe(*sizes, renormalize=False)),
    "Qwen2-MoE, renormalized": (lambda *sizes: qwen2(*sizes, renormalize=True), shared_expert_moe),
    "Qwen3-MoE": (qwen3, lambda *sizes: moe(*sizes, renormalize=False)),
    "Qwen3-MoE, renormalized": (lambda *sizes: qwen3(*sizes, renormalize=True), moe),
}
EVERY_BLOCK = pytest.mark.parametrize("theirs, ours", BLOCKS.values(), ids=BLOCKS.keys())


def with_gradients(module: nn.Module, x: Tensor, *rest: Any) -> dict[str, Tensor]:
    """Returns the output, and the gradients of x and all parameters for a random upstream gradient."""
    x = x.detach().requires_grad_()
    y = module(x, *rest)
    upstream = torch.linspace(-1, 2, y.numel(), device=x.device, dtype=x.dtype).view(y.shape)
    gradients = torch.autograd.grad(y, [x, *module.parameters()], upstream)
    return {"y": y, "x": gradients[0]} | dict(zip(dict(module.named_parameters()), gradients[1:], strict=True))


def assert_close(got: dict[Any, Tensor], expected: dict[Any, Tensor], tolerance: float = 1e-5) -> None:
    """Compares each tensor with a tolerance relative to its largest element."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = tensor.abs().max().item()
        assert scale > 0, name
        assert (got[name] - tensor).abs().max().item() <= tolerance * scale, name


# Against transformers


@EVERY_BLOCK
@pytest.mark.parametrize("num_experts, k", [(6, 2), (5, 1), (4, 4)])
@pytest.mark.parametrize("batch, length", [(2, 40), (1, 1)])
def test_matches_transformers(
    theirs: Callable[..., nn.Module],
    ours: Callable[..., MoE],
    num_experts: int,
    k: int,
    batch: int,
    length: int,
    device: str,
) -> None:
    block, mixture = drawn(theirs(num_experts, k)).to(device), ours(num_experts, k).to(device)
    mixture.load_state_dict(block.state_dict())
    x = torch.randn(batch, length, H, device=device)
    got, expected = with_gradients(mixture, x), with_gradients(block, x)
    if k == 1 and mixture.gate.renormalize:  # the weight is always 1; their gradient is rounding error
        for gradients in (got, expected):
            assert gradients.pop("gate.weight").abs().max() <= 1e-5 * gradients["x"].abs().max()
    assert_close(got, expected)


@EVERY_BLOCK
def test_matches_transformers_in_bf16(theirs: Callable[..., nn.Module], ours: Callable[..., MoE], device: str) -> None:
    """To 2 ulps of the largest output, and at least as accurate."""
    block, mixture = drawn(theirs(E, K)).to(device, torch.bfloat16), ours(E, K).to(device, torch.bfloat16)
    mixture.load_state_dict(block.state_dict())
    x = torch.randn(2, 40, H, device=device, dtype=torch.bfloat16)
    exact = copy.deepcopy(mixture).double()
    got, expected, truth = mixture(x), block(x), exact(x.double())
    assert got.dtype == torch.bfloat16
    tokens = x.flatten(0, 1)
    routes = [mixture.gate(tokens)[1], block.gate(tokens)[2], exact.gate(tokens.double())[1]]
    alike = torch.stack([route.sort().values for route in routes]).diff(dim=0).eq(0).all(-1).all(0).view(2, 40)
    assert alike.float().mean() > 0.9
    got, expected, truth = (y[alike].double() for y in (got, expected, truth))
    ulp = 2.0 ** (math.floor(math.log2(expected.abs().max().item())) - 7)
    assert (got - expected).abs().max().item() <= 2 * ulp
    assert (got - truth).square().mean() <= 1.1 * (expected - truth).square().mean()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("k", [1, 2, E])
def test_load_balancing_loss_matches_transformers(k: int, num_layers: int, masked: bool, device: str) -> None:
    logits = [(2 * torch.randn(80, E, device=device)).requires_grad_() for _ in range(num_layers)]
    mask = torch.ones(2, 40, dtype=torch.int64, device=device)
    mask[0, :13] = 0
    mask[1, 35:] = 0
    given = mask if masked else None
    loss, expected = load_balancing_loss(logits, k, given), load_balancing_loss_func((*logits,), E, k, given)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    got, required = (dict(enumerate(torch.autograd.grad(3 * value, logits))) for value in (loss, expected))
    if k == E:  # every expert is always chosen, so the loss is E for any router
        assert all(gradient.abs().max() < 1e-6 for gradient in got.values())
    else:
        assert_close(got, required)


def test_jitter_matches_mixtral() -> None:
    block, mixture = drawn(mixtral(E, K, jitter=0.3)), moe(jitter_noise=0.3)
    mixture.load_state_dict(block.state_dict())
    x = torch.randn(2, 40, H)
    torch.manual_seed(1)
    expected = block.train()(x.clone())
    torch.manual_seed(1)
    torch.testing.assert_close(mixture.train()(x), expected)


# Against the definition


class OneByOne(nn.Module):
    """The definition of MoE with a module's parameters: a loop over tokens and experts."""

    def __init__(self, mixture: MoE) -> None:
        super().__init__()
        self.gate, self.experts = mixture.gate, mixture.experts

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for token in x.view(-1, H):
            probabilities = (self.gate.weight @ token).softmax(0)
            chosen = probabilities.argsort(descending=True)[: self.gate.num_experts_per_token]
            weights = probabilities[chosen]
            if self.gate.renormalize:
                weights = weights / weights.sum()
            y = torch.zeros_like(token)
            for expert, weight in zip(chosen.tolist(), weights, strict=True):
                gate, up = (self.experts.gate_up_proj[expert] @ token).chunk(2)
                active = ACTIVATIONS[self.experts.activation](gate) * up
                y = y + weight * (self.experts.down_proj[expert] @ active)
            outputs.append(y)
        return torch.stack(outputs).view(x.shape)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_its_definition(activation: Any, renormalize: bool, device: str) -> None:
    mixture = moe(renormalize=renormalize).to(device)
    mixture.experts.activation = activation
    x = torch.randn(2, 9, H, device=device)
    assert_close(with_gradients(mixture, x), with_gradients(OneByOne(mixture), x))


def test_experts_without_tokens(device: str) -> None:
    mixture, x = moe().to(device), torch.randn(2, 9, H, device=device)
    x[..., 0] = 1
    with torch.no_grad():
        mixture.gate.weight[3:, 0] = -100
    got, expected = with_gradients(mixture, x), with_gradients(OneByOne(mixture), x)
    assert_close(got, expected)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        assert not got[name][3:].any()


@pytest.mark.parametrize("shape", [(H,), (5, H), (2, 3, 4, H), (2, 0, H)], ids=str)
@pytest.mark.parametrize("make", [moe, shared_expert_moe])
def test_any_number_of_tokens_in_any_shape(make: Callable[..., MoE], shape: tuple[int, ...], device: str) -> None:
    mixture, x = make(device=device), torch.randn(shape, device=device)
    y = mixture(x)
    assert y.shape == shape
    torch.testing.assert_close(y.view(-1, H), mixture(x.view(-1, H)))
    transposed = torch.randn(3, 7, H, device=device)
    torch.testing.assert_close(mixture(transposed.transpose(0, 1)), mixture(transposed).transpose(0, 1))


def test_the_shared_expert_is_added(device: str) -> None:
    mixture, x = shared_expert_moe(device=device), torch.randn(2, 9, H, device=device)
    plain = MoE(mixture.gate, mixture.experts)(x)
    share = 1 / (1 + torch.exp(-F.linear(x, mixture.shared_expert_gate.weight)))
    torch.testing.assert_close(mixture(x), plain + share * mixture.shared_expert(x))


def test_parameter_names() -> None:
    assert list(moe().state_dict()) == ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    assert list(shared_expert_moe().state_dict())[3:] == [
        "shared_expert.gate_proj.weight",
        "shared_expert.up_proj.weight",
        "shared_expert.down_proj.weight",
        "shared_expert_gate.weight",
    ]


# The router's logits and their loss


@pytest.mark.parametrize("make", [moe, shared_expert_moe])
def test_context_collects_router_logits(make: Callable[..., MoE], device: str) -> None:
    layers, x, shared = [make(device=device), make(device=device)], torch.randn(2, 9, H, device=device), Context()
    for layer in layers:
        assert torch.equal(layer(x, shared), layer(x))
    assert len(shared.router_logits) == 2
    for layer, logits in zip(layers, shared.router_logits, strict=True):
        torch.testing.assert_close(logits, x.view(-1, H) @ layer.gate.weight.T)
    load_balancing_loss(shared.router_logits, K).backward()
    assert all(layer.gate.weight.grad.abs().max() > 0 for layer in layers)


def test_balanced_load_costs_k_and_unbalanced_load_more() -> None:
    even = 5 * torch.eye(E) + 3 * torch.eye(E).roll(1, 0)
    assert load_balancing_loss([even], 2).item() == pytest.approx(2)
    assert load_balancing_loss([even[:1].expand(9, E) * 10], 2).item() == pytest.approx(E)


def test_padding_is_excluded_from_the_loss(device: str) -> None:
    logits = [torch.randn(20, E, device=device, requires_grad=True) for _ in range(2)]
    mask = torch.rand(20, device=device) < 0.5
    loss = load_balancing_loss(logits, K, mask)
    torch.testing.assert_close(loss, load_balancing_loss([layer[mask] for layer in logits], K))
    assert not any(g[~mask].any() for g in torch.autograd.grad(loss, logits))

    loss = load_balancing_loss(logits, K, torch.zeros(4, 5, device=device))
    assert loss.item() == 0
    assert not any(g.any() for g in torch.autograd.grad(loss, logits))


def test_the_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    logits = [(0.01 * torch.randn(50, E)).bfloat16() for _ in range(2)]  # their softmax in bf16 has many ties
    torch.testing.assert_close(load_balancing_loss(logits, K), load_balancing_loss([t.float() for t in logits], K))


def test_router_logits_of_a_checkpointed_layer_have_gradients(device: str) -> None:
    mixture, x = moe(device=device), torch.randn(2, 9, H, device=device, requires_grad=True)

    def gradients(recompute: bool) -> tuple[Tensor, ...]:
        shared = Context()
        y = checkpoint(mixture, x, shared, use_reentrant=False) if recompute else mixture(x, shared)
        return torch.autograd.grad(y.sum() + load_balancing_loss(shared.router_logits, K), [x, *mixture.parameters()])

    for got, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, expected)


# Jitter


def test_jitter_is_for_training_only_and_keeps_the_input() -> None:
    mixture, x = moe(jitter_noise=0.3), torch.randn(2, 9, H)
    before, version = x.clone(), x._version
    assert not torch.equal(mixture(x), mixture(x))
    assert (torch.equal(x, before), x._version) == (True, version)
    mixture.eval()
    assert torch.equal(mixture(x), MoE(mixture.gate, mixture.experts)(x))


def test_jitter_stays_within_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, inputs = moe(jitter_noise=0.3), []
    mixture.gate.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    mixture.experts.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    mixture(torch.ones(100, H))
    for tokens in inputs:
        assert 0.7 <= tokens.min() < 0.71 < 1.29 < tokens.max() <= 1.3


# A module as others


def test_compiled_is_eager(device: str) -> None:
    class Step(nn.Module):
        """A loss of both outputs and router's logits."""

        def __init__(self) -> None:
            super().__init__()
            self.mixture = shared_expert_moe(device=device)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            shared = Context()
            return self.mixture(x, shared).square().mean() + load_balancing_loss(shared.router_logits, K, mask)

    torch._dynamo.reset()
    step, x = Step(), torch.randn(2, 9, H, device=device)
    mask = torch.rand(2, 9, device=device) < 0.7
    got = with_gradients(torch.compile(step, backend="aot_eager", fullgraph=True), x, mask)
    assert_close(
        {name.removeprefix("_orig_mod."): tensor for name, tensor in got.items()}, with_gradients(step, x, mask)
    )


@pytest.mark.parametrize("make", [moe, shared_expert_moe])
def test_copies_and_pickles(make: Callable[..., MoE]) -> None:
    mixture, x = make(), torch.randn(2, 9, H)
    for twin in (copy.deepcopy(mixture), pickle.loads(pickle.dumps(mixture))):  # noqa: S301
        assert torch.equal(twin(x), mixture(x))
        nn.init.zeros_(twin.experts.down_proj)
    assert mixture.experts.down_proj.any()


@pytest.mark.parametrize("make", [moe, shared_expert_moe])
def test_runs_on_meta(make: Callable[..., MoE]) -> None:
    """Any host sync fails on meta."""
    mixture, shared = make(device="meta", dtype=torch.bfloat16), Context()
    x = torch.randn(2, 9, H, device="meta", dtype=torch.bfloat16, requires_grad=True)
    y = mixture(x, shared)
    assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "meta")
    loss = y.float().sum() + load_balancing_loss(shared.router_logits, K, torch.ones(2, 9, device="meta"))
    loss.backward()
    assert all(tensor.grad is not None for tensor in (x, *mixture.parameters()))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_host_sync() -> None:
    mixture, shared = shared_expert_moe(device="cuda", dtype=torch.bfloat16), Context()
    x, mask = torch.randn(2, 9, H, device="cuda", dtype=torch.bfloat16), torch.ones(2, 9, device="cuda")

    def step() -> None:
        y = mixture(x, shared)
        (y.float().sum() + load_balancing_loss(shared.router_logits[-1:], K, mask)).backward()

    step()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("make", [moe, shared_expert_moe])
def test_autocast(make: Callable[..., MoE], device: str) -> None:
    mixture, x = make(device=device), torch.randn(2, 9, H, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        y = mixture(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in (x, *mixture.parameters()))


def test_derivatives(device: str) -> None:
    mixture = shared_expert_moe(device=device, dtype=torch.float64)
    x = torch.randn(3, H, device=device, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        shared = Context()
        return mixture(x, shared), load_balancing_loss(shared.router_logits, K)

    assert torch.autograd.gradcheck(function, (x, *mixture.parameters()), fast_mode=True)


@pytest.mark.skipif(INTERPRETING, reason="there Triton serves a CPU too")
def test_backend_is_passed_to_the_kernels() -> None:
    mixture, x = moe(dtype=torch.float64), torch.randn(3, H, dtype=torch.float64)  # not supported by the kernels
    set_backend(mixture, "triton")
    with pytest.raises(ValueError, match='backend="triton"'):
        mixture(x)
    set_backend(mixture, "torch")
    assert mixture(x).isfinite().all()


@pytest.mark.parametrize("change", [
    lambda logits, ids, weights: (logits, ids),
    lambda logits, ids, weights: (logits, ids[:, 0], weights[:, 0]),
    lambda logits, ids, weights: (logits, weights, ids),
    lambda logits, ids, weights: (logits, ids, weights[:, :1]),
    lambda logits, ids, weights: logits,
])  # fmt: skip
def test_another_result_of_an_own_router_names_its_class(change: Callable[..., object]) -> None:
    class Mine(Router):
        def forward(self, x: Tensor) -> Any:
            return change(*super().forward(x))

    message = r"^Mine: the router returns .* expected router logits \(T, E\), expert ids \(T, k\) of integers, expert w"
    with pytest.raises(WrongTypeError, match=message):
        MoE(Mine(8, 4, 2), Experts(8, 4, 4))(torch.randn(5, 8))


@pytest.mark.parametrize("kind", [Router, SigmoidRouter, LogitRouter])
def test_a_renormalized_top_1_weight_warns_unless_chosen(kind: type[nn.Module]) -> None:
    with pytest.warns(UserWarning, match=f"^{kind.__name__}: num_experts_per_token=1: the renormalized weight"):
        assert kind(8, 4, 1).renormalize is True
    assert [kind(8, 4, 1, renormalize=chosen).renormalize for chosen in (False, True)] == [False, True]


def test_init_weights() -> None:
    for module in (Router(64, 50, 2), Experts(64, 32, 50)):
        for _ in range(2):
            for parameter in module.parameters():
                assert parameter.mean().item() == pytest.approx(0, abs=2e-3)
                assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
                nn.init.constant_(parameter, math.nan)
            module.init_weights()


def test_repr() -> None:
    text = re.sub(r"\s+", " ", repr(moe(jitter_noise=0.1, renormalize=False)))
    assert text == (
        "MoE( jitter_noise=0.1 (gate): Router(24, 6, 2, renormalize=False) "
        "(experts): Experts(24, 10, 6, activation='silu') )"
    )
    assert "jitter" not in repr(moe())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Router(H, 4, 5), "num_experts_per_token=5; expected 1 to num_experts=4"),
        (lambda: Router(H, 4, 0), "num_experts_per_token=0; expected 1 to num_experts=4"),
        (lambda: Experts(H, 0, 4), "intermediate_size=0, num_experts=4; expected positive"),
        (lambda: Experts(H, I, -1), "num_experts=-1; expected positive"),
        (lambda: Experts(H, I, E, activation="relu"), "activation='relu'; expected one of 'silu'"),  # type: ignore[arg-type]
        (lambda: Experts(H, I, E, backend="cuda"), "backend='cuda'; expected"),  # type: ignore[arg-type]
        (lambda: moe(jitter_noise=-0.1), r"jitter_noise=-0.1; expected a number in \[0, 1\)"),
        (lambda: moe(jitter_noise=1.0), r"jitter_noise=1.0; expected a number in \[0, 1\)"),
        (lambda: load_balancing_loss([], 2), "router_logits is empty"),
        (lambda: load_balancing_loss([torch.zeros(6, E)], 2, torch.ones(2, 4)), r"shape \(2, 4\); expected 6 entries"),
    ],
)
def test_invalid_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("routed", "present"), [(4, 8), (8, 4)])
def test_a_router_and_experts_have_the_same_number_of_experts(routed: int, present: int) -> None:
    with pytest.raises(ValueError, match=f"routes to {routed} experts; expected {present}"):
        MoE(Router(H, routed, 2), Experts(H, I, present))
