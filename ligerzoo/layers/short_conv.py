"""Short causal convolutions, and layers that mix tokens by one (Liquid AI 2025, LFM2).

Shapes: B batch, T tokens in the call, H hidden features, C channels, k kernel size.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ligerzoo.kernels import causal_conv1d, causal_conv1d_step
from ligerzoo.kernels.causal_conv import ConvActivation
from ligerzoo.kernels.dispatch import Backend, check_backend
from ligerzoo.layers.linear import INIT_STD, Linear, initialize
from ligerzoo.layers.recurrent import RecurrentMixer, last_inputs
from ligerzoo.layers.row_parts import RowParts
from ligerzoo.layers.state_cache import RecurrentLayerCache
from ligerzoo.layers.tensor_plan import Heads, TensorPlan
from ligerzoo.tensor_checks import explains_options


class CausalConv1d(nn.Module):
    """Causal depthwise convolution, by default without bias and followed by SiLU; see `ligerzoo.kernels.causal_conv1d`.

    Args:
        channels: C.
        kernel_size: inputs that an output depends on, its own included.
        bias: add a bias.
        activation: "silu", or None.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Attributes:
        weight: (C, 1, kernel_size), as in `torch.nn.Conv1d`; the last column is the factor of the token itself.
    """

    bias: nn.Parameter | None

    @explains_options
    def __init__(
        self,
        channels: int,
        kernel_size: int,
        *,
        bias: bool = False,
        activation: ConvActivation | None = "silu",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation: ConvActivation | None = activation
        self.backend: Backend = check_backend(backend)
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, device=device, dtype=dtype))
        values = torch.empty(channels, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if values is None else nn.Parameter(values))
        initialize(self, CausalConv1d)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2) and sets the bias to 0."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        initial_state: Tensor | None = None,
        segment_start: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x: (B, T, C) -> (B, T, C), and the last inputs, (B, kernel_size - 1, C).

        Args:
            x: the inputs.
            initial_state: the inputs before them, see `ligerzoo.kernels.causal_conv1d`, as for `segment_start`.
            segment_start: the first token of each token's segment.
            weight: the weight of some channels, those of `x`; None for all.
            bias: likewise.
        """
        return causal_conv1d(  # type: ignore[return-value]
            x,
            (self.weight if weight is None else weight).squeeze(1),
            self.bias if weight is None else bias,
            initial_state=initial_state,
            segment_start=segment_start,
            activation=self.activation,
            output_final_state=True,
            backend=self.backend,
        )

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """x: (B, 1, C) -> (B, 1, C); updates the last inputs, (B, kernel_size - 1, C), in place."""
        weight, activation = self.weight.squeeze(1), self.activation
        return causal_conv1d_step(x, state, weight, self.bias, activation=activation, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kernel_size={self.weight.shape[2]}"


class ShortConv(RecurrentMixer):
    """Gated short convolution, `out_proj(c * conv(b * v))` with b, c, v = in_proj(x) (LFM2).

    Args:
        hidden_size: H.
        kernel_size: k, inputs that an output of the convolution depends on, its own included.
        bias: add biases to both projections and the convolution.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Attributes:
        in_proj: (3 * H, H), for b, c and v, in this order.
    """

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        kernel_size: int = 3,
        *,
        bias: bool = False,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.conv = CausalConv1d(
            hidden_size, kernel_size, bias=bias, activation=None, backend=backend, device=device, dtype=dtype
        )
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias=bias, device=device, dtype=dtype)
        self.out_proj = Linear(hidden_size, hidden_size, bias=bias, device=device, dtype=dtype)

    def mix(
        self,
        x: Tensor,
        segment_start: Tensor | None,
        lengths: Tensor | None,
        cache: RecurrentLayerCache | None,
        parts: RowParts,
    ) -> Tensor:
        """See `RecurrentMixer.mix`."""
        b, c, v = self.in_proj(x).chunk(3, -1)
        inputs, weight, bias = b * v, None, None
        if parts.count > 1:  # each channel is a head
            [heads] = parts.to_heads(inputs[..., None])
            inputs, weight = heads.squeeze(3), parts.own_heads(self.conv.weight)
            bias = None if self.conv.bias is None else parts.own_heads(self.conv.bias)
        if cache is not None and cache.is_updatable and lengths is None and x.shape[1] == 1 and not x.requires_grad:
            before, _ = cast(tuple[Tensor, Tensor], cache.read_states(len(x), 1))
            mixed = self.conv.step(inputs, before)
            cache.count(1)
        else:
            state, _ = (None, None) if cache is None else cache.read_states(*x.shape[:2])
            mixed, after = self.conv(inputs, state, segment_start, weight, bias)
            if cache is not None:
                if lengths is not None:  # padding does not change the state
                    after = last_inputs(inputs, state, lengths, after.shape[1])
                cache.write_states(after.detach(), after.new_empty(len(x), 0), x.shape[1])
        if parts.count > 1:
            mixed = parts.to_tokens(mixed[..., None], c.shape[-1]).squeeze(3)
        return self.out_proj(c * mixed)  # type: ignore[no-any-return]

    def tensor_plan(self) -> TensorPlan:
        """Divides the channels over the processes of tensor parallelism."""
        channels = Heads(self.hidden_size, self.hidden_size)
        fused = {"in_proj": (channels, channels, channels)}
        return TensorPlan({"channels": channels.number}, ("conv",), ("out_proj",), fused=fused)

    @property
    def exchanged_heads(self) -> int:
        """See `Attention.exchanged_heads`."""
        return self.hidden_size

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one row of a cache."""
        weight: Tensor = self.conv.weight
        return int(self.hidden_size * (weight.shape[2] - 1) * weight.element_size())
