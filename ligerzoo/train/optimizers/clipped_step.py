"""`ClippedStep`: what follows backward in a training step."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from ligerzoo.train.optimizers.gradients import SkipNonFinite, clip_grad_norm


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether a hook runs when the gradient is complete, as that of an optimizer in backward."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


class ClippedStep:
    """Clips the gradients of a model, updates its weights and drops the gradients.

    Args:
        model: the model.
        optimizer: its optimizer.
        max_norm: norm to which the gradients are clipped; None for no clipping.
        skip: skips updates whose gradients are infinite or NaN; None updates with any gradients.

    Attributes:
        optimizer: as given.
        skip: as given.
    """

    skip: SkipNonFinite | None

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None, skip: SkipNonFinite | None
    ) -> None:
        self._model, self.optimizer, self._max_norm, self.skip = model, optimizer, max_norm, skip

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model and of the optimizer, each once."""
        groups = (group["params"] for group in self.optimizer.param_groups)
        return list(dict.fromkeys(chain(self._model.parameters(), *groups)))

    @property
    def has_norm(self) -> bool:
        """Whether gradients exist after backward: not with an optimizer in backward, which also skips by itself."""
        return self._max_norm is not None or not any(map(steps_in_backward, self.parameters))

    def __call__(self) -> Tensor | None:
        """Updates the weights, and what follows them.

        Returns:
            The norm of the gradients before clipping, 0-d; None if backward has updated the weights.
        """
        norm = self.update()
        self.finish()
        return norm

    def update(self) -> Tensor | None:
        """Clips the gradients, updates the weights and drops the gradients; can be captured in a CUDA graph."""
        norm = None
        if self.has_norm:
            norm = clip_grad_norm(self.parameters, self._max_norm)
            if self.skip is not None:
                self.skip(norm)
        self.optimizer.step()
        self.drop_gradients()
        return norm

    def finish(self) -> None:
        """Does what follows an update and is not captured."""

    def drop_gradients(self) -> None:
        """Frees the gradients."""
        for parameter in self.parameters:
            parameter.grad = None
