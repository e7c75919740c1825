"""Checks that the losses share: tensors, variants, options that a variant does not use, and misspelt names.

In all checks, `name` is the loss that error messages name: the function or module that the user called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ligerzoo.checks import check, one_of
from ligerzoo.errors import WrongTypeError, did_you_mean
from ligerzoo.kernels.loss.reduction import check_target_dtype
from ligerzoo.losses.names import choice_hint, option_hint
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor, describe, kind_of

Shape = tuple[int, ...]


def check_tensors(
    name: str, hidden: Tensor, weight: Tensor | None, target: Tensor, bias: Tensor | None
) -> None:  # fmt: skip
    """Raises unless the inputs of a head have the types, dtypes, devices and shapes that a loss needs.

    Args:
        name: the loss that messages name.
        hidden: (B, T, H) hidden states, or (B, T, V) logits.
        weight: (V, H), or None for logits.
        target: (B, T) integers.
        bias: (V,), or None.
    """
    check_floats(name, hidden=hidden)
    check_target_dtype(name, target)
    check_optional_floats(name, weight=weight, bias=bias)
    if hidden.dim() != 3 or hidden.shape[:2] != target.shape:
        raise ValueError(
            f"{name}: got hidden {tuple(hidden.shape)} and target {tuple(target.shape)}; expected (B, T, H) and (B, T)"
        )
    check_devices(name, hidden, weight=weight, target=target, bias=bias)


def check_devices(name: str, hidden: Tensor, **tensors: Tensor | None) -> None:
    """Raises ValueError unless the tensors that are not None are on the device of `hidden`."""
    for argument, tensor in tensors.items():
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: {argument} is on {tensor.device}; expected {hidden.device}, as hidden")


def check_constants(name: str, hidden: Tensor, **constants: tuple[Tensor | None, Shape]) -> None:
    """Raises unless each input is None, or a floating-point tensor of its shape on the device of `hidden`."""
    for argument, (tensor, shape) in constants.items():
        if tensor is not None:
            check_tensor(name, argument, tensor, shapes=[shape], device=hidden.device)


def check_logits(name: str, logits: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError for logits that are not floating-point, or for a bias, which given logits must include."""
    if kind_of(logits) != "floating-point" or bias is not None:
        raise ValueError(
            f"{name}: weight=None with logits {tuple(logits.shape)} {logits.dtype} and "
            f"bias={None if bias is None else '(a tensor)'}; expected floating-point logits (B, T, V) and bias=None"
        )


def check_both_or_neither(name: str, reason: str, **numbers: int | Tensor | None) -> None:
    """Raises ValueError if some of the numbers are None and others are not."""
    if len({number is None for number in numbers.values()}) > 1:
        given = " and ".join(f"{argument}={number!r}" for argument, number in numbers.items())
        raise ValueError(f"{name}: {given}; expected both or neither: {reason}")


def check_choice(name: str, choices: Collection[str], **arguments: object) -> None:
    """Raises ValueError for an argument, such as a variant, that is not among the choices."""
    for argument, choice in arguments.items():
        check(name, one_of(choices), choice_hint(choice).removeprefix(". ") or None, **{argument: choice})


def check_unused(name: str, choice: str, defaults: Mapping[str, object], **unused: object) -> None:
    """Raises ValueError if an option that the choice, such as variant='sapo', does not use differs from its default."""
    for option, value in unused.items():
        if value != defaults[option]:
            raise ValueError(f"{name}: {option}={value!r} with {choice}, which does not use it; leave out {option}")


def unknown_option(name: str, option: str, value: Any, names: Collection[str], remedy: str = "") -> WrongTypeError:
    """Returns the error about an unknown option, with our name for it or the nearest known one."""
    hint = option_hint(option, value).removeprefix(". ") or did_you_mean(option, names) or remedy.removeprefix(". ")
    what = f"unknown option {option}={describe(value)}"
    return WrongTypeError(what, where=name, expected=f"an option of {name}", remedy=hint or None)
