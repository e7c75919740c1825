"""The losses of every architecture of the zoo."""

import functools
from pathlib import Path

import pytest
import torch

from ligerzoo import AutoModel, losses
from tests.losses import oracles
from tests.losses.test_losses import assert_same
from tests.losses.test_models import assert_close, batch_of, gradients_of, naive_logps
from tests.models.zoo import CHECKPOINTS

FIRST_OF_EACH = {row.config["model_type"]: row for row in reversed(CHECKPOINTS)}


@pytest.mark.parametrize("model_type", FIRST_OF_EACH)
def test_every_architecture(model_type: str, tmp_path: Path, device: str) -> None:
    FIRST_OF_EACH[model_type].write(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype="float32", device=device)
    input_ids, labels = (t.to(device) for t in batch_of(length=12))
    logps, target = naive_logps(model, input_ids, labels)
    formula = functools.partial(oracles.DPO["sigmoid"], b=0.1, e=0.0)
    expected = oracles.pairs(logps, target, formula, nll_weight=0.5)
    aux_loss = model(input_ids, labels=labels).aux_loss
    if aux_loss is not None:
        expected = expected + model.aux_loss_weight * aux_loss
    wanted = gradients_of(model, expected)
    loss, metrics = losses.DPO(nll_weight=0.5).of(model, input_ids, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert_close(gradients_of(model, loss), wanted)
    assert metrics["logps/chosen"].item() == pytest.approx(logps[:2].sum().item() / 2, rel=1e-4)
    padded = torch.ones_like(input_ids)
    assert_same([losses.DPO(nll_weight=0.5).of(model, input_ids, labels, attention_mask=padded).loss], [loss], 1e-5)
