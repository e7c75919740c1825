"""Attention modules of transformers' models: the rotation of queries and keys, and optionally attention itself.

The forward of an attention module calls functions of its Python module, such as `apply_rotary_pos_emb`. The forward of
a replaced instance has the same code and decorators, and these names are our functions.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ligerzoo.integrations.kernels.attend import AttentionFunctions
from ligerzoo.integrations.kernels.forwards import DECORATED, decorated_like, undecorated, with_globals
from ligerzoo.integrations.kernels.replace import KernelModule, Replacement
from ligerzoo.integrations.kernels.rotary import Rotation, cosines_of, recognize_rotation

TABLE = "ALL_ATTENTION_FUNCTIONS"
"""The global name of transformers' table of attention functions."""


class KernelAttention(KernelModule):
    """The module's own forward, with the kernel for the rotation."""

    @classmethod
    def kernel_members(cls, original: type[nn.Module], **options: Any) -> dict[str, Any]:
        """Returns the forward, and the kind of kernel.

        Args:
            original: the class of the module.
            options: `kernel_rotations`: pairs of a global name and a `Rotation`; `kernel_attends`: whether attention
                is replaced too.
        """
        names: dict[str, Any] = {name: rotation.function() for name, rotation in options["kernel_rotations"]}
        if options["kernel_attends"]:
            names[TABLE] = AttentionFunctions()
        forward = undecorated(original.forward)
        assert forward is not None
        return {
            "forward": decorated_like(original.forward, with_globals(forward, names)),
            "kernel_kind": "rope" if options["kernel_rotations"] else "attention",
        }


def recognize_attention(
    module: nn.Module, model: nn.Module, name: str, rotates: bool, attends: bool
) -> Replacement | str | None:
    """Returns the replacement of an attention module, or why it has none; None for other modules.

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
    reasons = []
    rotations: tuple[tuple[str, Rotation], ...] = ()
    if rotates:
        found = dict(_rotating_functions(forward))
        if found:
            recognized = {key: recognize_rotation(function) for key, function in found.items()}
            reason = _reason_not_to_rotate(recognized, model, name)
            if reason is None:
                rotations = tuple((key, rotation) for key, rotation in recognized.items() if rotation is not None)
            else:
                reasons.append(reason)
        else:
            reasons.append("it does not rotate queries and keys")
    attends = attends and TABLE in forward.__code__.co_names
    if not rotations and not attends:
        return "; ".join(reasons) or "it does not use transformers' attention functions"
    kernel = " and ".join([*(["rope"] if rotations else []), *(["attend"] if attends else [])])
    return Replacement(KernelAttention, kernel, {"kernel_rotations": rotations, "kernel_attends": attends})


def _rotating_functions(forward: types.FunctionType) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if "apply_rot" in name and callable(function):
            yield name, function


def _reason_not_to_rotate(recognized: dict[str, Rotation | None], model: nn.Module, name: str) -> str | None:
    unknown = [function for function, rotation in recognized.items() if rotation is None]
    if unknown:
        return f"no kernel computes its {' and '.join(unknown)}"
    cosines = cosines_of(model, name)
    if not cosines:
        return "no rotary embedding around it could be called"
    for function, rotation in recognized.items():
        assert rotation is not None
        if not all(rotation.accepts(cos) for cos in cosines):
            return f"{function}: the rotary embedding around it does not repeat angles as the kernel assumes"
    return None
