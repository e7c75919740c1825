"""Whether updates are large enough for the weights' dtype."""

from typing import Any

import pytest
import torch
from torch import nn

from ligerzoo.train.optimizers import make_optimizer, second_moment_is_stuck, share_unchanged

BF16 = torch.bfloat16


def test_the_share_of_weights_that_an_update_of_lr_leaves_unchanged() -> None:
    weight = nn.Parameter(torch.tensor([0.0, 1e-4, 1.0, -1.0, 0.5, 100.0, 2e-3, 3.0]))
    optimizer = make_optimizer([weight], lr=1e-3)
    assert share_unchanged(optimizer) == 0.0
    assert share_unchanged(optimizer, dtype=BF16) == 4 / 8  # half an ulp below 0.5 is 2^-10 = 0.00098
    assert share_unchanged(optimizer, lr=0.005, dtype=BF16) == 2 / 8  # 3.0 and 100.0
    assert share_unchanged(optimizer, lr=1e-9) == 5 / 8  # those above 0.03
    assert share_unchanged(optimizer, lr=10.0, dtype=BF16) == 0.0


def test_it_predicts_the_first_update_of_adamw() -> None:
    weight = nn.Parameter((torch.randn(5000) * 0.02).to(BF16))
    before = weight.detach().clone()
    optimizer = make_optimizer([weight], lr=2e-5, weight_decay=0.0, eps=0.0)
    predicted = share_unchanged(optimizer)
    weight.grad = torch.randn(5000).to(BF16)
    optimizer.step()
    assert 0.3 < predicted < 0.9
    assert (weight == before).float().mean().item() == pytest.approx(predicted, abs=0.05)


@pytest.mark.parametrize("name, options, share, is_stuck", [
    ("adamw", {}, 1.0, True),
    ("adamw", {"betas": (0.9, 0.95)}, 1.0, False),
    ("adamw", {"stochastic_rounding": True}, 0.0, False),
    ("muon", {}, 1.0, True),
    ("muon", {"state_dtype": torch.float32}, 1.0, False),
    ("muon", {"stochastic_rounding": True}, 0.0, False),
    ("adamw-8bit", {}, 1.0, False),
    ("adamw-8bit", {"stochastic_rounding": True}, 0.0, False),
])  # fmt: skip
def test_every_optimizer(name: str, options: dict[str, Any], share: float, is_stuck: bool) -> None:
    if "bit" in name:
        pytest.importorskip("torchao")
    weights = [nn.Parameter(torch.ones(4, 4, dtype=BF16)), nn.Parameter(torch.ones(4, dtype=BF16))]
    groups = [{"params": weights[:1], "muon": True}, {"params": weights[1:], "muon": False}]
    optimizer = make_optimizer(groups, name, lr=1e-5, **options)
    assert share_unchanged(optimizer) == share
    assert second_moment_is_stuck(optimizer) == is_stuck


def test_fp32_weights_are_never_stuck() -> None:
    assert not second_moment_is_stuck(make_optimizer([nn.Parameter(torch.ones(3))], lr=1e-5))
