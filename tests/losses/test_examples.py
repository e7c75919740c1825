"""Small models train with the losses, and the recipes in docs/losses.md run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo import AutoModel, losses
from ligerzoo.losses import model_token_logps
from tests.losses.test_models import IGNORED, batch_of, tiny

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
RECIPES = {
    name: re.search(rf"```python\n([^`]*import {name}\n[^`]*)```", PAGE)[1]  # type: ignore[index]
    for name in ("DPO", "GRPO")
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_in_docs(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unchanged except for the model, its dtype, the device and the length of completions."""
    monkeypatch.setattr(AutoModel, "from_pretrained", lambda *_, device, **__: tiny().to(device))
    input_ids, labels = (t.to(device) for t in batch_of())
    pairs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}
    variables: dict[str, Any] = {"batches": [pairs] * 2}
    logps: list[Tensor] = []

    def reward(texts: Tensor) -> Tensor:
        with torch.no_grad():
            logps.append(model_token_logps(variables["model"], texts, texts))
        return texts[:, -1].float()

    if name == "GRPO":
        variables = {"batches": [input_ids[:2, :3]] * 2, "reward": reward, "end": 2}
    recipe = RECIPES[name].replace('"cuda"', repr(device)).replace("max_new_tokens=512", "max_new_tokens=5")
    exec(recipe, variables)  # noqa: S102
    assert variables["loss"].isfinite()
    before = tiny().to(device).state_dict()
    assert all(not torch.equal(p, before[n]) for n, p in variables["model"].state_dict().items())
    if name == "GRPO":
        assert "autocast" not in recipe  # with it, sampling could not run as captured graphs
        is_label = torch.nn.functional.pad(variables["labels"][:, 1:] != -100, (0, 1))
        assert is_label.any(1).all()
        torch.testing.assert_close(variables["old_logps"][is_label], logps[-1][is_label], rtol=0, atol=1e-4)


def test_dpo_raises_the_margin() -> None:
    model, reference = tiny(), tiny()
    input_ids, labels = batch_of(batch=8)
    dpo = losses.DPO(beta=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    margins = []
    for _ in range(15):
        loss, metrics = dpo.of(model, input_ids, labels, reference=reference)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        margins.append(metrics["rewards/margins"].item())
    assert margins[0] == 0.0
    assert margins[-1] > 0.5
    assert metrics["rewards/accuracies"] == 1.0


def test_grpo_raises_the_reward() -> None:
    """The reward of a completion is its fraction of even tokens."""
    model = tiny()
    prompts = torch.randint(31, (4, 3)).repeat_interleave(8, 0)  # groups of eight
    grpo = losses.GRPO(variant="dapo", epsilon_high=0.28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def reward_of(completions: Tensor) -> Tensor:
        return (completions % 2 == 0).float().mean(1)

    rewards = []
    for _ in range(20):
        texts = model.generate(prompts, max_new_tokens=6, do_sample=True, eos_token_id=[], pad_token_id=0)
        reward = reward_of(texts[:, 3:]).view(4, 8)
        advantages = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
        labels = texts.clone()
        labels[:, :3] = IGNORED
        with torch.no_grad():
            old_logps = model_token_logps(model, texts, labels)
        for _ in range(2):
            loss, _ = grpo.of(model, texts, labels, advantages, old_logps=old_logps)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        rewards.append(reward.mean().item())
    assert sum(rewards[:3]) / 3 < 0.65
    assert sum(rewards[-3:]) / 3 > 0.85


def test_distillation_lowers_the_divergence() -> None:
    student, teacher = tiny(), tiny(seed=5, width=32)
    input_ids, labels = batch_of(batch=8)
    distillation = losses.Distillation(divergence="jsd", beta=0.5)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    divergences = []
    for _ in range(30):
        loss, _ = distillation.of_teacher(student, teacher, input_ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        divergences.append(loss.item())
    assert divergences[-1] < 0.4 * divergences[0]
