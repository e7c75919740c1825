"""Routers that balance the load of experts with a bias, which counts for the selection only.

Shapes: T tokens of all sequences in the call, H hidden features, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from ligerzoo.kernels import Routing, route_sigmoid
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype
from ligerzoo.kernels.linear_fp32 import linear_fp32
from ligerzoo.kernels.route import selection_scores
from ligerzoo.kernels.row_sums import unsplit_linear
from ligerzoo.layers.exactness import Obstacle, never_exact
from ligerzoo.layers.linear import INIT_STD, initialize
from ligerzoo.layers.routers import Router, renormalizes, router_probabilities
from ligerzoo.tensor_checks import explains_options


class _BalancingBias(nn.Module):
    """Part of a router with a balancing bias, which stays in at least fp32."""

    e_score_correction_bias: Tensor

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """See `Attention.exact_obstacles`."""
        yield never_exact(self, "a softmax router without a balancing bias")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Converts the module, as `to` does. Of a conversion to half precision, the bias follows the device only."""
        bias = self._buffers["e_score_correction_bias"]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        converted = self._buffers["e_score_correction_bias"]
        if bias is None or converted is None:
            return self
        if accumulation_dtype(converted.dtype) != converted.dtype:
            self.e_score_correction_bias = bias.to(converted.device)
        return self


class SigmoidRouter(_BalancingBias):
    """Selects k of E experts by sigmoid scores, with a bias for balanced load (DeepSeek-V3, 2024, section 2.1.2).

    With s = sigmoid(weight @ x) in fp32, the experts with the k largest s + `e_score_correction_bias` are selected, and
    weighted by s without the bias. With groups, only the experts of the best groups can be selected: those with the
    largest sums of their two best s + bias (DeepSeek-V2, 2024, section 2.2.2).

    Args:
        hidden_size: H.
        num_experts: E.
        num_experts_per_token: k.
        num_groups: G, number of groups of E / G consecutive experts each.
        num_selected_groups: number of groups from which a token's experts are selected.
        renormalize: divide the k scores by their sum plus `eps`; see `Router` for k = 1.
        scale: factor of the expert weights, after `renormalize`.
        eps: a small positive number.
        balanced: add a bias for balanced load to the scores, for the selection only.
        in_fp32: compute logits in fp32 for every dtype of tokens, instead of in that dtype.

    Attributes:
        e_score_correction_bias: (E,), at least fp32 whatever the dtype of the module. A buffer: autograd and optimizers
            leave it alone. A training loop that balances the load changes it in place. None unless `balanced`.

    Raises:
        ValueError: k is not between 1 and the number of experts in the selected groups, or E is not a multiple of G, or
            groups have a single expert.
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        num_groups: int = 1,
        num_selected_groups: int = 1,
        renormalize: bool | None = None,
        scale: float = 1.0,
        eps: float = 1e-20,
        balanced: bool = True,
        in_fp32: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_selected_groups <= num_groups or num_experts % num_groups:
            raise ValueError(
                f"SigmoidRouter: num_selected_groups={num_selected_groups}, num_groups={num_groups} and "
                f"num_experts={num_experts}; expected 1 to num_groups selected groups, and a multiple of num_groups"
            )
        selectable = num_selected_groups * (num_experts // num_groups)
        if not 1 <= num_experts_per_token <= selectable or (num_groups > 1 and num_experts < 2 * num_groups):
            raise ValueError(
                f"SigmoidRouter: num_experts_per_token={num_experts_per_token}; expected 1 to {selectable}, the "
                f"experts of {num_selected_groups} of {num_groups} groups, which have two or more experts each"
            )
        self.num_experts_per_token = num_experts_per_token
        self.num_groups, self.num_selected_groups = num_groups, num_selected_groups
        self.renormalize = renormalizes(self, num_experts_per_token, renormalize)
        self.scale, self.eps, self.in_fp32 = scale, eps, in_fp32
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        bias = torch.empty(num_experts, device=device, dtype=accumulation_dtype(self.weight.dtype))
        self.register_buffer("e_score_correction_bias", bias if balanced else None)
        initialize(self, SigmoidRouter)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2) and sets the bias to 0."""
        nn.init.normal_(self.weight, std=std)
        if (bias := self._buffers["e_score_correction_bias"]) is not None:
            nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes the tokens `x`, (T, H).

        Returns:
            Logits (T, E), in fp32 if `in_fp32`, else in the dtype of `x`; expert ids (T, k), the best first; expert
            weights (T, k), fp32.
        """
        logits = self.logits(x)
        scores = logits.to(accumulation_dtype(logits.dtype)).sigmoid()
        with torch.no_grad():
            groups = self.num_groups, self.num_selected_groups
            bias = self._buffers["e_score_correction_bias"]
            selection = selection_scores(scores, scores.new_zeros(()) if bias is None else bias, *groups)
            expert_ids = selection.topk(self.num_experts_per_token).indices
        weights = scores.gather(1, expert_ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        return logits, expert_ids, weights * self.scale

    def logits(self, x: Tensor) -> Tensor:
        """x: (T, H) -> (T, E)."""
        return linear_fp32(x, self.weight) if self.in_fp32 else unsplit_linear(x, self.weight)

    def routing(self, logits: Tensor, backend: Backend) -> Routing:
        """See `Router.routing`."""
        bias, k = self._buffers["e_score_correction_bias"], self.num_experts_per_token
        bias = logits.new_zeros(logits.shape[1], dtype=torch.float32) if bias is None else bias
        return route_sigmoid(
            logits,
            bias,
            k,
            num_groups=self.num_groups,
            num_selected_groups=self.num_selected_groups,
            renormalize=self.renormalize,
            scale=self.scale,
            eps=self.eps,
            backend=backend,
        )

    def extra_repr(self) -> str:
        num_experts, hidden_size = self.weight.shape
        options: dict[str, Any] = {"renormalize": self.renormalize, "scale": self.scale}
        if self.num_groups > 1:
            options |= {"num_groups": self.num_groups, "num_selected_groups": self.num_selected_groups}
        shown = ", ".join(f"{name}={value}" for name, value in options.items())
        return f"{hidden_size}, {num_experts}, {self.num_experts_per_token}, {shown}"


class _BiasedRouter(_BalancingBias, Router):
    """A `Router` with logits in fp32 and a balancing bias, which may be None."""

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2) and sets the bias to 0."""
        super().init_weights(std)
        if (bias := self._buffers["e_score_correction_bias"]) is not None:
            nn.init.zeros_(bias)

    def logits(self, x: Tensor) -> Tensor:
        """x: (T, H) -> (T, E), fp32."""
        return linear_fp32(x, self.weight)


class BiasedRouter(_BiasedRouter):
    """Selects k of E experts by probabilities plus a bias for balanced load (ERNIE 4.5, Baidu 2025, section 2.2).

    With p = softmax(weight @ x) in fp32, the experts with the k largest p + bias are selected, and weighted by p
    without the bias, divided by its sum over the k. The bias is a buffer, as that of `SigmoidRouter`.

    Args:
        hidden_size: H.
        num_experts: E.
        num_experts_per_token: k.
        min_sum: the sum by which weights are divided is at least this.

    Attributes:
        e_score_correction_bias: (1, E), at least fp32 whatever the dtype of the module.
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        min_sum: float = 1e-12,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = hidden_size, num_experts, num_experts_per_token
        super().__init__(*sizes, renormalize=True, device=device, dtype=dtype)
        self.min_sum = min_sum
        bias = torch.zeros(1, num_experts, device=device, dtype=accumulation_dtype(self.weight.dtype))
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes the tokens `x`, (T, H).

        Returns:
            Logits (T, E), fp32; expert ids (T, k), the best first; expert weights (T, k), fp32.
        """
        logits = self.logits(x)
        probabilities = router_probabilities(logits)
        with torch.no_grad():
            expert_ids = (probabilities + self.e_score_correction_bias).topk(self.num_experts_per_token).indices
        weights = probabilities.gather(1, expert_ids)
        return logits, expert_ids, weights / weights.sum(-1, keepdim=True).clamp(min=self.min_sum)


class LogitRouter(_BiasedRouter):
    """Selects k of E experts by logits, and weights them by the sigmoid of these (Flint, Kolibri 1).

    The logits, weight @ x, are in fp32.

    Args:
        hidden_size: H.
        num_experts: E.
        num_experts_per_token: k.
        renormalize: divide the k weights by their sum; see `Router` for k = 1.
        balanced: add a bias for balanced load to the logits, for the selection only.

    Attributes:
        e_score_correction_bias: (E,), at least fp32 whatever the dtype of the module; None unless `balanced`.
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        renormalize: bool | None = None,
        balanced: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = hidden_size, num_experts, num_experts_per_token
        super().__init__(*sizes, renormalize=renormalize, device=device, dtype=dtype)
        bias = torch.zeros(num_experts, device=device, dtype=accumulation_dtype(self.weight.dtype))
        self.register_buffer("e_score_correction_bias", bias if balanced else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes the tokens `x`, (T, H).

        Returns:
            Logits (T, E), fp32; expert ids (T, k), the best first; expert weights (T, k), fp32.
        """
        logits, bias = self.logits(x), self._buffers["e_score_correction_bias"]
        with torch.no_grad():
            expert_ids = (logits if bias is None else logits + bias).topk(self.num_experts_per_token).indices
        weights = logits.gather(1, expert_ids).sigmoid()
        return logits, expert_ids, weights / weights.sum(-1, keepdim=True) if self.renormalize else weights
