"""Metrics of a step: means over its micro-batches, and numbers that are not averaged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Averages:
    """Weighted means of numbers by name, on the device.

    Args:
        device: device of the numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._single: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}

    def update(self, numbers: Mapping[str, float]) -> None:
        """Sets numbers that are not averaged."""
        self._single.update(numbers)

    def add(self, numbers: Mapping[str, Tensor], weight: float) -> None:
        """Adds 0-d numbers of a micro-batch with a weight, such as its number of tokens."""
        for name, number in numbers.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * number.detach()
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def means(self) -> dict[str, Tensor]:
        """Returns all numbers as 0-d tensors."""
        single = torch.tensor(list(self._single.values()), dtype=torch.float64, device=self._device)
        means = {name: total / self._weights[name] for name, total in self._sums.items()}
        return {**dict(zip(self._single, single, strict=True)), **means}
