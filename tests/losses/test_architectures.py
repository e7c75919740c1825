"""The losses with every architecture of the zoo."""

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
from tests.models.tiny import Tiny
from tests.models.zoo import CHECKPOINTS

FIRST_CHECKPOINTS = {checkpoint.config["model_type"]: checkpoint for checkpoint in reversed(CHECKPOINTS)}
ROUTER_LOSS_CHECKPOINTS = {
    checkpoint.config["model_type"]: checkpoint
    for checkpoint in CHECKPOINTS
    if checkpoint.config.get("output_router_logits")
}
CHECKPOINT_BY_TYPE = {**FIRST_CHECKPOINTS, **ROUTER_LOSS_CHECKPOINTS}


@pytest.mark.every_layer
@pytest.mark.parametrize("checkpoint", CHECKPOINT_BY_TYPE.values(), ids=CHECKPOINT_BY_TYPE)
def test_every_architecture(checkpoint: Tiny, tmp_path: Path, device: str) -> None:
    checkpoint.write(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype="float32", device=device)
    input_ids, labels = (t.to(device) for t in batch_of(length=12))
    logps, target = naive_logps(model, input_ids, labels)
    formula = functools.partial(oracles.DPO["sigmoid"], b=0.1, e=0.0)
    expected = oracles.pairs(logps, target, formula, nll_weight=0.5)
    aux_loss = model(input_ids, labels=labels).aux_loss
    assert (aux_loss is not None) == (checkpoint.config["model_type"] in ROUTER_LOSS_CHECKPOINTS)
    if aux_loss is not None:
        expected = expected + model.aux_loss_weight * aux_loss
    expected_gradients = gradients_of(model, expected)
    loss, metrics = losses.CPO(nll_weight=0.5).of(model, input_ids, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert_close(gradients_of(model, loss), expected_gradients)
    assert metrics["logps/chosen"].item() == pytest.approx(logps[:2].sum().item() / 2, rel=1e-4)
    mask = torch.ones_like(input_ids)
    assert_same([losses.CPO(nll_weight=0.5).of(model, input_ids, labels, attention_mask=mask).loss], [loss], 1e-5)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_images_reach_model_reference_and_teacher(model_type: str, tmp_path: Path, device: str) -> None:
    checkpoint = FIRST_CHECKPOINTS[model_type]
    checkpoint.write(tmp_path)
    model, other = (AutoModel.from_pretrained(tmp_path, dtype="float32", device=device) for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight.mul_(0.8)
    p = prompt([[3, image(1, 3), 7], [5, image(3, 2), 2]], vars(model.config.vision_config))
    ids, mask = p.ids.to(device), p.mask.to(device)
    images = {name: tensor.to(device) for name, tensor in p.vision.items()}
    labels = ids.masked_fill((p.types.to(device) != 0) | (mask == 0) | (mask.roll(1, 1) == 0), oracles.IGNORED)
    target = F.pad(labels[:, 1:], (0, 1), value=oracles.IGNORED)
    valid = target != oracles.IGNORED
    model_logps, other_logps = (m(ids, mask, **images).logits.log_softmax(-1) for m in (model, other))

    def sums(distribution: Tensor) -> Tensor:
        target_logps = distribution.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        return torch.where(valid, target_logps, 0.0).sum(-1)

    inputs: dict[str, Any] = {"attention_mask": mask, "model_inputs": images}
    chosen, rejected = sums(model_logps) - sums(other_logps).detach()
    expected = gradients_of(model, -F.logsigmoid(0.1 * (chosen - rejected)))
    assert_close(gradients_of(model, losses.DPO().of(model, ids, labels, reference=other, **inputs).loss), expected)

    model_logps = model(ids, mask, **images).logits.log_softmax(-1)[valid]
    kl = F.kl_div(model_logps, other_logps[valid].detach(), log_target=True, reduction="batchmean")
    expected = gradients_of(model, kl)
    distillation = losses.Distillation(divergence="forward_kl")
    assert_close(gradients_of(model, distillation.of_teacher(model, other, ids, labels, **inputs).loss), expected)
