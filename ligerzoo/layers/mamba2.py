"""Mamba-2: a selective state-space model as a layer that mixes tokens (Dao & Gu 2024, "Transformers are SSMs").

Shapes: B batch, T tokens in the call, H hidden features, N heads of D features, G groups, S state features, I = N * D
inner features, C = I + 2 * G * S channels of the convolution.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ligerzoo.kernels import glu, ssd, ssd_gates, ssd_step
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

_DECAY_RATES, _STEP_SIZES = (1.0, 16.0), (0.001, 0.1)
"""Bounds of new layers, as in Mamba-2. Step sizes are those of an input of 0."""


class Mamba2Scales(NamedTuple):
    """Constant factors of the input of `Mamba2Mixer`, and of the parts of its projection (Falcon-H1).

    Attributes:
        input: of the hidden states.
        z: of the gates.
        x: of the inputs of the recurrence.
        b: of the matrices B.
        c: of the matrices C.
        dt: of the step sizes before the bias.
    """

    input: float = 1.0
    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0


class Mamba2Mixer(RecurrentMixer):
    """Mamba-2: a short convolution, a recurrence with a scalar decay per head, and an output gate.

        z, xbc, dt = in_proj(x)
        x, b, c = silu(conv(xbc))
        dt = clamp(softplus(dt + dt_bias));  S = exp(-exp(A_log) dt) S + dt b x^T;  y = S^T c + D x
        out_proj(norm(y * silu(z)))

    Args:
        hidden_size: H.
        num_heads: N.
        head_dim: D.
        state_size: S.
        num_groups: G, a divisor of N: heads j*N/G to (j+1)*N/G - 1 share the matrices B and C of group j. The norm
            normalizes each group of I / G features on its own.
        conv_kernel_size: inputs that an output of the convolution depends on, its own included.
        conv_bias: add a bias to the convolution.
        in_bias: add a bias to the input projection.
        out_bias: add a bias to the output projection.
        norm: normalize the gated outputs. Without a norm, the outputs are only gated.
        norm_before_gate: gate the normalized outputs, instead of normalizing the gated ones.
        time_step_limit: lower and upper limit of the step sizes.
        scales: constant factors; None for ones.
        eps: added to the mean square by the norm of the outputs.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Attributes:
        in_proj: (I + C + N, H): gates, channels of the convolution (x, B and C), step sizes, in this order.
        A_log: (N,), logarithms of the decay rates. Saved in fp32 if it was loaded in fp32, like `dt_bias`, `D` and
            `norm`.
        dt_bias: (N,), added to the step sizes before softplus.
        D: (N,), factors of the inputs in the outputs.

    Raises:
        ValueError: a size is not positive, N is not a multiple of G, `time_step_limit` does not ascend, or `backend`
            is unknown.
    """

    norm: GatedRMSNorm | None

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        *,
        num_groups: int = 1,
        conv_kernel_size: int = 4,
        conv_bias: bool = True,
        in_bias: bool = False,
        out_bias: bool = False,
        norm: bool = True,
        norm_before_gate: bool = False,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
        scales: Mamba2Scales | None = None,
        eps: float = 1e-5,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_heads": num_heads, "head_dim": head_dim, "state_size": state_size, "num_groups": num_groups}
        sizes |= {"conv_kernel_size": conv_kernel_size}
        lowest, highest = time_step_limit
        if min(sizes.values()) < 1 or num_heads % num_groups or not 0 <= lowest <= highest:
            got = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise ValueError(
                f"Mamba2Mixer: {got}, time_step_limit={time_step_limit}; expected positive numbers, num_heads a "
                "multiple of num_groups, and ascending limits from 0 on"
            )
        self.hidden_size, self.head_dim, self.state_size = hidden_size, head_dim, state_size
        self.num_groups = num_groups
        self.time_step_limit = time_step_limit
        self.scales = Mamba2Scales() if scales is None else scales
        self.backend: Backend = check_backend(backend)
        inner, channels = num_heads * head_dim, num_heads * head_dim + 2 * num_groups * state_size
        self.conv1d = CausalConv1d(
            channels, conv_kernel_size, bias=conv_bias, backend=backend, device=device, dtype=dtype
        )
        self.in_proj = Linear(hidden_size, inner + channels + num_heads, bias=in_bias, device=device, dtype=dtype)
        self.dt_bias = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.D = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.norm = None
        if norm:
            self.norm = GatedRMSNorm(
                inner,
                eps,
                group_size=inner // num_groups,
                norm_before_gate=norm_before_gate,
                backend=backend,
                device=device,
                dtype=dtype,
            )
        self.out_proj = Linear(inner, hidden_size, bias=out_bias, device=device, dtype=dtype)
        initialize(self, Mamba2Mixer)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples decay rates from U(1, 16) and step sizes from 0.001 to 0.1, sets `D` to 1. `std` is unused here."""
        nn.init.uniform_(self.A_log, *_DECAY_RATES)
        smallest, largest = map(math.log, _STEP_SIZES)
        nn.init.uniform_(self.dt_bias, smallest, largest)
        with torch.no_grad():
            self.A_log.log_()
            self.dt_bias.exp_().expm1_().log_()  # the inverse of softplus
        nn.init.ones_(self.D)

    def tensor_plan(self) -> TensorPlan:
        """Divides the heads over the processes of tensor parallelism."""
        number = len(self.A_log)
        inner, steps = Heads(number * self.head_dim, number), Heads(number, number)
        groups = Heads(self.num_groups * self.state_size, self.num_groups)
        shared = {"groups": self.num_groups}
        return TensorPlan(
            {"heads": number} | ({} if self.norm is None else shared),  # a process normalizes whole groups
            () if self.norm is None else ("norm",),
            ("out_proj",),
            shared=shared,
            fused={"in_proj": (inner, inner, groups, groups, steps), "conv1d": (inner, groups, groups)},
            own=("A_log", "dt_bias", "D"),
        )

    @property
    def exchanged_heads(self) -> int:
        """See `Attention.exchanged_heads`. Processes may have the same group if it is the only one."""
        return len(self.A_log) if self.num_groups == 1 else self.num_groups

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one row of a cache."""
        channels, _, kernel_size = self.conv1d.weight.shape
        conv_state = channels * (kernel_size - 1) * self.conv1d.weight.element_size()
        return int(conv_state + len(self.A_log) * self.head_dim * self.state_size * torch.float32.itemsize)

    def mix(
        self,
        x: Tensor,
        segment_start: Tensor | None,
        lengths: Tensor | None,
        cache: RecurrentLayerCache | None,
        parts: RowParts,
    ) -> Tensor:
        """See `RecurrentMixer.mix`."""
        z, xbc, dt = self._project(x)
        weight: Tensor | None = None
        bias: Tensor | None = None
        A_log: Tensor = self.A_log
        dt_bias: Tensor = self.dt_bias
        D: Tensor = self.D
        if parts.count > 1:
            *heads, dt = parts.to_heads(*self._heads(xbc, len(A_log)), dt[..., None])
            xbc, dt = torch.cat([part.flatten(2) for part in heads], 2), dt.squeeze(3)
            weight = self._own_channels(self.conv1d.weight, parts)
            bias = None if self.conv1d.bias is None else self._own_channels(self.conv1d.bias, parts)
            A_log, dt_bias, D = (parts.own_heads(vector) for vector in (A_log, dt_bias, D))
        g, dt = ssd_gates(dt, A_log, dt_bias, *self.time_step_limit, backend=self.backend)
        if cache is not None and cache.is_updatable and lengths is None and x.shape[1] == 1 and not xbc.requires_grad:
            conv_state, state = cast(tuple[Tensor, Tensor], cache.read_states(len(x), 1))
            mixed = self.conv1d.step(xbc, conv_state)
            y = ssd_step(*self._heads(mixed, len(D)), g, dt, state, D, backend=self.backend)
            cache.count(1)
        else:
            before, state_before = (None, None) if cache is None else cache.read_states(*x.shape[:2])
            mixed, conv_state = self.conv1d(xbc, before, segment_start, weight, bias)
            if lengths is not None:  # padding does not change the states
                conv_state = last_inputs(xbc, before, lengths, conv_state.shape[1])
                is_padding = torch.arange(x.shape[1], device=x.device)[:, None] >= lengths[:, None, None]
                g, dt = g.masked_fill(is_padding, 0.0), dt.masked_fill(is_padding, 0.0)
            result = ssd(
                *self._heads(mixed, len(D)),
                g,
                dt,
                D,
                initial_state=state_before,
                segment_start=segment_start,
                output_final_state=cache is not None,
                backend=self.backend,
            )
            if cache is None:
                y = cast(Tensor, result)
            else:
                y, state = cast(tuple[Tensor, Tensor], result)
                cache.write_states(conv_state.detach(), state.detach(), x.shape[1])
        y = parts.to_tokens(y, len(self.A_log)).flatten(-2)
        gated = glu(z, y, backend=self.backend) if self.norm is None else self.norm(y, z)
        return self.out_proj(gated)  # type: ignore[no-any-return]

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, H) -> gates (B, T, I), channels (B, T, C) and step sizes (B, T, N)."""
        input_scale, *scales = self.scales
        [y] = project(x if input_scale == 1 else x * input_scale, self.in_proj, backend=self.backend)
        heads, channels = len(self.A_log), len(self.conv1d.weight)
        inner = heads * self.head_dim
        if any(scale != 1 for scale in scales):
            sizes = inner, inner, (channels - inner) // 2, (channels - inner) // 2, heads
            y = y * torch.cat([y.new_full((size,), scale) for size, scale in zip(sizes, scales, strict=True)])
        return y.split_with_sizes([inner, channels, heads], -1)

    def _own_channels(self, x: Tensor, parts: RowParts) -> Tensor:
        """The channels of the heads of this process, and of their groups, of a weight, (C, ...)."""
        x, *groups = self._heads(x.movedim(0, -1), len(self.A_log))
        repeats = max(1, parts.count // groups[0].shape[-2])  # several processes may have the same group
        heads = x, *(group.repeat_interleave(repeats, -2) for group in groups)
        return torch.cat([parts.own_heads(t.movedim((-2, -1), (0, 1))).flatten(0, 1) for t in heads])

    def _heads(self, xbc: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """(..., C) -> x (..., N, D), B and C (..., G, S), of some number of heads."""
        inner = number * self.head_dim
        groups = (xbc.shape[-1] - inner) // 2
        x, b, c = xbc.split_with_sizes([inner, groups, groups], -1)
        features, states = (-1, self.head_dim), (-1, self.state_size)
        return x.unflatten(-1, features), b.unflatten(-1, states), c.unflatten(-1, states)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"{len(self.A_log)} heads of {self.head_dim}, {self.num_groups} groups, {self.state_size} state features"
