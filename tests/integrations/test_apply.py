"""ligerzoo's kernels in models of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ligerzoo.integrations import apply
from tests.integrations.families import FAMILIES, inputs, tiny
from tests.models.comparing import TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore")  # TODO


def results(model: PreTrainedModel, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the logits, the loss of training and all gradients; of a vision tower, its output and its gradients."""
    model.eval()
    if "input_ids" not in given:
        output = model(**given)[0]
        output.square().sum().backward()
        return {"output": output.detach(), **gradients(model)}
    with torch.no_grad():
        logits = model(**given).logits
    model.train()
    loss = model(**given, labels=given["input_ids"]).loss
    loss.backward()
    return {"logits": logits, "loss": loss.detach(), **gradients(model)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Compares each tensor relative to its largest value, and those that are 0 up to rounding to the largest of all."""
    assert ours.keys() == theirs.keys()
    negligible = 1e-4 * max(tensor.abs().max().item() for tensor in theirs.values())
    for name, tensor in theirs.items():
        scale = tensor.abs().max().item()
        error = (ours[name] - tensor).abs().max().item()
        assert ours[name].shape == tensor.shape
        assert error <= TOLERANCE * max(scale, negligible), f"{name}: error {error:.1e}, largest value {scale:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_the_model(family: str) -> None:
    model = tiny(family)
    given = inputs(model)
    before = results(model, given)
    apply(model)
    after = results(model, given)
    assert after.keys() == before.keys()
    assert_same(after, before)
