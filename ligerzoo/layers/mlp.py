"""Feed-forward layers (MLPs)."""

from functools import partial

import torch
from torch import Tensor, nn

from ligerzoo.kernels import activation_linear, glu, glu_linear, linear_glu
from ligerzoo.kernels.activation import ACTIVATIONS, Activation, check_activation
from ligerzoo.kernels.dispatch import Backend, check_backend
from ligerzoo.kernels.low_rank_glu import LowRankTerms
from ligerzoo.kernels.recompute import Recompute, recomputable
from ligerzoo.layers.context import Context
from ligerzoo.layers.linear import Linear, check_features, fusible_parameters
from ligerzoo.layers.lora import (
    LoRALinear,
    has_dropped_input,
    inner_bias,
    project_in_parts,
    project_jointly,
    rescale,
    update_of,
)
from ligerzoo.layers.plain import is_plain


class GatedMLP(nn.Module):
    """Gated MLP, `down(activation(gate(x)) * up(x))` (Shazeer 2020).

    Args:
        hidden_size: H.
        intermediate_size: I.
        bias: add biases to all three projections.
        activation: "silu" (SwiGLU), "gelu_tanh" or "gelu" (GeGLU), "quick_gelu" or "relu2".
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.activation: Activation = check_activation(activation)
        self.backend: Backend = check_backend(backend)
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x: (..., H) -> (..., H). `context` is unused; it keeps the block signature uniform."""
        check_features(self, x, self.hidden_size)
        down = self.down_proj
        is_fusible = is_plain(down, Linear, nn.Linear, LoRALinear) and not has_dropped_input(down)
        if not (torch.is_grad_enabled() and is_fusible):
            return down(self.gated(x))  # type: ignore[no-any-return]
        gate, up, terms = self.project_in_parts(x)
        y = glu_linear(
            gate, up, down.weight, inner_bias(down), update=update_of(down), terms=terms, activation=self.activation,
            backend=self.backend,
        )  # fmt: skip
        return rescale(y, down)

    def gated(self, x: Tensor) -> Tensor:
        """(..., H) -> activation(gate) * up, (..., I)."""
        parameters = None
        if not torch.is_grad_enabled():
            parameters = fusible_parameters(x, self.gate_proj, self.up_proj, backend=self.backend)
        if parameters is None:
            gate, up = self.project(x)
            y = glu(gate, up, activation=self.activation, backend=self.backend)
            recomputable((y,), partial(glu, activation=self.activation, backend=self.backend), gate, up)
            return y
        weights, biases, scales = parameters
        return linear_glu(
            x, *weights, *biases, *(scales or ()), activation=self.activation, backend=self.backend
        )  # fmt: skip

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """(..., H) -> gate and up features, (..., I) each, which backward may recompute."""
        return project_jointly(x, self.gate_proj, self.up_proj, backend=self.backend, level=Recompute.MLP)

    def project_in_parts(self, x: Tensor) -> tuple[Tensor, Tensor, LowRankTerms | None]:
        """(..., H) -> gate and up features, (..., I) each, and low-rank terms for `glu_linear` to add to them."""
        parts = project_in_parts(
            x, self.gate_proj, self.up_proj, self.down_proj, backend=self.backend, level=Recompute.MLP
        )
        if parts is None:
            gate, up = self.project(x)
            return gate, up, None
        return parts


class MLP(nn.Module):
    """MLP without a gate, `fc2(activation(fc1(x)))` (Vaswani et al. 2017, section 3.3).

    Args:
        hidden_size: H.
        intermediate_size: I.
        output_size: O; None for H.
        bias: add biases to both projections.
        activation: "gelu", "gelu_tanh", "quick_gelu", "silu" or "relu2".
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        output_size: int | None = None,
        *,
        bias: bool = True,
        activation: Activation = "gelu",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.activation: Activation = check_activation(activation)
        self.backend: Backend = check_backend(backend)
        self.fc1 = Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.fc2 = Linear(intermediate_size, output_size or hidden_size, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x: (..., H) -> (..., O). `context` is unused; it keeps the block signature uniform."""
        check_features(self, x, self.hidden_size)
        return _activate_and_project(self.fc1(x), self.activation, self.fc2, self.backend)


class UngatedMLP(nn.Module):
    """MLP without a gate, `down(activation(up(x)))`: `MLP` with the names of `GatedMLP`, without biases by default.

    Args:
        hidden_size: H.
        intermediate_size: I.
        bias: add biases to both projections.
        activation: see `MLP`; or a module for (..., I), such as `XIELU`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Activation | nn.Module = "relu2",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.act_fn = activation if isinstance(activation, nn.Module) else check_activation(activation)
        self.backend: Backend = check_backend(backend)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x: (..., H) -> (..., H). `context` is unused; it keeps the block signature uniform."""
        check_features(self, x, self.hidden_size)
        x = self.up_proj(x)
        if isinstance(self.act_fn, nn.Module):
            return self.down_proj(self.act_fn(x))  # type: ignore[no-any-return]
        return _activate_and_project(x, self.act_fn, self.down_proj, self.backend)


def _activate_and_project(x: Tensor, activation: Activation, projection: nn.Module, backend: Backend) -> Tensor:
    """(..., I) -> projection(activation(x)), as one operation that saves only `x` where the projection is plain."""
    if is_plain(projection, Linear, nn.Linear):
        return activation_linear(x, projection.weight, projection.bias, activation=activation, backend=backend)
    return projection(ACTIVATIONS[activation](x))  # type: ignore[no-any-return]
