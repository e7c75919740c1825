"""Outputs answer like mappings and tuples, as transformers' do."""

from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ligerzoo.models import CausalLMOutput


@pytest.fixture(params=[{"loss": torch.ones(())}, {"logits": torch.ones(1, 2, 3)}, {}], ids=["loss", "logits", "empty"])
def outputs(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return CausalLMOutput(**request.param), CausalLMOutputWithPast(**request.param)


def test_an_output_answers_as_that_of_transformers(outputs: tuple[Any, Any]) -> None:
    ours, theirs = outputs
    assert list(ours) == list(ours.keys()) == list(theirs.keys())
    assert list(ours.items()) == list(theirs.items())
    assert list(ours.values()) == list(theirs.values())
    assert dict(ours) == dict(theirs)
    assert len(ours) == len(theirs)
    assert ours.to_tuple() == theirs.to_tuple() == ours[:]
    assert ours[1:] == theirs[1:]
    for name in ("loss", "logits", "past_key_values", "keys", "nothing"):
        assert (name in ours) == (name in theirs)
        assert ours.get(name) is theirs.get(name)
        assert ours.get(name, 3) is theirs.get(name, 3)
        for output in outputs:
            if name in output:
                assert output[name] is getattr(output, name)
            else:
                with pytest.raises(KeyError):
                    output[name]


def test_a_missing_item_is_named() -> None:
    with pytest.raises(KeyError, match="'logits': not in this CausalLMOutput; expected one of loss"):
        CausalLMOutput(loss=torch.ones(()))["logits"]
