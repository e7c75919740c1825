"""Mixture of experts (MoE, Shazeer et al. 2017).

A router selects the k of E expert MLPs with the highest scores for each token. The output is the sum of their outputs,
weighted by the router, as in Mixtral (Jiang et al. 2024).

Shapes: T tokens of all sequences in the call, H hidden features, E experts, k experts per token, I intermediate
features of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ligerzoo.errors import WrongTypeError
from ligerzoo.kernels import decode_experts, experts_mlp
from ligerzoo.kernels.autograd import under_transform
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, check_backend, uses_triton
from ligerzoo.kernels.gating import ExpertActivation, gating
from ligerzoo.kernels.route import fits_one_program
from ligerzoo.layers.balanced_routers import SigmoidRouter
from ligerzoo.layers.exactness import Obstacle
from ligerzoo.layers.linear import INIT_STD, initialize
from ligerzoo.layers.plain import dequantized, is_plain
from ligerzoo.layers.routers import Router, router_probabilities
from ligerzoo.layers.tensor_plan import TensorPlan
from ligerzoo.tensor_checks import describe_value, explains_options

_MAX_DECODED_TOKENS = 64
"""Most tokens of a call for which the kernels for decoding are used."""


class RouterLogits(Protocol):
    """What an MoE layer needs of the context that all layers of a forward share."""

    router_logits: list[Tensor] | None


class Experts(nn.Module):
    """E gated MLPs (as `GatedMLP`), or MLPs without a gate, with stacked weights; see `ligerzoo.kernels.experts_mlp`.

    Args:
        hidden_size: H.
        intermediate_size: I, intermediate features of each expert.
        num_experts: E.
        bias: add biases to all projections.
        activation: as in `GatedMLP`, or `ligerzoo.kernels.ClampedSwiGLU`; `ligerzoo.kernels.Ungated` for no gate.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Attributes:
        gate_up_proj: (E, 2I, H), gate and up projections; the rows of the gate come first. Without a gate, there is
            up_proj instead, (E, I, H).
        down_proj: (E, H, I), down projections.
        gate_up_proj_bias: (E, 2I), or None; up_proj_bias, (E, I), without a gate.
        down_proj_bias: (E, H), or None.
        projections: names of the first and the last projection.

    Raises:
        ValueError: a size is not positive, or `activation` or `backend` is unknown.
    """

    down_proj: nn.Parameter

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        bias: bool = False,
        activation: ExpertActivation = "silu",
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
        parts = gating(activation).parts  # raises if it is unknown
        self.activation: ExpertActivation = activation
        self.backend: Backend = check_backend(backend)
        self.projections = "up_proj" if parts == 1 else "gate_up_proj", "down_proj"
        outputs = (parts * intermediate_size, hidden_size), (hidden_size, intermediate_size)
        for name, shape in zip(self.projections, outputs, strict=True):
            values = (torch.empty(num_experts, *size, device=device, dtype=dtype) for size in (shape, shape[:1]))
            weight, bias_values = map(nn.Parameter, values)
            self.register_parameter(name, weight)
            self.register_parameter(f"{name}_bias", bias_values if bias else None)
        initialize(self, Experts)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Weights of the first and the last projection."""
        first, last = (getattr(self, name) for name in self.projections)
        return first, last

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Their biases."""
        first, last = (getattr(self, f"{name}_bias") for name in self.projections)
        return first, last

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weights from N(0, std^2); biases are 0."""
        for weight in self.weights:
            nn.init.normal_(weight, std=std)
        for bias in self.biases:
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x: (T, H), expert_ids: (T, k), expert_weights: (T, k) -> (T, H)."""
        first, last = map(dequantized, self.weights)
        routes = x, expert_ids, expert_weights
        return experts_mlp(*routes, first, last, *self.biases, activation=self.activation, backend=self.backend)

    def tensor_plan(self) -> TensorPlan:
        """Divides the experts over the processes of tensor parallelism."""
        return TensorPlan({"experts": len(self.down_proj)}, kind="experts")

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """See `Attention.exact_obstacles`."""
        if len(self.down_proj) == 1:  # a plain product, which may split its sums
            yield "", "two experts or more", "is one expert"

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        return f"{hidden_size}, {intermediate_size}, {num_experts}, activation={self.activation!r}"


class MoE(nn.Module):
    """A mixture-of-experts layer, used in place of an MLP.

    Args:
        gate: the router: tokens (T, H) -> logits, expert ids and expert weights, as `Router`.
        experts: tokens, expert ids and expert weights -> (T, H), as `Experts`.
        jitter_noise: j; in training each input feature is multiplied by a sample of U(1 - j, 1 + j). Fedus et al. 2021
            apply it to the router's input only; here, as in Mixtral, the experts receive it too.

    Raises:
        ValueError: j is not in [0, 1), or a `Router` and `Experts` have other numbers of experts.
    """

    @explains_options
    def __init__(self, gate: nn.Module, experts: nn.Module, *, jitter_noise: float = 0.0) -> None:
        super().__init__()
        if not 0 <= jitter_noise < 1:
            raise ValueError(f"MoE: jitter_noise={jitter_noise}; expected a number in [0, 1)")
        if isinstance(gate, Router) and isinstance(experts, Experts) and len(gate.weight) != len(experts.down_proj):
            found, expected = len(gate.weight), len(experts.down_proj)
            raise ValueError(f"MoE: gate routes to {found} experts; expected {expected}, the number of experts")
        self.gate = gate
        self.experts = experts
        self.jitter_noise = jitter_noise

    def forward(self, x: Tensor, context: RouterLogits | None = None) -> Tensor:
        """x: (..., H) -> (..., H).

        Args:
            x: hidden states.
            context: shared by the layers of a forward; the router logits (T, E) are appended to its `router_logits`,
                unless they are None.
        """
        tokens = x.reshape(-1, x.shape[-1])
        if self.training and self.jitter_noise:
            tokens = tokens * torch.empty_like(tokens).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
        logits, y = self.mix(tokens)
        if context is not None and context.router_logits is not None:
            context.router_logits.append(logits)
        return self.project_out(y).reshape(x.shape)

    def mix(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(T, H) -> router logits (T, E), and the weighted sums of the experts' outputs (T, H)."""
        inputs = self.project_in(tokens)
        decoded = _decode(self.gate, self.experts, tokens, inputs)
        if decoded is not None:
            return decoded
        logits, expert_ids, expert_weights = routed(self.gate, tokens)
        return logits, self.experts(inputs, expert_ids, expert_weights)

    def project_in(self, tokens: Tensor) -> Tensor:
        """Returns the inputs of the experts, those of the router by default."""
        return tokens

    def project_out(self, y: Tensor) -> Tensor:
        """Returns hidden states of the sums of the experts' outputs."""
        return y

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """See `Attention.exact_obstacles`."""
        if self.jitter_noise:
            yield "jitter_noise", "0", f"is {self.jitter_noise}"

    def extra_repr(self) -> str:
        return f"jitter_noise={self.jitter_noise}" if self.jitter_noise else ""


class SharedExpertMoE(MoE):
    """An MoE layer plus a gated MLP for every token (Qwen2-MoE).

    Computes `moe(x) + sigmoid(shared_expert_gate(x)) * shared_expert(x)`.

    Args:
        gate: see `MoE`.
        experts: see `MoE`.
        shared_expert: (..., H) -> (..., H).
        shared_expert_gate: (..., H) -> (..., 1).
        jitter_noise: see `MoE`; not applied to the shared expert.
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


class DeepSeekMoE(MoE):
    """An MoE layer plus a gated MLP for every token (DeepSeekMoE, Dai et al. 2024).

    Computes `moe(x) + shared_experts(x)`.

    Args:
        gate: see `MoE`.
        experts: see `MoE`.
        shared_experts: (..., H) -> (..., H); n shared experts are one MLP with n times the intermediate features.
    """

    def __init__(self, gate: nn.Module, experts: nn.Module, shared_experts: nn.Module) -> None:
        super().__init__(gate, experts)
        self.shared_experts = shared_experts

    def forward(self, x: Tensor, context: RouterLogits | None = None) -> Tensor:
        """x: (..., H) -> (..., H); see `MoE`."""
        return super().forward(x, context) + self.shared_experts(x)  # type: ignore[no-any-return]


class ScaledInputMoE(DeepSeekMoE):
    """`DeepSeekMoE` whose router weights multiply the inputs of the experts instead of their outputs (Llama 4).

    Takes the arguments of `DeepSeekMoE`.
    """

    def mix(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See `MoE.mix`; each pair of a token and an expert is a row of the inputs."""
        logits, expert_ids, weights = routed(self.gate, tokens)
        scaled = (tokens[:, None] * weights[..., None].to(tokens.dtype)).flatten(0, 1)
        y = self.experts(scaled, expert_ids.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1))
        return logits, y.view(*weights.shape, -1).sum(1)


class LatentMoE(DeepSeekMoE):
    """`DeepSeekMoE` whose experts have fewer input and output features than the hidden states (Nemotron 3).

    Computes `fc2_latent_proj(moe(fc1_latent_proj(x))) + shared_experts(x)`; the router gets x.

    Args:
        gate: see `MoE`.
        experts: see `MoE`.
        shared_experts: see `DeepSeekMoE`.
        fc1_latent_proj: hidden states to the inputs of the experts.
        fc2_latent_proj: outputs of the experts to hidden states.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        shared_experts: nn.Module,
        fc1_latent_proj: nn.Module,
        fc2_latent_proj: nn.Module,
    ) -> None:
        super().__init__(gate, experts, shared_experts)
        self.fc1_latent_proj, self.fc2_latent_proj = fc1_latent_proj, fc2_latent_proj

    def project_in(self, tokens: Tensor) -> Tensor:
        """See `MoE.project_in`."""
        return self.fc1_latent_proj(tokens)  # type: ignore[no-any-return]

    def project_out(self, y: Tensor) -> Tensor:
        """See `MoE.project_out`."""
        return self.fc2_latent_proj(y)  # type: ignore[no-any-return]


def routed(gate: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the result of a router. Raises WrongTypeError, which names its class, for another result."""
    result = gate(tokens)
    match result:
        case (logits, ids, weights) if (
            ids.shape == weights.shape == (len(tokens), *ids.shape[1:2])
            and weights.dim() == 2
            and weights.is_floating_point()
            and not ids.is_floating_point()
        ):
            return logits, ids, weights
    got = ", ".join(map(describe_value, result)) if type(result) is tuple else describe_value(result)
    expected = "router logits (T, E), expert ids (T, k) of integers, expert weights (T, k), for tokens (T, H)"
    raise WrongTypeError(f"the router returns {got}", where=type(gate).__name__, expected=expected)


def _decode(gate: nn.Module, experts: nn.Module, tokens: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the router's logits of tokens, and the output of the experts, computed by the kernels for few tokens.

    None if these do not apply: for many tokens, gradients, modules that are not plain, or if Triton is not used.
    """
    if not ((is_plain(gate, Router) or is_plain(gate, SigmoidRouter)) and is_plain(experts, Experts)):
        return None
    backend = experts.backend
    parameters = [t for part in (gate, experts) for t in part._parameters.values() if t is not None]
    needs_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (tokens, inputs, *parameters))
    if (
        needs_gradients
        or under_transform()
        or not uses_triton(tokens, *parameters, backend=backend)
        or len(tokens) > _MAX_DECODED_TOKENS
        or not fits_one_program(len(tokens), len(gate.weight))
    ):
        return None
    logits = gate.logits(tokens)
    routing = gate.routing(logits, backend)
    weights = *experts.weights, *experts.biases
    y = decode_experts(inputs, routing, *weights, activation=experts.activation, backend=backend)
    return logits, y


def load_balancing_loss(
    router_logits: Sequence[Tensor], num_experts_per_token: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Load-balancing loss, `E * sum_e f_e P_e` (Fedus et al. 2021, eq. 4 to 6).

    f_e is 1 where expert e is among a token's k choices, else 0, and P_e is its router probability; both are averaged
    over the tokens of all layers. The loss is k if all experts get equally many tokens, and at most E. Gradients flow
    through P only. Causes no host sync.

    Args:
        router_logits: one (T, E) tensor per MoE layer, all of the same shape.
        num_experts_per_token: k.
        attention_mask: padding mask of T entries, such as (B, sequence length): 1 for a token, 0 for padding, which is
            excluded. None for no padding.

    Returns:
        0-d fp32; 0 if every position is padding.

    Raises:
        ValueError: `router_logits` is empty or has several shapes, or `attention_mask` does not have T entries.
    """
    if not router_logits:
        raise ValueError("load_balancing_loss: router_logits is empty; expected one (T, E) tensor per MoE layer")
    if len(shapes := {tuple(logits.shape) for logits in router_logits}) > 1:
        raise ValueError(
            f"load_balancing_loss: router_logits have shapes {sorted(shapes)}; expected one (T, E) in all layers"
        )
    num_tokens, num_experts = router_logits[0].shape
    if attention_mask is None:
        attention_mask = router_logits[0].new_ones(num_tokens)
    if attention_mask.numel() != num_tokens:
        raise ValueError(
            f"load_balancing_loss: attention_mask has shape {tuple(attention_mask.shape)}; "
            f"expected {num_tokens} entries, one per token"
        )
    # Weights instead of boolean indexing, whose result size would need a host sync.
    share = attention_mask.to(router_logits[0].device, accumulation_dtype(router_logits[0].dtype)).reshape(-1, 1)
    share = share / share.sum().clamp(min=1)
    chosen, probable = [], []
    for logits in router_logits:
        probabilities = router_probabilities(logits)
        choices = torch.zeros_like(probabilities).scatter(1, probabilities.topk(num_experts_per_token).indices, 1.0)
        chosen.append((share * choices).sum(0))
        probable.append((share * probabilities).sum(0))
    return num_experts * (torch.stack(chosen).mean(0) * torch.stack(probable).mean(0)).sum()
