"""xIELU, a trainable activation (Huang & Schlag 2024, "Deriving Activation Functions Using Integration")."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.kernels import Backend, xielu
from ligerzoo.kernels.dispatch import accumulation_dtype, check_backend
from ligerzoo.layers.linear import initialize

_INITIAL_SCALE = 0.8


class XIELU(nn.Module):
    """Quadratic for positive inputs, exponential for others, with a trainable curvature for each.

        x > 0:   a x^2 + beta x,                        a = softplus(alpha_p)
        else:    b (exp(min(x, eps)) - 1 - x) + beta x,   b = beta + softplus(alpha_n)

    Computed in fp32 and rounded once; see `ligerzoo.kernels.xielu`.

    Args:
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Attributes:
        alpha_p: (1,), initialized so that a = 0.8.
        alpha_n: (1,), initialized so that b = 0.8.
        beta: 0-d buffer, 0.5: the slope at 0. Not trained.
        eps: 0-d buffer, -1e-6: keeps the exponential away from 0. Not trained.
    """

    beta: Tensor
    eps: Tensor

    def __init__(
        self,
        *,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.backend: Backend = check_backend(backend)
        self.alpha_p = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.alpha_n = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.register_buffer("beta", torch.empty((), device=device, dtype=dtype))
        self.register_buffer("eps", torch.empty((), device=device, dtype=dtype))
        initialize(self, XIELU)

    def init_weights(self, std: float = 0.0) -> None:
        """Sets the initial values, whatever `std` is."""
        nn.init.constant_(self.beta, 0.5)
        nn.init.constant_(self.eps, -1e-6)
        nn.init.constant_(self.alpha_p, math.log(math.expm1(_INITIAL_SCALE)))
        nn.init.constant_(self.alpha_n, math.log(math.expm1(_INITIAL_SCALE - 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., I) -> (..., I)."""
        wide = accumulation_dtype(x.dtype)
        beta = self.beta.to(wide)
        positive = F.softplus(self.alpha_p.to(wide))
        negative = beta + F.softplus(self.alpha_n.to(wide))
        return xielu(x, positive, negative, beta, self.eps.to(wide), backend=self.backend)
