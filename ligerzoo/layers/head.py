"""Language-model head: hidden states to logits, or directly to the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from ligerzoo.checks import FINITE, POSITIVE_OR_NONE, check
from ligerzoo.kernels import linear_cross_entropy
from ligerzoo.kernels.dispatch import Backend, check_backend
from ligerzoo.kernels.loss.chunked_head import check_budget
from ligerzoo.layers.exactness import Obstacle
from ligerzoo.layers.linear import INIT_STD, init_matrix, initialize
from ligerzoo.layers.plain import dequantized
from ligerzoo.layers.projection import check_features, linear
from ligerzoo.layers.tensor_plan import TensorPlan
from ligerzoo.tensor_checks import explains_options


def scaled_and_capped(logits: Tensor, logit_scale: float, softcap: float | None) -> Tensor:
    """Returns logits times a scale, then soft-capped: `softcap * tanh(logits / softcap)`."""
    if logit_scale != 1.0:
        logits = logits * logit_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class LMHead(nn.Module):
    """Linear layer over the vocabulary: `logits`, or the `loss` without materializing all logits.

    Tie its weight to an embedding with `head.weight = embedding.weight`. The weight may be quantized by torchao, see
    `ligerzoo.integrations.torchao.is_linear`. The loss then computes with the dequantized weight.

    Args:
        hidden_size: H.
        vocab_size: V.
        bias: add a bias (V,) to the logits, before scale and soft cap.
        softcap: soft cap of the logits, `softcap * tanh(logit / softcap)`; None for no cap.
        logit_scale: factor of the logits, applied before the soft cap.
        logits_budget: MiB of logits that the loss may hold at a time; None for the global default, see
            `ligerzoo.kernels.set_logits_budget`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        TypeError: an option has another type.
        ValueError: an option is out of range.
    """

    bias: nn.Parameter | None

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_budget: int | None = None,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_budget("LMHead", logits_budget)
        check("LMHead", POSITIVE_OR_NONE, softcap=softcap)
        check("LMHead", FINITE, logit_scale=logit_scale)
        self.hidden_size = hidden_size
        self.softcap, self.logit_scale, self.logits_budget = softcap, logit_scale, logits_budget
        self.backend: Backend = check_backend(backend)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, device=device, dtype=dtype))
        values = torch.empty(vocab_size, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if values is None else nn.Parameter(values))
        initialize(self, LMHead)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2) and sets the bias to 0."""
        init_matrix(self.weight, self.bias, std)

    @explains_options
    def forward(
        self,
        hidden: Tensor,
        target: Tensor | None = None,
        num_items: int | Tensor | None = None,
        objective: Callable[..., Any] | None = None,
    ) -> Any:
        """Calls `logits`, or `loss` if `target` is given: within this module's hooks, as DistributedDataParallel and
        FSDP2 require."""
        check_features(self, hidden, self.hidden_size)
        return self.logits(hidden) if target is None else self.loss(hidden, target, num_items, objective)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits of hidden states, (..., H) -> (..., V) in the dtype of `hidden`."""
        return scaled_and_capped(self.product(hidden), self.logit_scale, self.softcap)

    @overload
    def loss(self, hidden: Tensor, target: Tensor, num_items: int | Tensor | None = None) -> Tensor: ...

    @overload
    def loss(
        self, hidden: Tensor, target: Tensor, num_items: int | Tensor | None, objective: Callable[..., Any] | None
    ) -> Any: ...

    def loss(
        self,
        hidden: Tensor,
        target: Tensor,
        num_items: int | Tensor | None = None,
        objective: Callable[..., Any] | None = None,
    ) -> Any:
        """Computes the loss of hidden states.

        Args:
            hidden: hidden states, (..., H).
            target: token ids that the hidden states should predict, (...), already shifted; -100 is ignored.
            num_items: divisor of the summed cross entropy. Default: the number of targets that are not -100.
            objective: replaces `ligerzoo.kernels.linear_cross_entropy`. Called with hidden states, weight, target and
                this head's `softcap`, `logit_scale`, `logits_budget`, `backend` and, if it has one, `bias`.

        Returns:
            The cross entropy, 0-d fp32; with `objective` its result.
        """
        if objective is None:
            objective = partial(linear_cross_entropy, num_items=num_items)
        bias = {} if self.bias is None else {"bias": self.bias}
        return objective(
            *self.loss_inputs(hidden),
            target,
            **bias,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            logits_budget=self.logits_budget,
            backend=self.backend,
        )

    def product(self, hidden: Tensor) -> Tensor:
        """Computes the logits before scale and soft cap, (..., H) -> (..., V)."""
        return linear(hidden, self.weight, self.bias)

    def loss_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns hidden states (..., K) and a weight (V, K) whose product, plus the bias, are the loss's logits."""
        return hidden, dequantized(self.weight)

    def tensor_plan(self) -> TensorPlan:
        """Divides the vocabulary over the processes of tensor parallelism."""
        return TensorPlan({}, kind="head")

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """Yields why the loss computes other log-probabilities than sampling does from rounded logits."""
        if self.softcap is not None or self.bias is not None:
            yield (
                "",
                "logits without a soft cap and a bias",
                f"has {'a bias' if self.softcap is None else 'a soft cap'}",
            )
        if math.frexp(self.logit_scale)[0] != 0.5:
            yield "logit_scale", "a power of 2, which rounds nothing", f"is {self.logit_scale}"

    def extra_repr(self) -> str:
        bias = "" if self.bias is None else ", bias=True"
        return f"hidden_size={self.hidden_size}, vocab_size={self.weight.shape[0]}{bias}"
