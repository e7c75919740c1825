"""Linear layers."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor, nn

from ligerzoo.layers.plain import is_unmodified
from ligerzoo.layers.projection import LinearTerms, linear

INIT_STD = 0.02
"""Default standard deviation with which layers initialize their matrices."""


class Initialized(Protocol):
    """A layer that initializes its own parameters."""

    def init_weights(self, std: float = INIT_STD) -> None:
        """Initializes the parameters and buffers of the layer, without those of its parts."""


Layer = TypeVar("Layer", bound=Initialized)


def initialize(layer: Layer, owner: type[Layer]) -> None:
    """Initializes a layer at the end of the constructor of `owner`, its class or a base of it.

    A subclass with a constructor has parameters yet to come: it gets the weights of `owner`, and calls its own
    `init_weights` when it is complete.
    """
    if type(layer).__init__ is owner.__init__:
        layer.init_weights()
    else:
        owner.init_weights(layer)


def init_matrix(weight: Tensor, bias: Tensor | None, std: float) -> None:
    """Samples a weight from N(0, std^2) and sets a bias to 0."""
    nn.init.normal_(weight, std=std)
    if bias is not None:
        nn.init.zeros_(bias)


class Linear(nn.Linear):
    """`torch.nn.Linear` whose weight is initialized from a normal distribution, and whose bias is initialized to 0."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., K) -> (..., N)."""
        return linear(x, *self._tensors())

    def terms(self) -> LinearTerms | None:
        """What `forward` computes, for a fused kernel; None for a subclass, and for a layer with hooks or a wrapper."""
        return LinearTerms(*self._tensors()) if is_unmodified(self, Linear) else None

    def _tensors(self) -> tuple[Tensor, Tensor | None]:
        own = self._parameters  # read directly, since `self.weight` takes a microsecond
        if "weight" in own and "bias" in own:
            return own["weight"], own["bias"]  # type: ignore[return-value]
        return self.weight, self.bias

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2) and sets the bias to 0."""
        init_matrix(self.weight, self.bias, std)

    def reset_parameters(self) -> None:
        """Calls `init_weights`; the constructor of `torch.nn.Linear` calls this method."""
        self.init_weights()
