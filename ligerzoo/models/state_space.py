"""Shared by hybrids with Mamba-2 (Bamba, Falcon-H1, Granite 4, Nemotron-H): configuration of the state-space models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ligerzoo.layers import Mamba2Mixer, Mamba2Scales
from ligerzoo.models.config import DecoderConfig, refuse_unless


@dataclass(frozen=True, kw_only=True)
class MambaConfig(DecoderConfig):
    """Configuration of a decoder with Mamba-2 in some layers.

    Attributes:
        mamba_n_heads: heads of a state-space model.
        mamba_d_head: features of each head; None for `mamba_inner_size` / `mamba_n_heads`.
        mamba_n_groups: groups of heads that share the matrices B and C.
        mamba_d_state: state features.
        mamba_d_conv: inputs that an output of the convolution depends on.
        mamba_expand: inner features for each hidden feature.
        mamba_conv_bias: add a bias to the convolution.
        mamba_proj_bias: add biases to the input and output projections.
    """

    mamba_n_heads: int = 128
    mamba_d_head: int | None = None
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    mixer_types: ClassVar[Sequence[str]] = ("linear_attention", "full_attention")

    def validate(self) -> None:
        super().validate()
        heads, inner, groups = self.mamba_n_heads, self.mamba_inner_size, self.mamba_n_groups
        what, expected = "the heads do not divide the inner features", f"a divisor of {inner}"
        refuse_unless(inner % heads == 0, "mamba_n_heads", heads, expected, what)
        expected = f"{inner // heads}, the inner features divided by mamba_n_heads"
        refuse_unless(self.mamba_d_head in (None, inner // heads), "mamba_d_head", self.mamba_d_head, expected)
        refuse_unless(heads % groups == 0, "mamba_n_groups", groups, f"a divisor of mamba_n_heads, {heads}")

    def is_mamba(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has a state-space model."""
        return True

    @property
    def mamba_layers(self) -> int:
        """Number of layers with a state-space model."""
        return sum(map(self.is_mamba, range(self.num_hidden_layers)))

    @property
    def mamba_inner_size(self) -> int:
        """Inner features of a state-space model."""
        return self.mamba_expand * self.hidden_size


def mamba(
    config: MambaConfig,
    *,
    out_bias: bool | None = None,
    norm: bool = True,
    norm_before_gate: bool = False,
    time_step_min: float = 0.0,
    scales: Mamba2Scales | None = None,
) -> Mamba2Mixer:
    """Builds the state-space model of a layer.

    Args:
        config: the sizes.
        out_bias: see `Mamba2Mixer`, as for the others; None for `mamba_proj_bias`.
        time_step_min: lower limit of the step sizes.
    """
    c, heads = config, config.mamba_n_heads
    return Mamba2Mixer(
        c.hidden_size,
        heads,
        c.mamba_inner_size // heads,
        c.mamba_d_state,
        num_groups=c.mamba_n_groups,
        conv_kernel_size=c.mamba_d_conv,
        conv_bias=c.mamba_conv_bias,
        in_bias=c.mamba_proj_bias,
        out_bias=c.mamba_proj_bias if out_bias is None else out_bias,
        norm=norm,
        norm_before_gate=norm_before_gate,
        time_step_limit=(time_step_min, math.inf),
        scales=scales,
        eps=c.rms_norm_eps,
    )
