"""Decoder layers of transformers' models: norms in one kernel with the residual addition before, or with its gradient.

A layer is a residual pattern, recognized by the names of the submodules. The check replaces attention and MLP by
stand-ins, which also record the arguments they receive.
"""

from __future__ import annotations

import inspect
import types
from typing import NamedTuple

from torch import Tensor, nn

from ligerzoo.integrations.kernels.compare import difference, no_effects, random_like
from ligerzoo.integrations.kernels.forwards import DECORATED, decorated_like, undecorated
from ligerzoo.integrations.kernels.norms import KernelRMSNorm, kernel_add_and_normalize, kernel_normalize
from ligerzoo.integrations.kernels.replace import KernelModule, Options, Recognized, Replacement


class Pattern(NamedTuple):
    """A residual pattern: `x += f(attention(input_layernorm(x))); x += g(mlp(norm(x)))`.

    Attributes:
        norm: the name of the norm before the MLP.
        after_attention: the name of the submodule f, a norm or a dropout, or of a number that multiplies; "" for none.
        after_mlp: likewise of g.
    """

    norm: str = "post_attention_layernorm"
    after_attention: str = ""
    after_mlp: str = ""

    @property
    def children(self) -> frozenset[str]:
        """The names of the submodules of a layer with this pattern."""
        return frozenset({"input_layernorm", "self_attn", "mlp", *self} - {""})


SCALED = Pattern(after_attention="residual_multiplier", after_mlp="residual_multiplier")
"""The pattern of Granite, whose layers multiply both by a number."""

PATTERNS = {
    pattern.children: pattern
    for pattern in (
        Pattern(),
        Pattern(after_attention="resid_attn_dropout", after_mlp="resid_mlp_dropout"),  # Phi-3
        Pattern("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"),  # Gemma 2, 3
        Pattern("post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),  # GLM-4-0414
    )
}
"""The residual pattern of each set of submodules."""


class KernelDecoderLayer(KernelModule):
    """A decoder layer of any residual pattern.

    Attributes:
        kernel_pattern: the pattern.
        kernel_parameters: names of the positional parameters of the original forward, after the hidden states.
        kernel_unused: those that it does not pass to attention.
    """

    kernel_kind = "add + norm"
    kernel_pattern: Pattern
    kernel_parameters: tuple[str, ...]
    kernel_unused: tuple[str, ...]
    input_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module

    @classmethod
    def kernel_members(cls, original: type[nn.Module], options: Options) -> dict[str, object]:
        """Returns the names of the parameters of the original forward, and the forward with its decorators."""
        assert isinstance(cls.forward, types.FunctionType)
        return {
            "kernel_parameters": tuple(parameter.name for parameter in _parameters(original)[1:]),
            "forward": decorated_like(original.forward, cls.forward),
        }

    def forward(self, hidden_states: Tensor, *arguments: object, **named: object) -> Tensor:
        """hidden_states: (B, T, H) -> (B, T, H)."""
        norm, after_attention, after_mlp = self.kernel_pattern
        named = {**dict(zip(self.kernel_parameters, arguments, strict=False)), **named}
        for name in self.kernel_unused:
            named.pop(name, None)
        normalized, hidden_states = kernel_normalize(hidden_states, self.input_layernorm)
        attended = self._followed(self.self_attn(hidden_states=normalized, **named)[0], after_attention)
        normalized, hidden_states = kernel_add_and_normalize(attended, hidden_states, getattr(self, norm))
        output = self.mlp(normalized)
        output = output[0] if isinstance(output, tuple) else output  # a mixture returns router scores too
        return hidden_states + self._followed(output, after_mlp)

    def _followed(self, x: Tensor, by: str) -> Tensor:
        if by == "":
            return x
        after: nn.Module | float = getattr(self, by)
        return after(x) if isinstance(after, nn.Module) else x * after


def _parameters(cls: type[nn.Module]) -> list[inspect.Parameter]:
    """Returns the parameters of the forward of a class, after `self`."""
    return list(inspect.signature(cls.forward).parameters.values())[1:]


def recognize_layer(module: nn.Module) -> Recognized:
    """Recognizes a decoder layer. Its norms must have been replaced before."""
    if not type(module).__name__.endswith("DecoderLayer"):
        return None
    pattern = PATTERNS.get(frozenset(name for name, _ in module.named_children()))
    if pattern is None:
        return "no kernel for its residual pattern"
    if hasattr(module, "residual_multiplier"):
        pattern = SCALED
    if not isinstance(getattr(module, pattern.norm), KernelRMSNorm):
        return f"{pattern.norm} is not a replaced RMS norm"
    if undecorated(type(module).forward) is None:
        return DECORATED
    found = [_recognize_with(module, pattern, _MLP(scores)) for scores in (False, True)]
    return next((each for each in found if isinstance(each, Replacement)), found[0])


class _Attention(nn.Module):
    """Replaces attention in the check, and records its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[dict[str, object]] = []

    def forward(self, *arguments: object, hidden_states: Tensor, **named: object) -> tuple[Tensor, None]:
        self.received.append({"positional": arguments, **named})
        return hidden_states.roll(1, dims=1) * 1.5, None


class _MLP(nn.Module):
    """Replaces an MLP in the check, or a mixture that returns router scores too."""

    def __init__(self, returns_scores: bool) -> None:
        super().__init__()
        self.returns_scores = returns_scores

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, None]:
        output = hidden_states.roll(1, dims=-1) * 0.5
        return (output, None) if self.returns_scores else output


def _recognize_with(module: nn.Module, pattern: Pattern, mlp: _MLP) -> Replacement | str:
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
        options = {"kernel_pattern": pattern, "kernel_unused": unused}
        replacement = Replacement(KernelDecoderLayer, "add_rms_norm", options)
        found = difference(module, replacement, x, **declared, **others)
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
