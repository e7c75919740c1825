"""Tiny models of all text architectures."""

import pytest
import torch

from ligerzoo.convert import architecture_of
from ligerzoo.models import CausalLM
from tests.models.tiny import Tiny
from tests.models.zoo import TEXT_CHECKPOINTS

FIRST: dict[str, Tiny] = {row.config["model_type"]: row for row in reversed(TEXT_CHECKPOINTS)}
"""The first checkpoint of each architecture."""


def build(model_type: str) -> CausalLM:
    """Returns a model with weights large enough that errors are visible."""
    row = FIRST[model_type]
    architecture = architecture_of(model_type)
    torch.manual_seed(0)
    model: CausalLM = architecture.model_class(architecture.config_from_hf({**row.config, **row.corrected}))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


@pytest.fixture(params=[row for _, row in sorted(FIRST.items())], ids=sorted(FIRST))
def tiny_model(request: pytest.FixtureRequest) -> CausalLM:
    return build(request.param.config["model_type"])
