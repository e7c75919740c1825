"""Linear attention with the gated delta rule (Yang et al. 2025, "Gated Delta Networks"), as in Qwen3-Next and Qwen3.5.

Shapes: B batch, T tokens in the call, H hidden features, K key heads, V value heads, D_k and D_v their sizes,
C = 2 * K * D_k + V * D_v channels of the convolution.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ligerzoo.kernels import (
    delta_gates,
    gated_delta_rule,
    gated_delta_step,
)
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

_LARGEST_DECAY = 16.0
"""Decay rates of new layers are between 0 and this."""


class GatedDeltaNet(RecurrentMixer):
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
        super().__init__()
        sizes = {"num_key_heads": num_key_heads, "num_value_heads": num_value_heads, "key_head_dim": key_head_dim}
        sizes |= {"value_head_dim": value_head_dim, "conv_kernel_size": conv_kernel_size}
        if min(sizes.values()) < 1 or num_value_heads % num_key_heads:
            got = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise ValueError(
                f"GatedDeltaNet: {got}; expected positive numbers, and num_value_heads a multiple of num_key_heads"
            )
        self.hidden_size = hidden_size
        self.key_head_dim, self.value_head_dim = key_head_dim, value_head_dim
        self.key_size, self.value_size = num_key_heads * key_head_dim, num_value_heads * value_head_dim
        self.backend: Backend = check_backend(backend)
        channels = 2 * self.key_size + self.value_size
        self.conv1d = CausalConv1d(channels, conv_kernel_size, backend=backend, device=device, dtype=dtype)
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads, device=device, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(num_value_heads, device=device, dtype=dtype))
        self.norm = GatedRMSNorm(value_head_dim, eps, backend=backend, device=device, dtype=dtype)
        self.out_proj = Linear(self.value_size, hidden_size, bias=False, device=device, dtype=dtype)
        self.in_proj_qkv = Linear(hidden_size, channels, bias=False, device=device, dtype=dtype)
        self.in_proj_z = Linear(hidden_size, self.value_size, bias=False, device=device, dtype=dtype)
        self.in_proj_b = Linear(hidden_size, num_value_heads, bias=False, device=device, dtype=dtype)
        self.in_proj_a = Linear(hidden_size, num_value_heads, bias=False, device=device, dtype=dtype)
        initialize(self, GatedDeltaNet)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples decay rates from U(0.01, 16) and sets `dt_bias` to 1, as in Mamba. `std` is unused here."""
        nn.init.uniform_(self.A_log, 0.01, _LARGEST_DECAY)
        with torch.no_grad():
            self.A_log.log_()
        nn.init.ones_(self.dt_bias)

    def tensor_plan(self) -> TensorPlan:
        """Divides the heads over the processes of tensor parallelism."""
        keys = Heads(self.key_size, self.exchanged_heads)
        values = Heads(self.value_size, self.value_size // self.value_head_dim)
        return TensorPlan(
            {"value heads": values.number},
            ("in_proj_z", "in_proj_b", "in_proj_a"),
            ("out_proj",),
            shared={"key heads": keys.number},
            fused=dict.fromkeys(("in_proj_qkv", "conv1d"), (keys, keys, values)),
            own=("A_log", "dt_bias"),
        )

    @property
    def exchanged_heads(self) -> int:
        """See `Attention.exchanged_heads`."""
        return self.key_size // self.key_head_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one row of a cache."""
        channels, _, kernel_size = self.conv1d.weight.shape
        conv_state = channels * (kernel_size - 1) * self.conv1d.weight.element_size()
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
        qkv, z, b, a = project(
            x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a, backend=self.backend
        )
        weight: Tensor = self.conv1d.weight
        A_log: Tensor = self.A_log
        dt_bias: Tensor = self.dt_bias
        if parts.count > 1:
            channels = self._channels(weight, 0, b.shape[2])
            *heads, b, a = parts.to_heads(*self._heads(qkv, b.shape[2]), b[..., None], a[..., None])
            qkv, b, a = torch.cat([part.flatten(2) for part in heads], 2), b.squeeze(3), a.squeeze(3)
            weight = torch.cat([parts.own_heads(part) for part in channels])
            A_log, dt_bias = parts.own_heads(A_log), parts.own_heads(dt_bias)
        g, beta = delta_gates(a, b, A_log, dt_bias, backend=self.backend)
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
                g, beta = g.masked_fill(is_padding, 0.0), beta.masked_fill(is_padding, 0.0)
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
        gated = self.norm(parts.to_tokens(o, z.shape[2]), z)
        return self.out_proj(gated.flatten(-2))  # type: ignore[no-any-return]

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
