"""Feed-forward layers (MLPs)."""

import torch
from torch import Tensor, nn

from ligerzoo.kernels.activation import Activation, check_activation
from ligerzoo.kernels.dispatch import Backend, check_backend
from ligerzoo.layers.context import Context
from ligerzoo.layers.linear import Linear
from ligerzoo.layers.projection import activate_and_project, check_features, gate_and_project, gated_mlp, project
from ligerzoo.layers.tensor_plan import TensorPlan
from ligerzoo.tensor_checks import explains_options


class GatedMLP(nn.Module):
    """Gated MLP, `down(activation(gate(x)) * up(x))` (Shazeer 2020).

    Args:
        hidden_size: H.
        intermediate_size: I.
        bias: add biases to all three projections.
        activation: a name of `ligerzoo.kernels.activation.ACTIVATIONS`, such as "silu" (SwiGLU) or "gelu" (GeGLU).
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).
    """

    @explains_options
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

    def forward(self, x: Tensor, _: Context | None = None) -> Tensor:
        """x: (..., H) -> (..., H)."""
        check_features(self, x, self.hidden_size)
        return gated_mlp(x, self.gate_proj, self.up_proj, self.down_proj, self.activation, self.backend)

    def tensor_plan(self) -> TensorPlan:
        """Divides the intermediate features over the processes of tensor parallelism."""
        return intermediate_plan(self.down_proj, ("gate_proj", "up_proj"), "down_proj")


class ScaledGatedMLP(GatedMLP):
    """`GatedMLP` with constant factors, `s down(activation(r gate(x)) * up(x))` (Falcon-H1).

    Args:
        hidden_size: H.
        intermediate_size: I.
        gate_multiplier: r.
        down_multiplier: s.
        bias: add biases to all three projections.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        gate_multiplier: float,
        down_multiplier: float,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.gate_multiplier, self.down_multiplier = gate_multiplier, down_multiplier

    def forward(self, x: Tensor, _: Context | None = None) -> Tensor:
        """x: (..., H) -> (..., H)."""
        check_features(self, x, self.hidden_size)
        gate, up = project(x, self.gate_proj, self.up_proj, backend=self.backend)
        gate = self.gate_multiplier * gate
        return self.down_multiplier * gate_and_project(gate, up, self.down_proj, self.activation, self.backend)


class MLP(nn.Module):
    """MLP without a gate, `fc2(activation(fc1(x)))` (Vaswani et al. 2017, section 3.3).

    Args:
        hidden_size: H.
        intermediate_size: I.
        output_size: O; None for H.
        bias: add biases to both projections.
        activation: a name of `ligerzoo.kernels.activation.ACTIVATIONS`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).
    """

    @explains_options
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

    def forward(self, x: Tensor, _: Context | None = None) -> Tensor:
        """x: (..., H) -> (..., O)."""
        check_features(self, x, self.hidden_size)
        return activate_and_project(self.fc1(x), self.activation, self.fc2, self.backend)

    def tensor_plan(self) -> TensorPlan:
        """See `GatedMLP.tensor_plan`."""
        return intermediate_plan(self.fc2, ("fc1",), "fc2")


class UngatedMLP(nn.Module):
    """MLP without a gate, `down(activation(up(x)))`: `MLP` with the names of `GatedMLP`, without biases by default.

    Args:
        hidden_size: H.
        intermediate_size: I.
        bias: add biases to both projections.
        activation: see `MLP`; or a module for (..., I), such as `XIELU`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).
    """

    @explains_options
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

    def forward(self, x: Tensor, _: Context | None = None) -> Tensor:
        """x: (..., H) -> (..., H)."""
        check_features(self, x, self.hidden_size)
        x = self.up_proj(x)
        if isinstance(self.act_fn, nn.Module):
            return self.down_proj(self.act_fn(x))  # type: ignore[no-any-return]
        return activate_and_project(x, self.act_fn, self.down_proj, self.backend)

    def tensor_plan(self) -> TensorPlan:
        """See `GatedMLP.tensor_plan`."""
        return intermediate_plan(self.down_proj, ("up_proj",), "down_proj")


def intermediate_plan(last: Linear, columns: tuple[str, ...], row: str) -> TensorPlan:
    """Returns the plan that divides the input features of an MLP's last layer."""
    return TensorPlan({"intermediate features": last.in_features}, columns, (row,))
