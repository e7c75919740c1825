"""Linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.kernels import linears
from ligerzoo.kernels.dispatch import Backend
from ligerzoo.layers.plain import is_plain, is_plain_tensor

INIT_STD = 0.02
"""Default standard deviation with which layers initialize their matrices."""


def check_features(layer: nn.Module, x: Tensor, features: int) -> None:
    """Raises ValueError unless an input of a layer has this many features in its last dimension."""
    if x.shape[-1] != features:
        raise ValueError(
            f"{type(layer).__name__}: the input has shape {tuple(x.shape)}; expected {features} features in the last "
            "dimension, the layer's hidden_size"
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; by a fused kernel for few rows without gradients (`kernels.linears`)."""
    if torch.is_grad_enabled() or not is_plain_tensor(weight, bias):
        return F.linear(x, weight, bias)
    return linears(x, [weight], [bias])[0]


class Linear(nn.Linear):
    """`torch.nn.Linear` whose weight is initialized from a normal distribution, and whose bias is initialized to 0."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., K) -> (..., N)."""
        return linear(x, self.weight, self.bias)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2) and sets the bias to 0."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def reset_parameters(self) -> None:
        """Calls `init_weights`; the constructor of `torch.nn.Linear` calls this method."""
        self.init_weights()


def project_jointly(x: Tensor, *layers: nn.Module, backend: Backend = "auto") -> tuple[Tensor, ...]:
    """Returns the outputs of several linear layers for one input, (..., H) -> (..., O) each.

    By `ligerzoo.kernels.linears` if all are linear layers without hooks or wrappers (see `is_plain`).
    """
    if all(is_plain(layer, Linear, nn.Linear) for layer in layers):
        weights, biases = ([getattr(layer, name) for layer in layers] for name in ("weight", "bias"))
        return linears(x, weights, biases, backend=backend)
    return tuple(layer(x) for layer in layers)
