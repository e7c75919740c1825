"""An exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.checks import FLAG, FRACTION, check
from ligerzoo.errors import LigerzooError
from ligerzoo.train.optimizers.groups import trainable_parameters


class EMA:
    """Averages the trainable weights over the updates (Polyak & Juditsky 1992), in fp32 and without a host sync.

        average <- d average + (1 - d) weight,   d = min(decay, (1 + n) / (10 + n)) in update n from 0

    The smaller d of the first updates keeps the initial weights from dominating the average. It is in fp32, since in
    bf16 most updates would be lost. Frozen parameters need no average, tied ones have one, sharded ones (DTensors) have
    sharded ones.

    Args:
        model: the model.
        decay: from 0 to 1.
        warmup: use smaller decays in the first updates, else d = decay.

    Raises:
        ValueError: `decay` is out of range, or the model has no trainable parameter.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = True) -> None:
        check("EMA", FRACTION, decay=decay)
        check("EMA", FLAG, warmup=warmup)
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        self._parameters = trainable_parameters(model)
        self._averages = {
            name: parameter.detach().to(torch.float32, copy=True) for name, parameter in self._parameters.items()
        }
        self._is_swapped = False

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights to the average. Call it after each `optimizer.step()`.

        Raises:
            ValueError: within `swapped`, where the weights are the average.
        """
        if self._is_swapped:
            what = "called within EMA.swapped(), where the model has the averaged weights"
            raise LigerzooError(what, where="EMA.update")
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        for name, average in self._averages.items():
            average.lerp_(self._parameters[name].detach().float(), 1 - decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """A context in which the model has the averaged weights, rounded to its dtype; then its own again, bit for bit.

        For evaluating or saving. Keeps a copy of the weights meanwhile.
        """
        if self._is_swapped:
            raise LigerzooError("called within EMA.swapped()", where="EMA.swapped", expected="one at a time")
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._write(self._averages)
        self._is_swapped = True
        try:
            yield
        finally:
            self._write(own)
            self._is_swapped = False

    @torch.no_grad()
    def _write(self, weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._parameters[name].copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages by parameter name, not copied, and the number of updates."""
        return {"updates": self.updates, "averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` has returned.

        Raises:
            ValueError: the names or shapes are not those of the model's trainable parameters.
        """
        averages: dict[str, Tensor] = state_dict["averages"]
        different = sorted(averages.keys() ^ self._averages.keys())
        if not different:
            different = [name for name, average in averages.items() if average.shape != self._averages[name].shape]
        if different:
            what = f"{different[0]!r} is missing, unexpected or of another shape"
            expected = "the averages of this model's trainable parameters"
            raise LigerzooError(what, where="EMA.load_state_dict", expected=expected)
        for name, average in averages.items():
            self._averages[name].copy_(average)
        self.updates = state_dict["updates"]
