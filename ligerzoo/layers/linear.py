"""Linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ligerzoo.kernels import linears
from ligerzoo.kernels.dispatch import Backend
from ligerzoo.kernels.few_rows import product, uses_few_rows
from ligerzoo.kernels.row_sums import would_split
from ligerzoo.layers.plain import is_plain_tensor, is_unmodified
from ligerzoo.layers.quantized import as_int8

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
    """`torch.nn.functional.linear`; by a kernel for few rows where it is faster, or sums must not be split."""
    if not torch.is_grad_enabled() or would_split(x, weight):
        if is_plain_tensor(weight, bias):
            return linears(x, [weight], [bias])[0]
        if (int8 := _int8_parameters(x, [weight], [bias], "auto")) is not None:
            return linears(x, *int8)[0]
    return product(x, weight, bias)


class LinearParameters(NamedTuple):
    """Parameters of linear layers of one input, for a fused kernel.

    Attributes:
        weights: (O_i, H) each.
        biases: (O_i,) or None each.
        scales: (O_i,) each, of int8 weights; None for weights in floating point.
    """

    weights: list[Tensor]
    biases: list[Tensor | None]
    scales: list[Tensor] | None


def fusible_parameters(x: Tensor, *layers: nn.Module, backend: Backend) -> LinearParameters | None:
    """Returns what `kernels.linears` and `kernels.linear_glu` need to compute several linear layers of x.

    None if the layers must compute it themselves: one has hooks or a wrapper, or weights that no kernel reads. Weights
    that torchao has quantized to int8 are read where the kernel for few rows runs.
    """
    if not all(is_unmodified(layer, Linear, nn.Linear) for layer in layers):
        return None
    weights, biases = ([getattr(layer, name) for layer in layers] for name in ("weight", "bias"))
    if is_plain_tensor(*weights, *biases):
        return LinearParameters(weights, biases, None)
    return _int8_parameters(x, weights, biases, backend)


def _int8_parameters(
    x: Tensor, weights: Sequence[Tensor], biases: list[Tensor | None], backend: Backend
) -> LinearParameters | None:
    int8 = [parts for weight in weights if (parts := as_int8(weight)) is not None]
    if len(int8) < len(weights) or not is_plain_tensor(*biases):
        return None
    data, scales = [weight.data for weight in int8], [weight.scale for weight in int8]
    return LinearParameters(data, biases, scales) if uses_few_rows(x, data, biases, backend, scales) else None


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
