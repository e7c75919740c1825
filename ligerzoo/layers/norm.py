"""Normalization layers."""

import torch
from torch import Tensor, nn

from ligerzoo.kernels import add_rms_norm, layer_norm, rms_norm
from ligerzoo.kernels.dispatch import Backend, check_backend
from ligerzoo.layers.plain import is_plain


class RMSNorm(nn.Module):
    """Root-mean-square normalization (Zhang & Sennrich 2019), see `ligerzoo.kernels.rms_norm`.

    Args:
        hidden_size: H, the size of the last dimension.
        eps: added to the mean square.
        weight_offset: the scale is this plus the weight, which is initialized so that both make 1.
        round_before_scale: whether the normalized numbers are rounded before they are scaled, or only after.
        elementwise_affine: whether there is a learned scale, as in `torch.nn.RMSNorm`.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference).
    """

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
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., H) -> (..., H)."""
        return rms_norm(
            x,
            self.weight,
            self.eps,
            weight_offset=self.weight_offset,
            round_before_scale=self.round_before_scale,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        affine = "" if self.weight is not None else ", elementwise_affine=False"
        return f"{self.hidden_size}, eps={self.eps}{offset}{affine}"


class AllHeadsRMSNorm(RMSNorm):
    """An `RMSNorm` of all heads of a token as one vector (OLMo 2), where a plain one takes each head by itself. Its
    size is that of all heads together."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., N, D) -> (..., N, D)."""
        return super().forward(x.flatten(-2)).view_as(x)


class LayerNorm(nn.Module):
    """Layer normalization with a learned scale and, if asked for, bias (Ba et al. 2016), see
    `ligerzoo.kernels.layer_norm`.

    Args:
        hidden_size: H, the size of the last dimension.
        eps: added to the variance.
        bias: whether there is one.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference).
    """

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
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one and the bias to zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., H) -> (..., H)."""
        return layer_norm(x, self.weight, self.bias, self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


def add_and_normalize(x: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), both (..., H); in one kernel where `norm` is an `RMSNorm` and no more."""
    if isinstance(norm, RMSNorm) and is_plain(norm, RMSNorm):
        return add_rms_norm(
            x,
            residual,
            norm.weight,
            norm.eps,
            weight_offset=norm.weight_offset,
            round_before_scale=norm.round_before_scale,
            backend=norm.backend,
        )
    summed = x + residual
    return norm(summed), summed
