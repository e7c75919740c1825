"""What a run trains: the model, its optimizer and averages, and the position in the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from ligerzoo import adapters
from ligerzoo.dtensors import local
from ligerzoo.errors import LigerzooError, first_names
from ligerzoo.models import CausalLM
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train import processes
from ligerzoo.train.fingerprint import fingerprint
from ligerzoo.train.optimizers import EMA
from ligerzoo.train.run_checkpoint import last_finite
from ligerzoo.vision.processor import Processor

OPTIMIZER, AVERAGES = "optimizer", "averages"
"""Names of states and of their directories in a checkpoint."""


class Stateful(Protocol):
    """Something with a state of numbers, texts, tensors, and lists and dicts of these."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainedState:
    """What a run trains, and what continuing needs.

    Attributes:
        model: the model.
        tokenizer: its tokenizer or processor.
        optimizer: its optimizer.
        data: the position in the data.
        ema: the averaged weights, if there are any.
    """

    model: CausalLM
    tokenizer: Tokenizer | Processor
    optimizer: torch.optim.Optimizer
    data: Stateful
    ema: EMA | None

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that train, by name."""
        return {name: weight.detach() for name, weight in self.model.named_parameters() if weight.requires_grad}

    def fingerprints(self, fingerprint: Callable[[object], str] = fingerprint) -> dict[str, str]:
        """Returns the fingerprints of the states that are not in state.pt. All processes must call it."""
        weights = self.weights
        frozen = {name: tensor for name, tensor in self.model.state_dict().items() if name not in weights}
        origin = "weights of MODEL" if adapters.has_adapters(self.model) else "weights that are not trained"
        found = {"weights that are trained": fingerprint(weights), origin: fingerprint(frozen)}
        found[OPTIMIZER] = fingerprint(self.optimizer.state_dict()["state"])
        if self.ema is not None:
            found[AVERAGES] = fingerprint(self.ema.state_dict()["averages"])
        return found

    def refuse_infinite_weights(self, output: Path, when: str) -> None:
        """Raises LigerzooError if a weight that trains is infinite or NaN, in all processes."""
        found = dict.fromkeys(chain.from_iterable(processes.gather(weights_that_are_not_finite(self.model))))
        if found:
            what, where = f"weights are infinite or NaN {when}, so the run stops", first_names(list(found), 3)
            remedy = f"Look at the data, or lower the learning rate.{last_finite(output)}"
            raise LigerzooError(what, where=where, remedy=remedy)


def weights_that_are_not_finite(model: CausalLM) -> list[str]:
    """Returns the names of weights that train and, in this process, have a value that is infinite or NaN.

    Waits for the GPU.
    """
    own = {name: local(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    largest = [
        (name, torch.linalg.vector_norm(weight.detach(), torch.inf).double())
        for name, weight in own.items()
        if weight.numel()
    ]
    if not largest:
        return []
    are_finite = torch.stack([value for _, value in largest]).isfinite().tolist()
    return [name for (name, _), is_finite in zip(largest, are_finite, strict=True) if not is_finite]
