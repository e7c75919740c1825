"""Routers of mixture-of-experts layers: which experts process a token, and with which weights.

Shapes: T tokens of all sequences in the call, H hidden features, E experts, k experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.layers.linear import INIT_STD


class Router(nn.Module):
    """Selects k of E experts for each token, and their weights: the k largest of softmax(weight @ x + bias).

    Args:
        hidden_size: H.
        num_experts: E.
        num_experts_per_token: k.
        renormalize: divide the k probabilities by their sum, so that a token's weights add up to one. They are then the
            softmax of the k largest logits.
        bias: add a bias to the logits.

    Raises:
        ValueError: k is not between 1 and E.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        renormalize: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_experts_per_token <= num_experts:
            raise ValueError(
                f"Router: num_experts_per_token={num_experts_per_token}; expected 1 to num_experts={num_experts}"
            )
        self.num_experts_per_token = num_experts_per_token
        self.renormalize = renormalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        self.init_weights()

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2); the bias is 0."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes the tokens `x`, (T, H).

        Returns:
            Logits (T, E) in the dtype of `x`; expert ids (T, k), the most probable first; expert weights (T, k), fp32.
        """
        logits = self.logits(x)
        weights, expert_ids = router_probabilities(logits).topk(self.num_experts_per_token)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, expert_ids, weights

    def logits(self, x: Tensor) -> Tensor:
        """x: (T, H) -> (T, E)."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        num_experts, hidden_size = self.weight.shape
        return f"{hidden_size}, {num_experts}, {self.num_experts_per_token}, renormalize={self.renormalize}"


def router_probabilities(logits: Tensor) -> Tensor:
    """Softmax in fp32 for every dtype of logits: in bf16 many probabilities would round to ties."""
    return logits.softmax(-1, dtype=accumulation_dtype(logits.dtype))
