"""Schedules as functions of the step, and setting learning rates."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from ligerzoo.train.optimizers import make_optimizer, schedule, set_lr


def factors(name: Any, steps: int, **options: Any) -> list[float]:
    factor = schedule(name, steps, **options)
    return [factor(step) for step in range(steps + 2)]


def test_constant() -> None:
    assert factors("constant", 3) == [1.0] * 5
    assert factors("constant", 4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert factors("constant", 2, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]


def test_linear() -> None:
    assert factors("linear", 4) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    assert factors("linear", 6, warmup_steps=2, min_factor=0.2) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine() -> None:
    expected = [0.5, 1.0, *(0.1 + 0.9 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)), 0.1, 0.1]
    assert factors("cosine", 6, warmup_steps=2, min_factor=0.1) == pytest.approx(expected)


def test_wsd() -> None:
    expected = [1 / 3, 2 / 3, 1, 1, 1, 1, 0.5, 0.0, 0.0]
    assert factors("wsd", 7, warmup_steps=3, decay_steps=2) == pytest.approx(expected)
    assert factors("wsd", 20, decay_steps=None)[17:21] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert factors("wsd", 3, decay_steps=0) == [1.0] * 5
    longer, shorter = schedule("wsd", 1000, warmup_steps=5, decay_steps=100), schedule("wsd", 500, warmup_steps=5)
    assert [longer(step) for step in range(400)] == [shorter(step) for step in range(400)]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_torch_s_schedulers_agree(name: Any) -> None:
    """After the warmup, which torch begins at another factor."""
    optimizer = make_optimizer([nn.Parameter(torch.ones(1))], lr=0.5)
    after = {
        "constant": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        "linear": torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.05),
        "wsd": torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10),
    }[name]
    options = {} if name == "constant" else {"min_factor": 0.1}
    steps = 25 if name == "wsd" else 14
    factor = schedule(name, steps, warmup_steps=4, **options, **({"decay_steps": 10} if name == "wsd" else {}))
    for step in range(steps - 10, steps):
        assert 0.5 * factor(step) == pytest.approx(after.get_last_lr()[0])
        optimizer.step()
        after.step()


@pytest.mark.parametrize("arguments, error, message", [
    (("cosin", 5), ValueError, r"schedule: name='cosin'; expected .*\. Did you mean 'cosine'\?"),
    (("linear", 0), ValueError, "schedule: steps=0; expected an integer, 1 or more"),
    (("linear", 5.0), TypeError, "schedule: steps=5.0; expected an integer"),
    (("linear", 5, {"warmup_steps": 6}), ValueError, "schedule: decay_steps=-1|schedule: warmup_steps=6"),
    (("wsd", 5, {"warmup_steps": 3, "decay_steps": 3}), ValueError, "schedule: warmup_steps=3 and decay_steps=3; exp"),
    (("cosine", 5, {"decay_steps": 3}), ValueError, "schedule: decay_steps=3 with 'cosine'; expected None"),
    (("constant", 5, {"min_factor": 0.1}), ValueError, 'schedule: min_factor=0.1 with "constant", which never falls'),
    (("cosine", 5, {"min_factor": 1.1}), ValueError, "schedule: min_factor=1.1; expected a number from 0 to 1"),
])  # fmt: skip
def test_arguments_are_checked(arguments: Any, error: type[Exception], message: str) -> None:
    name, steps, *options = arguments
    with pytest.raises(error, match=f"^({message})"):
        schedule(name, steps, **(options[0] if options else {}))
    with pytest.raises(ValueError, match=r"^schedule: step=-1; expected an integer, 0 or more"):
        schedule("linear", 5)(-1)


def test_set_lr_scales_the_initial_lr_of_each_group() -> None:
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    tensor = torch.tensor(0.5)
    groups: list[dict[str, Any]] = [{"params": [one], "lr": 2.0}, {"params": [other]}]
    for optimizer in (make_optimizer(groups, lr=tensor.item()), torch.optim.AdamW(groups, lr=tensor, fused=True)):
        for factor in (0.5, 0.1, 1.0, 0.0):
            set_lr(optimizer, factor)
            assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([2 * factor, 0.5 * factor])
        with pytest.raises(ValueError, match=r"^set_lr: factor=2; expected a number from 0 to 1"):
            set_lr(optimizer, 2)
    assert optimizer.param_groups[1]["lr"] is not None
    assert tensor == 0.0


def test_the_initial_lr_is_saved() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([weight], lr=0.4)
    set_lr(optimizer, 0.5)
    loaded = make_optimizer([weight], lr=0.1)
    loaded.load_state_dict(optimizer.state_dict())
    set_lr(loaded, 0.25)
    assert loaded.param_groups[0]["lr"] == 0.1
