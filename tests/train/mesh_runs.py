"""What each process of `test_mesh_combinations.py` does. Does not import transformers, which takes seconds."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.dtensors import full
from ligerzoo.train import processes
from ligerzoo.train.optimizers.clipped_step import ClippedStep
from tests.train.tiny_run import train


def recorded(given: Mapping[str, Any]) -> int:
    """Trains, and writes the gradients of the first step, before they are clipped, to a file."""
    update, steps = ClippedStep.update, itertools.count()

    def recording(self: ClippedStep) -> Tensor | None:
        if next(steps) == 0:
            weights = self._model.named_parameters()
            found = {name: full(one.grad).clone() for name, one in weights if one.grad is not None}
            if processes.is_main():
                torch.save(found, f"{given['output']}-gradients.pt")
        return update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClippedStep, "update", recording)
        return train(dict(given))


def train_all(rank: int, given: Sequence[Mapping[str, Any]]) -> None:
    for one in given:
        assert recorded(one) == 0
