"""Muon against plain references, torch's own, and its orthogonalization."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.train.optimizers import Muon, make_optimizer, muon_groups, orthogonalize
from ligerzoo.train.optimizers import muon as muon_file
from tests.covering import covering
from tests.train.optimizer_cases import (
    adamw_rule,
    muon_rule,
    newton_schulz,
    parameters_of,
    reference_run,
    set_gradients,
    tiny_llama,
    tiny_moe,
    train,
)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orthogonalizes in fp64, so that all but the rounding to bf16 is compared closely."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.double)


@pytest.mark.parametrize("shape", [(8, 8), (5, 24), (24, 5), (3, 6, 10), (2, 3, 10, 6), (1, 7), (7, 1)])
def test_orthogonalization_is_newton_schulz_of_each_matrix(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    matrices = x.double().reshape(-1, *shape[-2:])
    expected = torch.stack([newton_schulz(matrix) for matrix in matrices]).reshape(shape)
    result = orthogonalize(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=0.04)
    largest = torch.linalg.svdvals(result.double())
    assert largest[..., 0].min() > 0.6
    assert largest.max() < 1.3


def test_orthogonalization_keeps_the_singular_vectors() -> None:
    u, v = (torch.linalg.qr(torch.randn(20, 20).double()).Q for _ in range(2))
    x = u * torch.logspace(-1.5, 0, 20).double() @ v
    assert torch.cosine_similarity(orthogonalize(x).double().flatten(), (u @ v).flatten(), 0) > 0.97
    assert not orthogonalize(torch.zeros(3, 4, 5)).any()
    large = orthogonalize(1e15 * torch.eye(4))
    assert large.isfinite().all()
    torch.testing.assert_close(large, orthogonalize(1e-3 * torch.eye(4)), rtol=0.02, atol=0)


OPTIONS: dict[str, list[Any]] = {
    "shape": [(8, 8), (6, 20), (20, 6), (3, 8, 10), (2, 10, 8)],
    "blocks": [1, 2],
    "momentum": [0.95, 0.5, 0.0],
    "weight_decay": [0.0, 0.3],
    "scale": ["match_rms_adamw", "original"],
    "lr": [0.01, 0.1],
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", covering(OPTIONS), ids=str)
def test_muon_computes_its_formula(case: dict[str, Any]) -> None:
    matrices = [nn.Parameter(torch.randn(case["shape"])) for _ in range(3)]
    vector = nn.Parameter(torch.randn(9))
    blocks = case["blocks"]
    options = {name: case[name] for name in ("momentum", "weight_decay", "scale", "lr")}
    groups = [
        {"params": matrices, "muon": True, "matrices_per_row_block": blocks}, {"params": [vector], "muon": False},
    ]  # fmt: skip
    optimizer = Muon(groups, **options)
    rule = muon_rule(case["lr"], case["momentum"], case["weight_decay"], case["scale"], blocks)
    other = adamw_rule(case["lr"], (0.9, 0.999), 1e-8, case["weight_decay"])
    parameters = [*matrices, vector]
    expected = reference_run(parameters, [rule, rule, rule, other], range(4))
    train(optimizer, parameters, range(4))
    for parameter, truth in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.double(), truth, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_matrices_are_updated_as_by_torch(scale: Any) -> None:
    shapes = [(16, 16), (24, 10), (10, 24)]
    ours, theirs = ([nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        other.data.copy_(one.data)
    optimizer = Muon([{"params": ours, "muon": True}], lr=0.02, weight_decay=0.1, scale=scale)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=scale)
    for step in range(4):
        for parameters, one in ((ours, optimizer), (theirs, reference)):
            set_gradients(parameters, step)
            one.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=4 * 0.02 * 0.2 * 24**0.5 * 0.02)


@pytest.mark.usefixtures("exact")
def test_every_expert_has_its_own_gate_and_up_matrix() -> None:
    """The same weights as separate linear layers get the same updates."""
    experts, intermediate, hidden = 3, 6, 8
    fused = nn.Parameter(torch.randn(experts, 2 * intermediate, hidden))
    separate = [nn.Parameter(matrix.clone()) for matrix in fused.detach().view(-1, intermediate, hidden)]
    gradient = torch.randn(fused.shape)
    optimizer = Muon([{"params": [fused], "muon": True, "matrices_per_row_block": 2}], lr=0.1)
    others = Muon([{"params": separate, "muon": True}], lr=0.1)
    for _ in range(2):
        fused.grad = gradient.clone()
        for parameter, part in zip(separate, gradient.view(-1, intermediate, hidden), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
        others.step()
    torch.testing.assert_close(fused.detach().view(-1, intermediate, hidden), torch.stack(separate).detach())


def test_updates_do_not_depend_on_what_is_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for largest in (2**26, 1, 300):
        monkeypatch.setattr(muon_file, "_MAX_BATCH", largest)
        torch.manual_seed(0)
        model = tiny_moe()
        train(make_optimizer(model, "muon", lr=0.1), list(model.parameters()), range(2))
        models.append(model.state_dict())
    for name, weight in models[0].items():
        for other in models[1:]:
            torch.testing.assert_close(other[name], weight, rtol=0, atol=2e-3)


def test_the_root_mean_square_of_updates_is_that_of_adamw() -> None:
    """About 0.2 lr for matrices of any shape (Liu et al. 2025, section 2.2)."""
    for shape in ((64, 64), (32, 128), (128, 32)):
        weight = nn.Parameter(torch.zeros(shape))
        optimizer = Muon([{"params": [weight], "muon": True}], lr=0.5, weight_decay=0.0)
        set_gradients([weight], 0)
        optimizer.step()
        assert weight.detach().square().mean().sqrt() == pytest.approx(0.2 * 0.5, rel=0.2)


def test_muon_trains_a_model_with_experts() -> None:
    model = tiny_moe()
    optimizer = make_optimizer(model, "muon", lr=0.02)
    ids = torch.arange(24).view(2, 12)
    losses = []
    for _ in range(15):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert len(parameters_of(optimizer)) == len(list(model.parameters()))


def test_stochastic_rounding_keeps_small_updates_of_matrices() -> None:
    lr, steps = 1e-5, 40
    for stochastic in (True, False):
        weight = nn.Parameter(torch.full((128, 128), 1.25, dtype=torch.bfloat16))
        group = {"params": [weight], "muon": True}
        optimizer = Muon([group], lr=lr, weight_decay=0.0, momentum=0.0, stochastic_rounding=stochastic)
        gradient = torch.randn(128, 128)
        for _ in range(steps):
            weight.grad = gradient.bfloat16()
            optimizer.step()
        change = weight.detach().float() - 1.25
        if stochastic:
            expected = -lr * steps * 0.2 * 128**0.5 * orthogonalize(gradient.bfloat16()).float()
            slope = (change * expected).sum() / expected.square().sum()
            assert slope.item() == pytest.approx(1.0, abs=0.25)
        else:
            assert not change.any()


def test_groups_without_a_flag_and_vectors_are_refused() -> None:
    weight = nn.Parameter(torch.ones(6))
    with pytest.raises(ValueError, match=r'^Muon: a group has no flag "muon"; expected .*muon_groups'):
        make_optimizer([{"params": [weight]}], "muon", lr=0.1)
    with pytest.raises(ValueError, match=r"^Muon: a parameter of shape \(6,\) in a group with muon=True; expected"):
        Muon([{"params": [weight], "muon": True}])
    with pytest.raises(ValueError, match=r"^Muon: a parameter of shape \(3, 2\) in .* m a multiple of .*=2$"):
        Muon([{"params": [nn.Parameter(torch.ones(3, 2))], "muon": True, "matrices_per_row_block": 2}])
    assert all(isinstance(group["muon"], bool) for group in muon_groups(tiny_llama(), 0.1))
