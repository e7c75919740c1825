"""Kimi Delta Attention: the gated delta rule with a decay per channel of the keys (Kimi Team 2025, "Kimi Linear").

In the notation of `delta_net`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ligerzoo.kernels.dispatch import Backend
from ligerzoo.layers.delta_net import LARGEST_DECAY, DeltaNet
from ligerzoo.layers.linear import INIT_STD, Linear, initialize
from ligerzoo.layers.norm import GatedRMSNorm
from ligerzoo.layers.projection import project
from ligerzoo.layers.short_conv import CausalConv1d
from ligerzoo.layers.tensor_plan import TensorPlan
from ligerzoo.tensor_checks import explains_options


class ForgetGate(nn.Module):
    """Parameters of the decays of `KimiDeltaAttention`, under the names of transformers' modules.

    Before the softplus, decays are f_b_proj(f_a_proj(x)).

    Args:
        hidden_size: H.
        num_heads: V.
        head_dim: D_k, and the rank.

    Attributes:
        A_log: (1, 1, V, 1), logarithms of the decay rates, in the shape of checkpoints.
        dt_bias: (V * D_k,), added to the decays.
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size = num_heads * head_dim
        self.dt_bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(1, 1, num_heads, 1, device=device, dtype=dtype))
        self.f_a_proj = Linear(hidden_size, head_dim, bias=False, device=device, dtype=dtype)
        self.f_b_proj = Linear(head_dim, size, bias=False, device=device, dtype=dtype)
        initialize(self, ForgetGate)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples decay rates from U(1, 16), and `dt_bias` so that the softplus of it is log-uniform from 0.001 to 0.1,
        as in Mamba-2. `std` is unused here."""
        nn.init.uniform_(self.A_log, 1.0, LARGEST_DECAY)
        nn.init.uniform_(self.dt_bias, math.log(1e-3), math.log(1e-1))
        with torch.no_grad():
            self.A_log.log_()
            dt = self.dt_bias.exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def extra_repr(self) -> str:
        return f"{self.A_log.shape[2]} heads"


class KimiDeltaAttention(DeltaNet):
    """Kimi Delta Attention: the gated delta rule with a decay per channel of the keys (Kimi Team 2025, "Kimi Linear").

        q, k, v = silu(conv(q_proj(x), k_proj(x), v_proj(x)))
        y = o_proj(o_norm(gated_delta_rule(q, k, v, decays, strength)) * sigmoid(g_b_proj(g_a_proj(x))))

    Args:
        hidden_size: H.
        num_heads: heads of queries, keys and values.
        head_dim: their features, and the rank of the projections of decays and output gates.
        conv_kernel_size: inputs that an output of the convolution depends on, its own included.
        eps: added to the mean square by the norm of the outputs.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Attributes:
        forget_gate: the decays, see `ForgetGate`.
        b_proj: writing strengths before the sigmoid.
        g_a_proj, g_b_proj: output gates before the sigmoid.

    Raises:
        ValueError: a size is not positive, or `backend` is unknown.
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        conv_kernel_size: int = 4,
        eps: float = 1e-5,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = hidden_size, num_heads, num_heads, head_dim, head_dim
        super().__init__(*sizes, conv_kernel_size=conv_kernel_size, backend=backend)
        size = self.value_size
        self.q_proj = Linear(hidden_size, size, bias=False, device=device, dtype=dtype)
        self.k_proj = Linear(hidden_size, size, bias=False, device=device, dtype=dtype)
        self.v_proj = Linear(hidden_size, size, bias=False, device=device, dtype=dtype)
        self.conv1d = CausalConv1d(self.channels, conv_kernel_size, backend=backend, device=device, dtype=dtype)
        self.forget_gate = ForgetGate(hidden_size, num_heads, head_dim, device=device, dtype=dtype)
        self.b_proj = Linear(hidden_size, num_heads, bias=False, device=device, dtype=dtype)
        self.g_a_proj = Linear(hidden_size, head_dim, bias=False, device=device, dtype=dtype)
        self.g_b_proj = Linear(head_dim, size, bias=False, device=device, dtype=dtype)
        self.o_norm = GatedRMSNorm(head_dim, eps, activation="sigmoid", backend=backend, device=device, dtype=dtype)
        self.o_proj = Linear(size, hidden_size, bias=False, device=device, dtype=dtype)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Nothing: it has no parameters apart from those of its layers."""

    def decay_parameters(self) -> tuple[Tensor, Tensor]:
        """See `DeltaNet.decay_parameters`."""
        gate = self.forget_gate
        return gate.A_log.flatten(), gate.dt_bias.unflatten(0, (-1, self.key_head_dim))  # type: ignore[no-untyped-call]

    def project_in(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `DeltaNet.project_in`."""
        layers = self.q_proj, self.k_proj, self.v_proj, self.g_a_proj, self.b_proj, self.forget_gate.f_a_proj
        q, k, v, z, b, a = project(x, *layers, backend=self.backend)
        decays = self.forget_gate.f_b_proj(a).unflatten(-1, (-1, self.key_head_dim))
        return torch.cat([q, k, v], -1), self.g_b_proj(z), b, decays

    def project_out(self, o: Tensor, z: Tensor) -> Tensor:
        """See `DeltaNet.project_out`."""
        return self.o_proj(self.o_norm(o, z).flatten(-2))  # type: ignore[no-any-return]

    def tensor_plan(self) -> TensorPlan:
        """Divides the heads over the processes of tensor parallelism; each computes the low-rank features."""
        heads = self.value_heads
        return TensorPlan(
            {"heads": heads.number},
            ("q_proj", "k_proj", "v_proj", "g_b_proj", "b_proj", "forget_gate.f_b_proj"),
            ("o_proj",),
            fused={"conv1d": (heads, heads, heads)},
            nested={"forget_gate.A_log": 2, "forget_gate.dt_bias": 0},
        )
