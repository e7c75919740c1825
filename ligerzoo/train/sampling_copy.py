"""A copy of a model in bfloat16 that samples, while the model itself trains in float32."""

from __future__ import annotations

import copy

import torch

from ligerzoo.models import CausalLM


class SamplingCopy:
    """A copy of a model in bfloat16, whose decode steps can run as CUDA graphs without autocast.

    Args:
        model: the model, before it trains.

    Attributes:
        model: the copy, without gradients.
    """

    def __init__(self, model: CausalLM) -> None:
        self._source = model
        self.model: CausalLM = copy.deepcopy(model).requires_grad_(False).bfloat16()

    @torch.no_grad()
    def update(self) -> None:
        """Copies the weights of the model, in place."""
        for own, source in zip(self.model.parameters(), self._source.parameters(), strict=True):
            own.copy_(source)
