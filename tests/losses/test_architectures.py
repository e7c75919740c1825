"""The losses of every architecture of the zoo."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo import AutoModel, losses
from tests.losses import oracles
from tests.losses.test_losses import assert_same
from tests.losses.test_models import assert_close, batch_of, gradients_of, naive_logps
from tests.models.prompts import image, prompt
from tests.models.zoo import CHECKPOINTS

FIRST_OF_EACH = {row.config["model_type"]: row for row in reversed(CHECKPOINTS)}
BALANCED = {row.config["model_type"]: row for row in CHECKPOINTS if row.config.get("output_router_logits")}
ONE_OF_EACH = {**FIRST_OF_EACH, **BALANCED}


@pytest.mark.parametrize("model_type", ONE_OF_EACH)
def test_every_architecture(model_type: str, tmp_path: Path, device: str) -> None:
    ONE_OF_EACH[model_type].write(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype="float32", device=device)
    input_ids, labels = (t.to(device) for t in batch_of(length=12))
    logps, target = naive_logps(model, input_ids, labels)
    formula = functools.partial(oracles.DPO["sigmoid"], b=0.1, e=0.0)
    expected = oracles.pairs(logps, target, formula, nll_weight=0.5)
    aux_loss = model(input_ids, labels=labels).aux_loss
    assert (aux_loss is not None) == (model_type in BALANCED)
    if aux_loss is not None:
        expected = expected + model.aux_loss_weight * aux_loss
    wanted = gradients_of(model, expected)
    loss, metrics = losses.DPO(nll_weight=0.5).of(model, input_ids, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert_close(gradients_of(model, loss), wanted)
    assert metrics["logps/chosen"].item() == pytest.approx(logps[:2].sum().item() / 2, rel=1e-4)
    padded = torch.ones_like(input_ids)
    assert_same([losses.DPO(nll_weight=0.5).of(model, input_ids, labels, attention_mask=padded).loss], [loss], 1e-5)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_pictures_reach_model_reference_and_teacher(model_type: str, tmp_path: Path, device: str) -> None:
    row = FIRST_OF_EACH[model_type]
    row.write(tmp_path)
    model, other = (AutoModel.from_pretrained(tmp_path, dtype="float32", device=device) for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight.mul_(0.8)
    p = prompt([[3, image(1, 3), 7], [5, image(3, 2), 2]], vars(model.config.vision_config))
    ids, mask = p.ids.to(device), p.mask.to(device)
    pictures = {name: tensor.to(device) for name, tensor in p.vision.items()}
    labels = ids.masked_fill((p.types.to(device) != 0) | (mask == 0) | (mask.roll(1, 1) == 0), oracles.IGNORED)
    target = F.pad(labels[:, 1:], (0, 1), value=oracles.IGNORED)
    counts = target != oracles.IGNORED
    of_model, of_other = (m(ids, mask, **pictures).logits.log_softmax(-1) for m in (model, other))

    def sums(distribution: Tensor) -> Tensor:
        found = distribution.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        return torch.where(counts, found, 0.0).sum(-1)

    inputs: dict[str, Any] = {"attention_mask": mask, "model_inputs": pictures}
    chosen, rejected = sums(of_model) - sums(of_other).detach()
    expected = gradients_of(model, -F.logsigmoid(0.1 * (chosen - rejected)))
    assert_close(gradients_of(model, losses.DPO().of(model, ids, labels, reference=other, **inputs).loss), expected)

    of_model = model(ids, mask, **pictures).logits.log_softmax(-1)[counts]
    kl = F.kl_div(of_model, of_other[counts].detach(), log_target=True, reduction="batchmean")
    expected = gradients_of(model, kl)
    distillation = losses.Distillation(divergence="forward_kl")
    assert_close(gradients_of(model, distillation.of_teacher(model, other, ids, labels, **inputs).loss), expected)
