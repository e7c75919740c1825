"""Normalization layers."""

import torch
from torch import Tensor, nn

from ligerzoo.kernels import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a learned scale (Zhang & Sennrich 2019), see `ligerzoo.kernels.rms_norm`.

    Args:
        hidden_size: H, the size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., H) -> (..., H)."""
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
