"""Linear layer."""

from __future__ import annotations

from torch import Tensor, nn

INIT_STD = 0.02
"""Default standard deviation with which layers initialize their matrices."""


def check_features(layer: nn.Module, x: Tensor, features: int) -> None:
    """Raises ValueError unless an input of a layer has this many features in its last dimension."""
    if x.shape[-1] != features:
        raise ValueError(
            f"{type(layer).__name__}: the input has shape {tuple(x.shape)}; expected {features} features in the last "
            "dimension, the layer's hidden_size"
        )


class Linear(nn.Linear):
    """`torch.nn.Linear` whose weight is initialized from a normal distribution, and whose bias is initialized to 0."""

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2) and sets the bias to 0."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def reset_parameters(self) -> None:
        """Calls `init_weights`; the constructor of `torch.nn.Linear` calls this method."""
        self.init_weights()
