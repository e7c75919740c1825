"""Linear attention with the gated delta rule (Yang et al. 2025, "Gated Delta Networks"): Qwen3.5, OLMo Hybrid.

Shapes: B batch, T tokens in the call, H hidden features, K key heads, V value heads, D_k and D_v their sizes,
C = 2 * K * D_k + V * D_v channels of the convolution.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from ligerzoo.kernels import delta_gates, gated_delta_rule, gated_delta_step
from ligerzoo.kernels.dispatch import Backend, check_backend
from ligerzoo.layers.linear import INIT_STD, Linear, initialize
from ligerzoo.layers.norm import GatedRMSNorm
from ligerzoo.layers.projection import project
from ligerzoo.layers.recurrent import RecurrentMixer, last_inputs
from ligerzoo.layers.row_parts import RowParts
from ligerzoo.layers.short_conv import CausalConv1d
from ligerzoo.layers.state_cache import RecurrentLayerCache
from ligerzoo.layers.tensor_plan import Heads, TensorPlan
from ligerzoo.tensor_checks import explains_options

LARGEST_DECAY = 16.0
"""Decay rates of new layers are between 0 and this."""


class DeltaNet(RecurrentMixer):
    """Base class of linear attention with the gated delta rule, a short convolution and an output gate.

    Subclasses have the parameters, in the order in which transformers has them, and project: `project_in` and
    `project_out`.

    Args:
        hidden_size: H.
        num_key_heads: K.
        num_value_heads: V, a multiple of K: value heads j*V/K to (j+1)*V/K - 1 share query and key head j.
        key_head_dim: D_k.
        value_head_dim: D_v.
        conv_kernel_size: inputs that an output of the convolution depends on, its own included.
        max_strength: writing strengths are between 0 and this.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Attributes:
        conv1d: the convolution of C channels.
        A_log: (V,), logarithms of the decay rates. Saved in fp32 if it was loaded in fp32, like `dt_bias` and the norm.
        dt_bias: (V,), added to the decays.

    Raises:
        ValueError: a size is not positive, V is not a multiple of K, or `backend` is unknown.
    """

    conv1d: CausalConv1d
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        *,
        conv_kernel_size: int = 4,
        max_strength: float = 1.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        sizes = {"num_key_heads": num_key_heads, "num_value_heads": num_value_heads, "key_head_dim": key_head_dim}
        sizes |= {"value_head_dim": value_head_dim, "conv_kernel_size": conv_kernel_size}
        if min(sizes.values()) < 1 or num_value_heads % num_key_heads:
            got = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise ValueError(
                f"{type(self).__name__}: {got}; expected positive numbers, and num_value_heads a multiple of "
                "num_key_heads"
            )
        self.hidden_size = hidden_size
        self.key_head_dim, self.value_head_dim = key_head_dim, value_head_dim
        self.key_size, self.value_size = num_key_heads * key_head_dim, num_value_heads * value_head_dim
        self.channels = 2 * self.key_size + self.value_size
        self.max_strength = max_strength
        self.backend: Backend = check_backend(backend)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples decay rates from U(0.01, 16) and sets `dt_bias` to 1, as in Mamba. `std` is unused here."""
        nn.init.uniform_(self.A_log, 0.01, LARGEST_DECAY)
        with torch.no_grad():
            self.A_log.log_()
        nn.init.ones_(self.dt_bias)

    @abstractmethod
    def project_in(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x: (B, T, H) -> queries, keys and values (B, T, C), output gates (B, T, V * D_v), writing strengths before
        the sigmoid (B, T, V), and decays (B, T, V) or (B, T, V, D_k), see `ligerzoo.kernels.delta_gates`."""

    @abstractmethod
    def project_out(self, o: Tensor, z: Tensor) -> Tensor:
        """Normalizes, gates and projects the outputs of the rule: (B, T, V, D_v) twice -> (B, T, H)."""

    def decay_parameters(self) -> tuple[Tensor, Tensor]:
        """`A_log`, (V,), and `dt_bias`, (V,), or (V, D_k) for decays per channel."""
        return self.A_log, self.dt_bias

    @property
    def key_heads(self) -> Heads:
        """The features of queries, or of keys."""
        return Heads(self.key_size, self.exchanged_heads)

    @property
    def value_heads(self) -> Heads:
        """The features of values."""
        return Heads(self.value_size, self.value_size // self.value_head_dim)

    @property
    def exchanged_heads(self) -> int:
        """See `Attention.exchanged_heads`."""
        return self.key_size // self.key_head_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one row of a cache."""
        conv_state = self.channels * (self.conv1d.weight.shape[2] - 1) * self.conv1d.weight.element_size()
        return int(conv_state + self.value_size * self.key_head_dim * torch.float32.itemsize)

    def mix(
        self,
        x: Tensor,
        segment_start: Tensor | None,
        lengths: Tensor | None,
        cache: RecurrentLayerCache | None,
        parts: RowParts,
    ) -> Tensor:
        """See `RecurrentMixer.mix`."""
        qkv, z, b, a = self.project_in(x)
        weight: Tensor = self.conv1d.weight
        A_log, dt_bias = self.decay_parameters()
        if parts.count > 1:
            channels, is_per_channel = self._channels(weight, 0, b.shape[2]), a.dim() == 4
            decays = a if is_per_channel else a[..., None]
            *heads, b, decays = parts.to_heads(*self._heads(qkv, b.shape[2]), b[..., None], decays)
            qkv, b = torch.cat([part.flatten(2) for part in heads], 2), b.squeeze(3)
            a = decays if is_per_channel else decays.squeeze(3)
            weight = torch.cat([parts.own_heads(part) for part in channels])
            A_log, dt_bias = parts.own_heads(A_log), parts.own_heads(dt_bias)
        g, beta = delta_gates(a, b, A_log, dt_bias, max_strength=self.max_strength, backend=self.backend)
        if cache is not None and cache.is_updatable and lengths is None and x.shape[1] == 1 and not qkv.requires_grad:
            conv_state, state = cast(tuple[Tensor, Tensor], cache.read_states(len(x), 1))
            q, k, v = self._heads(self.conv1d.step(qkv, conv_state), b.shape[2])
            o = gated_delta_step(q, k, v, g, beta, state, backend=self.backend)
            cache.count(1)
        else:
            before, state_before = (None, None) if cache is None else cache.read_states(*x.shape[:2])
            mixed, conv_state = self.conv1d(qkv, before, segment_start, weight)
            if lengths is not None:  # padding does not change the states
                conv_state = last_inputs(qkv, before, lengths, conv_state.shape[1])
                is_padding = torch.arange(x.shape[1], device=x.device)[:, None] >= lengths[:, None, None]
                g = g.masked_fill(is_padding if g.dim() == 3 else is_padding[..., None], 0.0)
                beta = beta.masked_fill(is_padding, 0.0)
            result = gated_delta_rule(
                *self._heads(mixed, b.shape[2]),
                g,
                beta,
                initial_state=state_before,
                segment_start=segment_start,
                output_final_state=cache is not None,
                backend=self.backend,
            )
            if cache is None:
                o = cast(Tensor, result)
            else:
                o, state = cast(tuple[Tensor, Tensor], result)
                cache.write_states(conv_state.detach(), state.detach(), x.shape[1])
        z = z.unflatten(-1, (-1, self.value_head_dim))  # type: ignore[no-untyped-call]
        return self.project_out(parts.to_tokens(o, z.shape[2]), z)

    def _channels(self, x: Tensor, dim: int, value_heads: int) -> tuple[Tensor, ...]:
        """Splits the channels of some value heads, and their key heads, into queries, keys and values."""
        values = value_heads * self.value_head_dim
        keys = (x.shape[dim] - values) // 2
        return x.split_with_sizes([keys, keys, values], dim)

    def _heads(self, qkv: Tensor, value_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, C) -> queries and keys (B, T, K, D_k), values (B, T, V, D_v)."""
        q, k, v = self._channels(qkv, -1, value_heads)
        keys, values = (-1, self.key_head_dim), (-1, self.value_head_dim)
        return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        key_heads, value_heads = self.key_size // self.key_head_dim, self.value_size // self.value_head_dim
        return f"{key_heads} key heads of {self.key_head_dim}, {value_heads} value heads of {self.value_head_dim}"


class GatedDeltaNet(DeltaNet):
    """Linear attention with the gated delta rule, a short convolution and an output gate.

        q, k, v = silu(conv(in_proj_qkv(x)))
        y = out_proj(norm(gated_delta_rule(q, k, v, decay, strength)) * silu(in_proj_z(x)))

    Args:
        hidden_size: H.
        num_key_heads: K.
        num_value_heads: V, a multiple of K: value heads j*V/K to (j+1)*V/K - 1 share query and key head j.
        key_head_dim: D_k.
        value_head_dim: D_v.
        conv_kernel_size: inputs that an output of the convolution depends on, its own included.
        eps: added to the mean square by the norm of the outputs.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Attributes:
        in_proj_qkv: (C, H), queries, keys and values, in this order.
        in_proj_z: (V * D_v, H), output gates.
        in_proj_b: (V, H), writing strengths before the sigmoid.
        in_proj_a: (V, H), decays, see `ligerzoo.kernels.delta_gates`.
        A_log: (V,), logarithms of the decay rates. Saved in fp32 if it was loaded in fp32, like `dt_bias` and `norm`.
        dt_bias: (V,), added to the decays.

    Raises:
        ValueError: a size is not positive, V is not a multiple of K, or `backend` is unknown.
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        *,
        conv_kernel_size: int = 4,
        eps: float = 1e-6,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = hidden_size, num_key_heads, num_value_heads, key_head_dim, value_head_dim
        super().__init__(*sizes, conv_kernel_size=conv_kernel_size, backend=backend)
        self.conv1d = CausalConv1d(self.channels, conv_kernel_size, backend=backend, device=device, dtype=dtype)
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads, device=device, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(num_value_heads, device=device, dtype=dtype))
        self.norm = GatedRMSNorm(value_head_dim, eps, backend=backend, device=device, dtype=dtype)
        self.out_proj = Linear(self.value_size, hidden_size, bias=False, device=device, dtype=dtype)
        self.in_proj_qkv = Linear(hidden_size, self.channels, bias=False, device=device, dtype=dtype)
        self.in_proj_z = Linear(hidden_size, self.value_size, bias=False, device=device, dtype=dtype)
        self.in_proj_b = Linear(hidden_size, num_value_heads, bias=False, device=device, dtype=dtype)
        self.in_proj_a = Linear(hidden_size, num_value_heads, bias=False, device=device, dtype=dtype)
        initialize(self, GatedDeltaNet)

    def project_in(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `DeltaNet.project_in`."""
        layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        return cast(tuple[Tensor, Tensor, Tensor, Tensor], project(x, *layers, backend=self.backend))

    def project_out(self, o: Tensor, z: Tensor) -> Tensor:
        """See `DeltaNet.project_out`."""
        return self.out_proj(self.norm(o, z).flatten(-2))  # type: ignore[no-any-return]

    def tensor_plan(self) -> TensorPlan:
        """Divides the heads over the processes of tensor parallelism."""
        keys, values = self.key_heads, self.value_heads
        return TensorPlan(
            {"value heads": values.number},
            ("in_proj_z", "in_proj_b", "in_proj_a"),
            ("out_proj",),
            shared={"key heads": keys.number},
            fused=dict.fromkeys(("in_proj_qkv", "conv1d"), (keys, keys, values)),
            own=("A_log", "dt_bias"),
        )


class SeparateDeltaNet(DeltaNet):
    """`GatedDeltaNet` with a linear layer for each of queries, keys and values (OLMo Hybrid).

        q, k, v = silu(conv(q_proj(x), k_proj(x), v_proj(x)))
        y = o_proj(o_norm(gated_delta_rule(q, k, v, decay, strength)) * silu(g_proj(x)))

    Takes the arguments of `GatedDeltaNet`, and `max_strength`.

    Args:
        max_strength: writing strengths are between 0 and this. Above 1, the state may change its sign along a key: it
            is multiplied by 1 - strength there (Grazzi et al. 2025, "negative eigenvalues").

    Attributes:
        g_proj: (V * D_v, H), output gates.
        b_proj: (V, H), writing strengths before the sigmoid.
        a_proj: (V, H), decays, see `ligerzoo.kernels.delta_gates`.
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        *,
        conv_kernel_size: int = 4,
        max_strength: float = 1.0,
        eps: float = 1e-6,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = hidden_size, num_key_heads, num_value_heads, key_head_dim, value_head_dim
        super().__init__(*sizes, conv_kernel_size=conv_kernel_size, max_strength=max_strength, backend=backend)
        self.A_log = nn.Parameter(torch.empty(num_value_heads, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads, device=device, dtype=dtype))
        self.q_proj = Linear(hidden_size, self.key_size, bias=False, device=device, dtype=dtype)
        self.k_proj = Linear(hidden_size, self.key_size, bias=False, device=device, dtype=dtype)
        self.v_proj = Linear(hidden_size, self.value_size, bias=False, device=device, dtype=dtype)
        self.a_proj = Linear(hidden_size, num_value_heads, bias=False, device=device, dtype=dtype)
        self.b_proj = Linear(hidden_size, num_value_heads, bias=False, device=device, dtype=dtype)
        self.g_proj = Linear(hidden_size, self.value_size, bias=False, device=device, dtype=dtype)
        self.o_proj = Linear(self.value_size, hidden_size, bias=False, device=device, dtype=dtype)
        self.conv1d = CausalConv1d(self.channels, conv_kernel_size, backend=backend, device=device, dtype=dtype)
        self.o_norm = GatedRMSNorm(value_head_dim, eps, backend=backend, device=device, dtype=dtype)
        initialize(self, SeparateDeltaNet)

    def project_in(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `DeltaNet.project_in`."""
        layers = self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.b_proj, self.a_proj
        q, k, v, z, b, a = project(x, *layers, backend=self.backend)
        return torch.cat([q, k, v], -1), z, b, a

    def project_out(self, o: Tensor, z: Tensor) -> Tensor:
        """See `DeltaNet.project_out`."""
        return self.o_proj(self.o_norm(o, z).flatten(-2))  # type: ignore[no-any-return]

    def tensor_plan(self) -> TensorPlan:
        """Divides the heads over the processes of tensor parallelism."""
        keys, values = self.key_heads, self.value_heads
        return TensorPlan(
            {"value heads": values.number},
            ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
            ("o_proj",),
            shared={"key heads": keys.number},
            heads={"q_proj": keys, "k_proj": keys},
            fused={"conv1d": (keys, keys, values)},
            own=("A_log", "dt_bias"),
        )
