"""Names of transformers' modules in adapters: today's are those of its models, and old ones mean the same modules."""

import pytest
import torch

from ligerzoo import from_transformers
from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.stored_tensors import StoredTensors
from ligerzoo.convert.tensor_slices import shapes_of
from tests.models.tiny import Tiny, random_model
from tests.models.zoo import CHECKPOINTS

FIRST = {row.config["model_type"]: row for row in reversed(CHECKPOINTS)}
"""One checkpoint of each architecture."""


@pytest.mark.parametrize("row", FIRST.values(), ids=FIRST)
def test_parameters_are_those_of_transformers(row: Tiny) -> None:
    theirs = random_model(row.config)
    for index, parameter in enumerate(theirs.parameters()):  # so that no two norms are equal
        parameter.data += 0.01 * index
    ours = from_transformers(theirs, copy=True)
    state = ours.state_dict()
    slices = architecture_of_model(ours).module_layout(ours.config).slices(shapes_of(state))
    modules, expected = StoredTensors(slices, state), theirs.state_dict()
    assert {name for name in expected if "rotary_emb" not in name} == set(modules)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in modules.items())
