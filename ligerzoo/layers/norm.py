"""Normalization layers."""

from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.kernels import add_rms_norm, gated_rms_norm, layer_norm, residual_rms_norm, rms_norm
from ligerzoo.kernels.dispatch import Backend, check_backend
from ligerzoo.kernels.gated_rms_norm import GateActivation
from ligerzoo.kernels.recompute import is_recording, recomputable
from ligerzoo.layers.linear import INIT_STD, initialize
from ligerzoo.layers.plain import is_plain
from ligerzoo.tensor_checks import explains_options


class RMSNorm(nn.Module):
    """Root-mean-square normalization (Zhang & Sennrich 2019); see `ligerzoo.kernels.rms_norm`.

    Args:
        hidden_size: H, the size of the last dimension.
        eps: added to the mean square.
        weight_offset: constant added to the weight to give the scale; the scale is initialized to 1.
        round_before_scale: round the normalized values to the dtype of `x` before scaling, instead of only after.
        elementwise_affine: whether to learn a scale, as in `torch.nn.RMSNorm`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        weight_offset: float = 0.0,
        round_before_scale: bool = True,
        elementwise_affine: bool = True,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight_offset = weight_offset
        self.round_before_scale = round_before_scale
        self.backend: Backend = check_backend(backend)
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        initialize(self, RMSNorm)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Sets the scale to 1, whatever `std` is."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., H) -> (..., H)."""
        return rms_norm(x, **self.kernel_options())

    def kernel_options(self) -> dict[str, Any]:
        """Returns the arguments of `ligerzoo.kernels.rms_norm` other than the input."""
        return {
            "weight": self.weight,
            "eps": self.eps,
            "weight_offset": self.weight_offset,
            "round_before_scale": self.round_before_scale,
            "backend": self.backend,
        }

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        affine = "" if self.weight is not None else ", elementwise_affine=False"
        return f"{self.hidden_size}, eps={self.eps}{offset}{affine}"


class AllHeadsRMSNorm(RMSNorm):
    """`RMSNorm` over all heads of a token as one vector (OLMo 2), instead of over each head.

    Its `hidden_size` is that of all heads together, N * D.
    """

    spans_heads = True

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., N, D) -> (..., N, D)."""
        return super().forward(x.flatten(-2)).view_as(x)


class GatedRMSNorm(nn.Module):
    """RMS normalization with an output gate, `norm(x) * silu(z)` or `norm(x * silu(z))`; see
    `ligerzoo.kernels.gated_rms_norm`.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        group_size: size of the groups of features that are normalized independently; None for one group. It must
            divide the features of the input.
        norm_before_gate: gate the normalized values, instead of normalizing the gated ones.
        activation: of the gate, "silu" or "sigmoid".
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        activation: GateActivation = "silu",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.activation: GateActivation = activation
        self.backend: Backend = check_backend(backend)
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        initialize(self, GatedRMSNorm)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Sets the scale to 1, whatever `std` is."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x: (..., D), z: (..., D) -> (..., D)."""
        return gated_rms_norm(
            x,
            z,
            self.weight,
            self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
            activation=self.activation,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """Layer normalization with a learned scale and optional bias (Ba et al. 2016); see `ligerzoo.kernels.layer_norm`.

    Args:
        hidden_size: H, the size of the last dimension.
        eps: added to the variance.
        bias: add a learned bias.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.backend: Backend = check_backend(backend)
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        initialize(self, LayerNorm)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Sets the scale to 1 and the bias to 0, whatever `std` is."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., H) -> (..., H)."""
        return layer_norm(x, self.weight, self.bias, self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


def normalize(x: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns `(norm(x), x)`, both (..., H), for a residual branch.

    The backward kernel adds the gradient of the residual if `norm` is an `RMSNorm` without hooks or wrappers (see
    `is_plain`).
    """
    if not is_plain(norm, RMSNorm):
        return norm(x), x
    normalized, x = residual_rms_norm(x, **norm.kernel_options())
    _declare(norm, normalized, x)
    return normalized, x


def recomputable_norm(x: Tensor, norm: nn.Module) -> Tensor:
    """Returns `norm(x)`, which an activation plan may recompute in backward; see `ligerzoo.kernels.recompute`."""
    normalized: Tensor = norm(x)
    if is_plain(norm, RMSNorm):
        _declare(norm, normalized, x)
    return normalized


def add_and_normalize(x: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns `(norm(x + residual), x + residual)`, both (..., H).

    Runs as one kernel if `norm` is an `RMSNorm` without hooks or wrappers (see `is_plain`).
    """
    if is_plain(norm, RMSNorm):
        normalized, summed = add_rms_norm(x, residual, **norm.kernel_options())
        _declare(norm, normalized, summed)
        return normalized, summed
    summed = x + residual
    return norm(summed), summed


def _declare(norm: RMSNorm, normalized: Tensor, x: Tensor) -> None:
    """Declares that backward may recompute `normalized` from `x`, which it keeps for the norm."""
    if is_recording():
        options = norm.kernel_options()
        weight = options.pop("weight")
        recomputable((normalized,), lambda x, weight: rms_norm(x, weight, **options), x, weight)
