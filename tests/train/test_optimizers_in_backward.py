"""Updating within backward equals updating after it, and frees gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ligerzoo.train.optimizers import SkipNonFinite, StepInBackward, clip_grad_norm, make_optimizer, set_lr
from tests.train.optimizer_cases import parameters_of, tensors_in, tiny_llama, tiny_moe
from tests.train.test_optimizers import KINDS, _uncompiled, build, kinds  # noqa: F401  (a fixture)

IDS = torch.arange(24).view(2, 12)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.long
@kinds
@pytest.mark.parametrize("make", [
    partial(tiny_llama, tie_word_embeddings=True), partial(tiny_llama, dtype=torch.bfloat16), tiny_moe,
], ids=["tied", "bf16", "experts"])  # fmt: skip
def test_it_equals_updating_after_backward(kind: str, make: Any) -> None:
    states = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = make()
        next(model.parameters()).requires_grad_(False)
        optimizer = build(kind, model)
        if in_backward:
            StepInBackward(optimizer)
        for i in range(3):
            set_lr(optimizer, 1 - i / 4)
            step(model, optimizer)
        assert all(parameter.grad is None for parameter in model.parameters())
        states.append(
            [optimizer.param_groups, [optimizer.state[p] for p in parameters_of(optimizer)], model.state_dict()]
        )
    expected, actual = (tensors_in(state) for state in states)
    assert len(expected) == len(actual) > 50
    for one, other in zip(actual, expected, strict=True):
        if "muon" in kind or kind == "stochastic 8-bit":  # other batches; torchao draws in another order
            torch.testing.assert_close(one, other, rtol=0, atol=1e-3 if one.dtype == torch.float32 else 2e-2)
        else:
            assert torch.equal(one, other)


def test_gradients_are_freed_one_by_one() -> None:
    model = tiny_llama(num_hidden_layers=4)
    optimizer = make_optimizer(model, lr=0.01)
    StepInBackward(optimizer)
    alive = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    step(model, optimizer)
    assert alive == [0] * len(list(model.parameters()))


def test_accumulating_and_clipping_are_refused() -> None:
    model = tiny_llama()
    optimizer = make_optimizer(model, lr=0.01)
    StepInBackward(optimizer)
    model(IDS, labels=IDS).loss.backward()
    with pytest.raises(ValueError, match=r"^clip_grad_norm: no parameter has a gradient; .* in backward frees"):
        clip_grad_norm(model, 1.0)
    loss = model(IDS, labels=IDS).loss
    with pytest.raises(ValueError, match=r"^StepInBackward: a second backward before optimizer.step\(\); expected one"):
        loss.backward()
    optimizer.step()
    step(model, optimizer)


def test_gradients_and_devices_are_checked() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(ValueError, match=r"^StepInBackward: a parameter has a gradient already; call optimizer.zero_g"):
        StepInBackward(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device="meta"))]})
    with pytest.raises(ValueError, match=r"^StepInBackward: parameters are on cpu, meta; expected one device"):
        StepInBackward(optimizer)


def test_gradients_that_are_not_finite_skip_their_parameter() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([one, other], lr=0.1)
    skip = SkipNonFinite(optimizer)
    StepInBackward(optimizer, skip)
    (one * torch.nan + other).sum().backward()
    optimizer.step()
    assert torch.equal(one, torch.ones(2))
    assert (other < 1).all()
    assert skip.count == 1


def test_removing_restores_the_optimizer() -> None:
    model = tiny_llama()
    optimizer = make_optimizer(model, lr=0.01)
    StepInBackward(optimizer).remove()
    model(IDS, labels=IDS).loss.backward()
    before = next(model.parameters()).detach().clone()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not optimizer.state
    optimizer.step()
    assert not torch.equal(next(model.parameters()), before)
    assert set(KINDS)
