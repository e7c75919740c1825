"""Decoder layers of transformers' models: norms in one kernel with the residual addition before, or with its gradient.

Each class is one residual pattern, recognized by the names of the submodules. The check replaces attention and MLP by
stand-ins, which also record the arguments they receive.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch import Tensor, nn

from ligerzoo.integrations.kernels.forwards import DECORATED, decorated_like, undecorated
from ligerzoo.integrations.kernels.norms import KernelRMSNorm, kernel_add_and_normalize, kernel_normalize
from ligerzoo.integrations.kernels.replace import KernelModule, Replacement, difference_for, no_effects, random_like


def _parameters(cls: type[nn.Module]) -> list[inspect.Parameter]:
    """Returns the parameters of the forward of a class, after `self`."""
    return list(inspect.signature(cls.forward).parameters.values())[1:]


class KernelDecoderLayer(KernelModule):
    """Base class of the residual patterns.

    Attributes:
        kernel_parameters: names of the positional parameters of the original forward, after the hidden states.
        kernel_unused: those that it does not pass to attention.
    """

    kernel_kind = "add + norm"
    kernel_parameters: tuple[str, ...]
    kernel_unused: tuple[str, ...]
    self_attn: nn.Module
    mlp: nn.Module

    @classmethod
    def kernel_members(cls, original: type[nn.Module], **options: Any) -> dict[str, Any]:
        """Returns the names of the parameters of the original forward, and the forward with its decorators."""
        assert isinstance(cls.forward, types.FunctionType)
        return {
            "kernel_parameters": tuple(parameter.name for parameter in _parameters(original)[1:]),
            "forward": decorated_like(original.forward, cls.forward),
        }

    def _attend(self, hidden_states: Tensor, arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        named = {**dict(zip(self.kernel_parameters, arguments, strict=False)), **named}
        for name in self.kernel_unused:
            named.pop(name, None)
        return self.self_attn(hidden_states=hidden_states, **named)[0]  # type: ignore[no-any-return]

    def _feed_forward(self, hidden_states: Tensor) -> Tensor:
        output = self.mlp(hidden_states)
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]  # or scores too


class KernelPreNormLayer(KernelDecoderLayer):
    """`x += attention(norm(x)); x += mlp(norm(x))`."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """hidden_states: (B, T, H) -> (B, T, H)."""
        normalized, hidden_states = kernel_normalize(hidden_states, self.input_layernorm)
        attended = self._attend(normalized, arguments, named)
        normalized, hidden_states = kernel_add_and_normalize(attended, hidden_states, self.post_attention_layernorm)
        return hidden_states + self._feed_forward(normalized)


class KernelScaledPreNormLayer(KernelPreNormLayer):
    """`x += s * attention(norm(x)); x += s * mlp(norm(x))` (Granite)."""

    residual_multiplier: float

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """hidden_states: (B, T, H) -> (B, T, H)."""
        normalized, hidden_states = kernel_normalize(hidden_states, self.input_layernorm)
        attended = self._attend(normalized, arguments, named) * self.residual_multiplier
        normalized, hidden_states = kernel_add_and_normalize(attended, hidden_states, self.post_attention_layernorm)
        return hidden_states + self._feed_forward(normalized) * self.residual_multiplier


class KernelDropoutPreNormLayer(KernelPreNormLayer):
    """`x += dropout(attention(norm(x))); x += dropout(mlp(norm(x)))` (Phi-3)."""

    resid_attn_dropout: nn.Module
    resid_mlp_dropout: nn.Module

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """hidden_states: (B, T, H) -> (B, T, H)."""
        normalized, hidden_states = kernel_normalize(hidden_states, self.input_layernorm)
        attended = self.resid_attn_dropout(self._attend(normalized, arguments, named))
        normalized, hidden_states = kernel_add_and_normalize(attended, hidden_states, self.post_attention_layernorm)
        return hidden_states + self.resid_mlp_dropout(self._feed_forward(normalized))  # type: ignore[no-any-return]


class KernelSandwichLayer(KernelDecoderLayer):
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x)))` (Gemma 2 and 3, GLM-4-0414).

    Attributes:
        kernel_norms: names of the norms after attention, before the MLP and after the MLP.
    """

    kernel_norms: tuple[str, str, str]
    input_layernorm: nn.Module

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """hidden_states: (B, T, H) -> (B, T, H)."""
        after_attention, before_mlp, after_mlp = (getattr(self, name) for name in self.kernel_norms)
        normalized, hidden_states = kernel_normalize(hidden_states, self.input_layernorm)
        attended = after_attention(self._attend(normalized, arguments, named))
        normalized, hidden_states = kernel_add_and_normalize(attended, hidden_states, before_mlp)
        return hidden_states + after_mlp(self._feed_forward(normalized))  # type: ignore[no-any-return]


GEMMA_NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM_NORMS = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

PRE_NORM = frozenset({"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"})
PATTERNS: dict[frozenset[str], tuple[type[KernelDecoderLayer], dict[str, Any], str]] = {
    PRE_NORM: (KernelPreNormLayer, {}, "post_attention_layernorm"),
    PRE_NORM | {"resid_attn_dropout", "resid_mlp_dropout"}: (KernelDropoutPreNormLayer, {}, "post_attention_layernorm"),
    frozenset({"input_layernorm", "self_attn", "mlp", *GEMMA_NORMS}): (
        KernelSandwichLayer,
        {"kernel_norms": GEMMA_NORMS},
        GEMMA_NORMS[1],
    ),
    frozenset({"input_layernorm", "self_attn", "mlp", *GLM_NORMS}): (
        KernelSandwichLayer,
        {"kernel_norms": GLM_NORMS},
        GLM_NORMS[1],
    ),
}
"""The residual pattern of each set of submodules, its constants, and the norm that the addition is fused with."""


def recognize_layer(module: nn.Module) -> Replacement | str | None:
    """Returns the replacement of a decoder layer, or why it has none; None for other modules.

    The norms of the layer must have been replaced before.
    """
    if not type(module).__name__.endswith("DecoderLayer"):
        return None
    children = frozenset(name for name, _child in module.named_children())
    if children not in PATTERNS:
        return "no kernel for its residual pattern"
    mixin, options, norm = PATTERNS[children]
    if hasattr(module, "residual_multiplier"):
        mixin = KernelScaledPreNormLayer
    if not isinstance(getattr(module, norm), KernelRMSNorm):
        return f"{norm} is not a replaced RMS norm"
    if undecorated(type(module).forward) is None:
        return DECORATED
    found = [_recognize_with(module, mixin, options, _MLP(scores)) for scores in (False, True)]
    return next((each for each in found if isinstance(each, Replacement)), found[0])


class _Attention(nn.Module):
    """Replaces attention in the check, and records its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[dict[str, Any]] = []

    def forward(self, *arguments: Any, hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        self.received.append({"positional": arguments, **named})
        return hidden_states.roll(1, dims=1) * 1.5, None


class _MLP(nn.Module):
    """Replaces an MLP in the check, or a mixture that returns router scores too."""

    def __init__(self, returns_scores: bool) -> None:
        super().__init__()
        self.returns_scores = returns_scores

    def forward(self, hidden_states: Tensor) -> Any:
        output = hidden_states.roll(1, dims=-1) * 0.5
        return (output, None) if self.returns_scores else output


def _recognize_with(
    module: nn.Module, mixin: type[KernelDecoderLayer], options: dict[str, Any], mlp: _MLP
) -> Replacement | str:
    """Returns the replacement, or how it differs in its results or in what it passes to attention."""
    x = _hidden_states(module)
    parameters = _parameters(type(module))[1:]
    declared = {p.name: object() for p in parameters if p.kind is not p.VAR_KEYWORD}
    others = {"another_argument": object()} if len(declared) < len(parameters) else {}
    attention = _Attention()
    own = {name: module.get_submodule(name) for name in ("self_attn", "mlp")}
    try:
        module.self_attn, module.mlp = attention, mlp
        with no_effects(module):
            type(module).forward(module, x, **declared, **others)
        unused = tuple(name for name in declared if name not in attention.received[0])
        replacement = Replacement(mixin, "add_rms_norm", {**options, "kernel_unused": unused})
        found = difference_for(module, replacement, x, **declared, **others)
    except Exception as error:  # the forward of any layer
        return f"its forward fails on random input: {error}"
    finally:
        for name, child in own.items():
            setattr(module, name, child)
    if found is not None:
        return found
    theirs, ours = attention.received[1:3]
    if theirs != ours:
        return f"it passes {', '.join(theirs)} to attention, the kernel's layer passes {', '.join(ours)}"
    return replacement


def _hidden_states(module: nn.Module) -> Tensor:
    """(1, 8, H). A norm without a weight accepts any H."""
    weight = next(module.get_submodule("input_layernorm").parameters(), None)
    if weight is not None:
        return random_like(weight, 1, 8, weight.shape[-1])
    return random_like(next(module.parameters()), 1, 8, 32)
