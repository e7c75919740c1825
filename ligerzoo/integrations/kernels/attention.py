"""Attention modules of transformers' models: the rotation of queries and keys, and optionally attention itself.

The forward of an attention module calls functions of its Python module, such as `apply_rotary_pos_emb`. The forward of
a replaced instance has the same code and decorators, and these names are our functions.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ligerzoo.integrations.kernels.forwards import DECORATED, decorated_like, undecorated, with_globals
from ligerzoo.integrations.kernels.replace import KernelModule, Options, Recognized, Replacement
from ligerzoo.integrations.kernels.rotary import Rotation, cosines_of, recognize_rotation
from ligerzoo.layers import attend

AttentionFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]

TABLE = "ALL_ATTENTION_FUNCTIONS"
"""The global name of transformers' table of attention functions."""

UNSUPPORTED = ("s_aux", "position_bias", "cache", "softcap", "output_attentions", "head_mask")
"""Arguments with which the function of transformers is called."""


class AttentionFunctions:
    """Replaces transformers' table of attention functions in one attention module."""

    def get_interface(self, implementation: str, default: AttentionFunction) -> AttentionFunction:
        """Returns the function of an implementation; for "sdpa" one that calls `attend` where it can."""
        theirs: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, default)
        return partial(_attention, theirs) if implementation == "sdpa" else theirs


def _attention(
    theirs: AttentionFunction,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """query: (B, N, T, D), key and value: (B, K, S, D) -> (B, T, N, D), and None for the weights."""
    tokens, keys = query.shape[2], key.shape[2]
    if (
        dropout
        or query.shape[-1] != value.shape[-1]
        or (attention_mask is None and tokens not in (1, keys))
        or any(options.get(name) is not None and options[name] is not False for name in UNSUPPORTED)
    ):
        return theirs(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attend(q, k, v, attention_mask, scaling, is_causal=is_causal)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        # As in torch's function. The first token after padding on the left is predicted from such a row.
        sees_nothing = ~attention_mask.any(-1).transpose(1, 2)[..., None]
        out = out.masked_fill(sees_nothing, 0)
    return out, None


class KernelAttention(KernelModule):
    """The module's own forward, with the kernel for the rotation.

    Attributes:
        kernel_rotations: the functions that rotate, by their global names.
        kernel_attends: whether attention is replaced too.
    """

    kernel_rotations: tuple[tuple[str, Rotation], ...]
    kernel_attends: bool

    @classmethod
    def kernel_members(cls, original: type[nn.Module], options: Options) -> dict[str, object]:
        """Returns the forward, and the kind of kernel."""
        names: dict[str, object] = {name: rotation.function() for name, rotation in options["kernel_rotations"]}
        if options["kernel_attends"]:
            names[TABLE] = AttentionFunctions()
        forward = undecorated(original.forward)
        assert forward is not None
        return {
            "forward": decorated_like(original.forward, with_globals(forward, names)),
            "kernel_kind": "rope" if options["kernel_rotations"] else "attention",
        }


def recognize_attention(module: nn.Module, model: nn.Module, name: str, rotates: bool, attends: bool) -> Recognized:
    """Recognizes an attention module.

    Args:
        module: the module.
        model: the model around it, whose rotary embeddings are called.
        name: the name of `module` in `model`.
        rotates: replace the rotation.
        attends: replace attention.
    """
    if "Attention" not in type(module).__name__:
        return None
    forward = undecorated(type(module).forward)
    if forward is None:
        return DECORATED
    rotations = _rotations_of(forward, model, name) if rotates else {}
    attends = attends and TABLE in forward.__code__.co_names
    if isinstance(rotations, str):
        if not attends:
            return rotations
        rotations = {}
    if not rotations and not attends:
        return "it does not use transformers' attention functions"
    kernel = " and ".join(["rope"] * bool(rotations) + ["attend"] * attends)
    options = {"kernel_rotations": tuple(rotations.items()), "kernel_attends": attends}
    return Replacement(KernelAttention, kernel, options)


def _rotations_of(forward: types.FunctionType, model: nn.Module, name: str) -> dict[str, Rotation] | str:
    """Returns what each function of a forward that rotates computes, or why it cannot be replaced."""
    found = {key: forward.__globals__.get(key) for key in forward.__code__.co_names if "apply_rot" in key}
    recognized = {key: recognize_rotation(function) for key, function in found.items() if callable(function)}
    if not recognized:
        return "it does not rotate queries and keys"
    rotations = {key: rotation for key, rotation in recognized.items() if rotation is not None}
    if unknown := [key for key in recognized if key not in rotations]:
        return f"no kernel computes its {' and '.join(unknown)}"
    cosines = cosines_of(model, name)
    if not cosines:
        return "no rotary embedding around it could be called"
    for function, rotation in rotations.items():
        if not all(map(rotation.accepts, cosines)):
            return f"{function}: the rotary embedding around it does not repeat angles as the kernel assumes"
    return rotations
