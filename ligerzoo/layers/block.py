"""Residual blocks of attention and MLP. Each residual pattern is a class.

Blocks are called as `block(x, context, cache)`, x: (B, T, H) -> (B, T, H). They call `self_attn(x, context, cache)`,
such as `Attention`, and `mlp(x, context)`, such as `GatedMLP` or `MoE`.
"""

from __future__ import annotations

import inspect
from typing import ClassVar

import torch
from torch import Tensor, nn

from ligerzoo.errors import WrongTypeError
from ligerzoo.layers.cache import BlockCache, CachePair, LayerCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.kv_cache import new_layer_cache
from ligerzoo.layers.linear import INIT_STD, initialize
from ligerzoo.layers.norm import add_and_normalize, normalize
from ligerzoo.tensor_checks import describe_value

_MIXED = ("x", "context", "cache")
_CALLS = {**dict.fromkeys(("self_attn", "linear_attn", "mamba", "conv"), _MIXED), "mlp": ("x", "context")}
"""The arguments with which blocks call their parts; norms get x."""


def check_parts(block: nn.Module) -> None:
    """Raises WrongTypeError if a block of this package cannot call one of its parts.

    Subclasses with a forward may call them in another way.
    """
    if type(block).forward.__module__.partition(".")[0] != __name__.partition(".")[0]:
        return
    for name, part in block._modules.items():
        assert part is not None
        arguments = _CALLS.get(name, ("x",))
        try:
            inspect.signature(part.forward).bind(*arguments)
        except TypeError as error:
            forward, call = f"forward{inspect.signature(part.forward)}", f"{name}({', '.join(arguments)})"
            what = f"{name} is {describe_value(part)}, which takes other arguments: {forward}"
            order = f"{type(block).__name__}{tuple(block._modules)}".replace("'", "")
            remedy = f"The parts of a block are in this order: {order}"
            expected, where = f"a module called as {call}", type(block).__name__
            raise WrongTypeError(what, where=where, expected=expected, remedy=remedy) from error


class ResidualBlock(nn.Module):
    """Base class of blocks with a layer in which tokens see others, and an MLP.

    Attributes:
        mixer_name: attribute of that layer: the attention, or what a subclass has instead.
    """

    mixer_name: ClassVar[str] = "self_attn"
    self_attn: nn.Module

    @property
    def mixer(self) -> nn.Module:
        """The layer in which tokens see others."""
        mixer: nn.Module = getattr(self, self.mixer_name)
        return mixer

    @property
    def mixers(self) -> tuple[nn.Module, ...]:
        """All layers in which tokens see others."""
        return (self.mixer,)

    def new_cache(self, capacity: int | None = None) -> BlockCache:
        """Returns an empty cache of the mixer."""
        return new_layer_cache(self.mixer, capacity)


class PreNormBlock(ResidualBlock):
    """Pre-norm block (Xiong et al. 2020): `x += attention(norm(x)); x += mlp(norm(x))`.

    Args:
        input_layernorm: norm before attention.
        self_attn: the attention.
        post_attention_layernorm: norm before the MLP.
        mlp: the MLP.
    """

    def __init__(
        self, input_layernorm: nn.Module, self_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.add_module(self.mixer_name, self_attn)
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        check_parts(self)

    def forward(self, x: Tensor, context: Context, cache: BlockCache | None = None) -> Tensor:
        normalized, x = normalize(x, self.input_layernorm)
        mixed = self.scale_mixed(self.mix(normalized, context, cache))
        normalized, x = add_and_normalize(x, mixed, self.post_attention_layernorm)
        return x + self.scale_mlp(self.feed_forward(normalized, context))

    def feed_forward(self, normalized: Tensor, context: Context) -> Tensor:
        """Returns the output of the MLP."""
        return self.mlp(normalized, context)  # type: ignore[no-any-return]

    def mix(self, normalized: Tensor, context: Context, cache: BlockCache | None) -> Tensor:
        """Returns the output of the mixer."""
        return self.mixer(normalized, context, cache)  # type: ignore[no-any-return]

    def scale_mixed(self, x: Tensor) -> Tensor:
        """Returns what is added to the hidden states for the output of the mixer."""
        return x

    def scale_mlp(self, x: Tensor) -> Tensor:
        """Returns what is added to the hidden states for the output of the MLP."""
        return x


class LinearAttentionBlock(PreNormBlock):
    """Pre-norm block with linear attention, `x += linear_attn(norm(x)); x += mlp(norm(x))`.

    Args:
        input_layernorm: norm before linear attention.
        linear_attn: the linear attention, such as `GatedDeltaNet`.
        post_attention_layernorm: norm before the MLP.
        mlp: the MLP.
    """

    mixer_name = "linear_attn"

    def __init__(
        self, input_layernorm: nn.Module, linear_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__(input_layernorm, linear_attn, post_attention_layernorm, mlp)


class ConvBlock(PreNormBlock):
    """`PreNormBlock` with a convolution, such as `ShortConv`, as the attribute `conv` (LFM2)."""

    mixer_name = "conv"


class MambaBlock(PreNormBlock):
    """`PreNormBlock` with a state-space model, such as `Mamba2Mixer`, as the attribute `mamba` (Bamba)."""

    mixer_name = "mamba"


class ParallelMambaBlock(PreNormBlock):
    """Pre-norm block whose attention and state-space model have the same input (Falcon-H1).

    `h = norm(x); x += a * self_attn(b * h) + c * mamba(h); x += mlp(norm(x))`

    Args:
        multipliers: a, b and c.
        mamba: the state-space model, such as `Mamba2Mixer`.
        parts: arguments of `PreNormBlock`.
    """

    def __init__(self, multipliers: tuple[float, float, float], mamba: nn.Module, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.attention_out, self.attention_in, self.mamba_out = multipliers
        self.mamba = mamba
        check_parts(self)

    @property
    def mixers(self) -> tuple[nn.Module, ...]:
        """Attention and the state-space model."""
        return self.self_attn, self.mamba

    def mix(self, normalized: Tensor, context: Context, cache: BlockCache | None) -> Tensor:
        """See `PreNormBlock.mix`."""
        tokens, states = (None, None) if cache is None else cache.parts
        attended: Tensor = self.self_attn(self.attention_in * normalized, context, tokens)
        mixed: Tensor = self.mamba(normalized, context, states)
        return self.attention_out * attended + self.mamba_out * mixed

    def new_cache(self, capacity: int | None = None) -> CachePair:
        """Returns empty caches of the attention and the state-space model."""
        return CachePair(*(part.new_cache(capacity) for part in (self.self_attn, self.mamba)))  # type: ignore[operator]


class MixerBlock(ResidualBlock):
    """Pre-norm block without an MLP, `x += attention(norm(x))` (Nemotron-H).

    Args:
        input_layernorm: the norm.
        self_attn: the attention.
    """

    def __init__(self, input_layernorm: nn.Module, self_attn: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.add_module(self.mixer_name, self_attn)
        check_parts(self)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        normalized, x = normalize(x, self.input_layernorm)
        return x + self.mixer(normalized, context, cache)  # type: ignore[no-any-return]


class MambaMixerBlock(MixerBlock):
    """`MixerBlock` with a state-space model, such as `Mamba2Mixer`, as the attribute `mamba` (Nemotron-H)."""

    mixer_name = "mamba"


class MLPBlock(nn.Module):
    """Pre-norm block of an MLP alone, `x += mlp(norm(x))` (Nemotron-H).

    Args:
        input_layernorm: the norm.
        mlp: the MLP or MoE.

    Attributes:
        mixers: none; see `ResidualBlock.mixers`.
    """

    mixers: ClassVar[tuple[nn.Module, ...]] = ()

    def __init__(self, input_layernorm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.mlp = input_layernorm, mlp
        check_parts(self)

    def forward(self, x: Tensor, context: Context, _: LayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H)."""
        normalized, x = normalize(x, self.input_layernorm)
        return x + self.mlp(normalized, context)  # type: ignore[no-any-return]


class ScaledPreNormBlock(PreNormBlock):
    """Pre-norm block whose branches are multiplied by a constant (Granite; muP, Yang et al. 2022).

    Args:
        multiplier: factor of the outputs of both branches.
        parts: arguments of `PreNormBlock`.
        shared_mlp: an MLP whose output is added to that of the MLP, such as an expert for every token; None for none.
    """

    def __init__(self, multiplier: float, *parts: nn.Module, shared_mlp: nn.Module | None = None) -> None:
        super().__init__(*parts)
        self.multiplier = multiplier
        self.shared_mlp = shared_mlp

    def feed_forward(self, normalized: Tensor, context: Context) -> Tensor:
        """Returns the output of the MLP, or of both."""
        y = super().feed_forward(normalized, context)
        return y if self.shared_mlp is None else y + self.shared_mlp(normalized)

    def scale_mixed(self, x: Tensor) -> Tensor:
        return self.multiplier * x

    def scale_mlp(self, x: Tensor) -> Tensor:
        return self.multiplier * x


class ScaledMambaBlock(ScaledPreNormBlock):
    """`ScaledPreNormBlock` with a state-space model, such as `Mamba2Mixer`, as the attribute `mamba` (Granite 4)."""

    mixer_name = "mamba"


class GatedPreNormBlock(PreNormBlock):
    """Pre-norm block whose branches are multiplied by the tanh of a learned gate each (Llama 3.2 Vision).

    Args:
        parts: arguments of `PreNormBlock`.
    """

    def __init__(
        self, *parts: nn.Module, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(*parts)
        self.attn_gate = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.mlp_gate = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        initialize(self, GatedPreNormBlock)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the gates from N(0, std^2)."""
        nn.init.normal_(self.attn_gate, std=std)
        nn.init.normal_(self.mlp_gate, std=std)

    def scale_mixed(self, x: Tensor) -> Tensor:
        return self.attn_gate.tanh() * x

    def scale_mlp(self, x: Tensor) -> Tensor:
        return self.mlp_gate.tanh() * x


class PostNormBlock(ResidualBlock):
    """Block with norms after the branches (OLMo 2; Liu et al. 2022): `x += norm(attention(x)); x += norm(mlp(x))`.

    Args:
        self_attn: the attention.
        post_attention_layernorm: norm after attention.
        mlp: the MLP.
        post_feedforward_layernorm: norm after the MLP.
    """

    def __init__(
        self, self_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module,
        post_feedforward_layernorm: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm
        check_parts(self)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, context, cache))
        return x + self.post_feedforward_layernorm(self.mlp(x, context))  # type: ignore[no-any-return]


class ResidualNormBlock(ResidualBlock):
    """Block with norms of the sums (BERT; Vaswani et al. 2017): `x = norm(x + attention(x)); x = norm(x + mlp(x))`.

    Args:
        self_attn: the attention.
        post_attention_layernorm: norm of the sum with attention's output.
        mlp: the MLP.
        post_feedforward_layernorm: norm of the sum with the MLP's output.
    """

    def __init__(
        self,
        self_attn: nn.Module,
        post_attention_layernorm: nn.Module,
        mlp: nn.Module,
        post_feedforward_layernorm: nn.Module,
    ) -> None:
        super().__init__()
        self.self_attn, self.post_attention_layernorm = self_attn, post_attention_layernorm
        self.mlp, self.post_feedforward_layernorm = mlp, post_feedforward_layernorm
        check_parts(self)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        x, _ = add_and_normalize(x, self.self_attn(x, context, cache), self.post_attention_layernorm)
        x, _ = add_and_normalize(x, self.mlp(x, context), self.post_feedforward_layernorm)
        return x


class SandwichBlock(ResidualBlock):
    """Block with norms before and after each branch (Ding et al. 2021, section 2.4; Gemma 2 and 3, GLM-4).

    Args:
        input_layernorm: norm before attention.
        self_attn: the attention.
        post_attention_layernorm: norm after attention.
        pre_feedforward_layernorm: norm before the MLP.
        mlp: the MLP.
        post_feedforward_layernorm: norm after the MLP.
    """

    def __init__(
        self, input_layernorm: nn.Module, self_attn: nn.Module, post_attention_layernorm: nn.Module,
        pre_feedforward_layernorm: nn.Module, mlp: nn.Module, post_feedforward_layernorm: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_layernorm = input_layernorm
        self.add_module(self.mixer_name, self_attn)
        self.post_attention_layernorm = post_attention_layernorm
        self.pre_feedforward_layernorm = pre_feedforward_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm
        check_parts(self)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        normalized, x = normalize(x, self.input_layernorm)
        attended = self.post_attention_layernorm(self.mixer(normalized, context, cache))
        normalized, x = add_and_normalize(x, attended, self.pre_feedforward_layernorm)
        return x + self.post_feedforward_layernorm(self.feed_forward(normalized, x, context))  # type: ignore[no-any-return]

    def feed_forward(self, normalized: Tensor, x: Tensor, context: Context) -> Tensor:
        """Returns the output of the second branch before its norm, from the hidden states with and without a norm."""
        return self.mlp(normalized, context)  # type: ignore[no-any-return]


class ConvSandwichBlock(SandwichBlock):
    """`SandwichBlock` with a convolution, such as `ShortConv`, as the attribute `conv` (LFM3)."""

    mixer_name = "conv"
