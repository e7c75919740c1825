"""Mixtures of experts (Shazeer et al. 2017): a router sends each token to the k of E feed-forwards that it scores
highest, and their outputs are added with the router's weights, as in Mixtral (Jiang et al. 2024).

Shapes: T tokens of all sequences in the call, H features, E experts, k experts per token, I features within an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.kernels import experts_mlp
from ligerzoo.kernels.activation import Activation, check_activation
from ligerzoo.kernels.dispatch import Backend, check_backend, wide


class RouterLogits(Protocol):
    """What a mixture needs of the object that all layers of a forward share."""

    router_logits: list[Tensor]


class Router(nn.Module):
    """Which k of the E experts each token goes to, and how much each of them counts: softmax(weight x), the k largest.

    Args:
        hidden_size: H.
        num_experts: E.
        num_experts_per_token: k.
        renormalize: divide the k probabilities by their sum, so that a token's weights add up to one.

    Raises:
        ValueError: k is not among 1 to E.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        renormalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_experts_per_token <= num_experts:
            raise ValueError(
                f"Router: {num_experts_per_token} of {num_experts} experts per token; expected 1 to {num_experts}"
            )
        self.num_experts_per_token = num_experts_per_token
        self.renormalize = renormalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, 0.02^2)."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: (T, H) -> logits (T, E) in the dtype of `x`; the experts' ids (T, k), the most probable first; and their
        weights (T, k), which stay fp32 until `experts_mlp` multiplies by them."""
        logits = F.linear(x, self.weight)
        weights, expert_ids = _probabilities(logits).topk(self.num_experts_per_token)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, expert_ids, weights

    def extra_repr(self) -> str:
        num_experts, hidden_size = self.weight.shape
        return f"{hidden_size}, {num_experts}, {self.num_experts_per_token}, renormalize={self.renormalize}"


class Experts(nn.Module):
    """E gated feed-forwards (as `GatedMLP`, without biases), their matrices stacked; see
    `ligerzoo.kernels.experts_mlp`.

    Args:
        hidden_size: H.
        intermediate_size: I, of each expert.
        num_experts: E.
        activation: "silu" (SwiGLU), "gelu_tanh" or "gelu" (GeGLU).
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference).

    Attributes:
        gate_up_proj: (E, 2I, H), the rows of the gate first.
        down_proj: (E, H, I).

    Raises:
        ValueError: a size is not positive, or there is no activation or backend of that name.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: Activation = "silu",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(hidden_size, intermediate_size, num_experts) < 1:
            raise ValueError(
                f"Experts: hidden_size={hidden_size}, intermediate_size={intermediate_size}, "
                f"num_experts={num_experts}; expected positive numbers"
            )
        self.activation: Activation = check_activation(activation)
        self.backend: Backend = check_backend(backend)
        gate_up, down = (num_experts, 2 * intermediate_size, hidden_size), (num_experts, hidden_size, intermediate_size)
        self.gate_up_proj = nn.Parameter(torch.empty(gate_up, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(down, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights from N(0, 0.02^2)."""
        nn.init.normal_(self.gate_up_proj, std=0.02)
        nn.init.normal_(self.down_proj, std=0.02)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """(T, H) tokens, (T, k) ids and (T, k) weights -> (T, H)."""
        return experts_mlp(
            x,
            expert_ids,
            expert_weights,
            self.gate_up_proj,
            self.down_proj,
            activation=self.activation,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        return f"{hidden_size}, {intermediate_size}, {num_experts}, activation={self.activation!r}"


class MoE(nn.Module):
    """A mixture of experts, in the place of a feed-forward.

    Args:
        gate: called with the tokens (T, H), returns logits, ids and weights, as `Router` does.
        experts: called with the tokens, the ids and the weights, as `Experts` is.
        jitter_noise: j; in training each feature of the input is multiplied by a number from U(1 - j, 1 + j) (Fedus et
            al. 2021, there for the router alone; Mixtral's experts see it too).

    Raises:
        ValueError: j is not in [0, 1).
    """

    def __init__(self, gate: nn.Module, experts: nn.Module, *, jitter_noise: float = 0.0) -> None:
        super().__init__()
        if not 0 <= jitter_noise < 1:
            raise ValueError(f"MoE: jitter_noise={jitter_noise}; expected 0 to 1, without 1")
        self.gate = gate
        self.experts = experts
        self.jitter_noise = jitter_noise

    def forward(self, x: Tensor, context: RouterLogits | None = None) -> Tensor:
        """x: (..., H) -> (..., H).

        Args:
            x: the tokens.
            context: what the layers of a forward share; the router's logits (T, E) are appended to its
                `router_logits`.
        """
        tokens = x.reshape(-1, x.shape[-1])
        if self.training and self.jitter_noise:
            tokens = tokens * torch.empty_like(tokens).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
        logits, expert_ids, expert_weights = self.gate(tokens)
        if context is not None:
            context.router_logits.append(logits)
        return self.experts(tokens, expert_ids, expert_weights).reshape(x.shape)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"jitter_noise={self.jitter_noise}" if self.jitter_noise else ""


class SharedExpertMoE(MoE):
    """A mixture next to a feed-forward that every token goes through: `mixture(x) + sigmoid(gate(x)) * shared(x)`, as
    in Qwen2-MoE.

    Args:
        gate: see `MoE`.
        experts: see `MoE`.
        shared_expert: (..., H) -> (..., H).
        shared_expert_gate: (..., H) -> (..., 1).
        jitter_noise: see `MoE`; the shared expert sees none.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        shared_expert: nn.Module,
        shared_expert_gate: nn.Module,
        *,
        jitter_noise: float = 0.0,
    ) -> None:
        super().__init__(gate, experts, jitter_noise=jitter_noise)
        self.shared_expert = shared_expert
        self.shared_expert_gate = shared_expert_gate

    def forward(self, x: Tensor, context: RouterLogits | None = None) -> Tensor:
        """x: (..., H) -> (..., H); see `MoE`."""
        shared: Tensor = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return super().forward(x, context) + shared


def load_balancing_loss(
    router_logits: Sequence[Tensor], num_experts_per_token: int, attention_mask: Tensor | None = None
) -> Tensor:
    """`E * sum_e f_e P_e` (Fedus et al. 2021, eq. 4 to 6), with f_e how many of a token's k choices are expert e and
    P_e the probability that the router gives it, both in the mean over the tokens of all layers. It is k when the
    experts share the work evenly, and up to E when they don't. Only P is differentiated.

    Args:
        router_logits: (T, E) of each layer with a router, the layers' T and E being the same.
        num_experts_per_token: k.
        attention_mask: T entries, (B, sequence length) for example: 1 for a token and 0 for padding, which does not
            count; None for no padding.

    Returns:
        0-d fp32; 0 when all is padding. No GPU is waited for.

    Raises:
        ValueError: there are no logits, or the mask has other than T entries.
    """
    if not router_logits:
        raise ValueError("load_balancing_loss: no router's logits")
    num_tokens, num_experts = router_logits[0].shape
    if attention_mask is None:
        attention_mask = router_logits[0].new_ones(num_tokens)
    if attention_mask.numel() != num_tokens:
        raise ValueError(
            f"load_balancing_loss: attention_mask {tuple(attention_mask.shape)} of {num_tokens} tokens; "
            "expected one entry for each"
        )
    # A weight for each token, where indexing with the mask would make the host wait for the number of those that count.
    share = attention_mask.to(router_logits[0].device, wide(router_logits[0].dtype)).reshape(-1, 1)
    share = share / share.sum().clamp(min=1)
    chosen, probable = [], []
    for logits in router_logits:
        probabilities = _probabilities(logits)
        choices = torch.zeros_like(probabilities).scatter(1, probabilities.topk(num_experts_per_token).indices, 1.0)
        chosen.append((share * choices).sum(0))
        probable.append((share * probabilities).sum(0))
    return num_experts * (torch.stack(chosen).mean(0) * torch.stack(probable).mean(0)).sum()


def _probabilities(logits: Tensor) -> Tensor:
    """Softmax in fp32, whatever the logits' dtype: rounded to bf16, probabilities would often be equal."""
    return logits.softmax(-1, dtype=wide(logits.dtype))
