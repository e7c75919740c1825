"""Routers of mixture-of-experts layers: which experts process a token, and with which weights.

Shapes: T tokens of all sequences in the call, H hidden features, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ligerzoo.checks import check, integer
from ligerzoo.errors import warn
from ligerzoo.kernels import Routing, rms_norm, route
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, check_backend
from ligerzoo.kernels.linear_fp32 import linear_fp32
from ligerzoo.kernels.route import select_experts
from ligerzoo.kernels.row_sums import unsplit_linear
from ligerzoo.layers.exactness import Obstacle, never_exact
from ligerzoo.layers.linear import INIT_STD, Linear, init_matrix, initialize
from ligerzoo.tensor_checks import explains_options


class Router(nn.Module):
    """Selects k of E experts for each token, and their weights: the k largest of softmax(weight @ x + bias).

    Args:
        hidden_size: H.
        num_experts: E.
        num_experts_per_token: k.
        renormalize: divide the k probabilities by their sum, so that a token's weights add up to one. They are then the
            softmax of the k largest logits. The default is True; with k = 1, whose weight is then always 1, so that the
            loss has no gradient for the router, it warns. Pass False there, as in Switch Transformers.
        bias: add a bias to the logits.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        ValueError: k is not between 1 and E, or `backend` is unknown.
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        renormalize: bool | None = None,
        bias: bool = False,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_experts_per_token <= num_experts:
            raise ValueError(
                f"Router: num_experts_per_token={num_experts_per_token}; expected 1 to num_experts={num_experts}"
            )
        self.num_experts_per_token = num_experts_per_token
        self.renormalize = renormalizes(self, num_experts_per_token, renormalize)
        self.backend: Backend = check_backend(backend)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        initialize(self, Router)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2); the bias is 0."""
        init_matrix(self.weight, self.bias, std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes the tokens `x`, (T, H).

        Returns:
            Logits (T, E) in the dtype of `x`; expert ids (T, k), the most probable first; expert weights (T, k), fp32.
        """
        logits = self.logits(x)
        k, renormalize = self.num_experts_per_token, self.renormalize
        return logits, *select_experts(logits, k, renormalize=renormalize, backend=self.backend)

    def logits(self, x: Tensor) -> Tensor:
        """x: (T, H) -> (T, E)."""
        return unsplit_linear(x, self.weight, self.bias)

    def routing(self, logits: Tensor, backend: Backend) -> Routing:
        """Returns the rows of few tokens from their logits (T, E), sorted by expert. Not differentiable."""
        return route(logits, self.num_experts_per_token, renormalize=self.renormalize, backend=backend)

    def extra_repr(self) -> str:
        num_experts, hidden_size = self.weight.shape
        return f"{hidden_size}, {num_experts}, {self.num_experts_per_token}, renormalize={self.renormalize}"


class GroupedRouter(Router):
    """Selects k of E experts by probabilities, within the best groups (DeepSeek-V2, 2024, section 2.2.2).

    With p = softmax(weight @ x) in fp32, the experts with the k largest p are selected, and weighted by `scale` * p.
    With groups, only the experts of the best groups can be selected: those with the largest p of a single expert.

    Args:
        hidden_size: H.
        num_experts: E.
        num_experts_per_token: k, at most the number of experts in the selected groups.
        num_groups: G, number of groups of E / G consecutive experts each.
        num_selected_groups: number of groups from which a token's experts are selected.
        scale: factor of the expert weights.

    Raises:
        ValueError: k is not between 1 and the number of experts in the selected groups, or E is not a multiple of G.
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
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = hidden_size, num_experts, num_experts_per_token
        super().__init__(*sizes, renormalize=False, device=device, dtype=dtype)
        fits = 1 <= num_selected_groups <= num_groups and num_experts % num_groups == 0
        if not fits or num_experts_per_token > num_selected_groups * (num_experts // num_groups):
            raise ValueError(
                f"GroupedRouter: num_experts_per_token={num_experts_per_token}, num_experts={num_experts}, "
                f"num_groups={num_groups} and num_selected_groups={num_selected_groups}; expected a multiple of "
                "num_groups, 1 to num_groups selected groups, and enough of them for the experts of a token"
            )
        self.num_groups, self.num_selected_groups, self.scale = num_groups, num_selected_groups, scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes the tokens `x`, (T, H).

        Returns:
            Logits (T, E), fp32; expert ids (T, k), the most probable first; expert weights (T, k), fp32.
        """
        logits = self.logits(x)
        probabilities = router_probabilities(logits)
        with torch.no_grad():
            groups = probabilities.unflatten(1, (self.num_groups, -1))  # type: ignore[no-untyped-call]
            best = groups.amax(-1).topk(self.num_selected_groups).indices
            is_selected = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
            selectable = groups.masked_fill(~is_selected[..., None], -1.0).flatten(1)
            expert_ids = selectable.topk(self.num_experts_per_token).indices
        return logits, expert_ids, probabilities.gather(1, expert_ids) * self.scale

    def logits(self, x: Tensor) -> Tensor:
        """x: (T, H) -> (T, E), fp32."""
        return linear_fp32(x, self.weight)

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """See `Attention.exact_obstacles`."""
        yield never_exact(self, "a softmax router without groups and a factor")


class ScaledRouter(nn.Module):
    """Selects k of E experts for normalized tokens, and scales their weights (Gemma 4).

    With p = softmax(proj(norm(x) * scale / sqrt(H))), the experts with the k largest p are selected, and weighted by p,
    divided by its sum over the k, times a learned factor of the expert. The norm has no weight.

    Args:
        hidden_size: H.
        num_experts: E.
        num_experts_per_token: k.
        eps: of the norm.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Attributes:
        proj: to the logits.
        scale: (H,).
        per_expert_scale: (E,).
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        eps: float = 1e-6,
        *,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check("ScaledRouter", integer(1, num_experts), num_experts_per_token=num_experts_per_token)
        self.num_experts_per_token, self.eps = num_experts_per_token, eps
        self.backend: Backend = check_backend(backend)
        self.proj = Linear(hidden_size, num_experts, bias=False, device=device, dtype=dtype)
        self.scale = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.per_expert_scale = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype))
        initialize(self, ScaledRouter)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Sets the scales to 1, whatever `std` is."""
        nn.init.ones_(self.scale)
        nn.init.ones_(self.per_expert_scale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes the tokens `x`, (T, H).

        Returns:
            Probabilities (T, E), fp32, which transformers calls logits; expert ids (T, k), the most probable first;
            expert weights (T, k), fp32.
        """
        normalized = rms_norm(x, None, self.eps, backend=self.backend)
        logits = self.proj(normalized * self.scale * x.shape[-1] ** -0.5)
        ids, weights = select_experts(logits, self.num_experts_per_token, renormalize=True, backend=self.backend)
        return router_probabilities(logits), ids, weights * self.per_expert_scale[ids]

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """See `Attention.exact_obstacles`."""
        yield never_exact(self, "a softmax router without scales")

    def extra_repr(self) -> str:
        return f"{self.num_experts_per_token}, eps={self.eps}"


def renormalizes(router: nn.Module, num_experts_per_token: int, renormalize: bool | None) -> bool:
    """Returns whether to divide weights by their sum. By default yes, with a warning if that leaves a constant."""
    if renormalize is None and num_experts_per_token == 1:
        warn(
            f"{type(router).__name__}: num_experts_per_token=1: the renormalized weight of a token's expert is "
            "always 1, so the loss has no gradient for the router. Pass renormalize=False to weight the expert by its "
            "probability; renormalize=True keeps the weight of 1 without this warning"
        )
    return renormalize is not False


def router_probabilities(logits: Tensor) -> Tensor:
    """Softmax in fp32 for every dtype of logits: in bf16 many probabilities would round to ties."""
    return logits.softmax(-1, dtype=accumulation_dtype(logits.dtype))
