"""Checks of the tensors of a loss. `name` is the function that error messages name."""

from __future__ import annotations

from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.loss.reduction import HIDDEN_FIRST, check_target_dtype
from ligerzoo.losses.options import LossInputs
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor

Shape = tuple[int, ...]


def check_inputs(inputs: LossInputs, **tensors: Tensor | None) -> None:
    """Raises unless the tensors have the types, dtypes and devices that a loss needs. Logits include a bias.

    Args:
        inputs: hidden states or logits, weight and target.
        tensors: floating-point tensors on the same device, such as `bias`, or None.
    """
    name, hidden, weight, target = inputs
    check_floats(name, hidden=hidden)
    check_target_dtype(name, target)
    check_optional_floats(name, weight=weight, **tensors)
    for argument, tensor in {"weight": weight, "target": target, **tensors}.items():
        if tensor is not None and tensor.device != hidden.device:
            what = f"{argument} is on {tensor.device}"
            raise LigerzooError(what, where=name, expected=f"{hidden.device}, as hidden")
    if weight is None and tensors.get("bias") is not None:
        what = f"weight=None with logits {tuple(hidden.shape)} {hidden.dtype} and bias=(a tensor)"
        raise LigerzooError(what, where=name, expected="floating-point logits (B, T, V) and bias=None")


def check_sequences(inputs: LossInputs, bias: Tensor | None) -> None:
    """Raises as `check_inputs`, and unless hidden states or logits are (B, T, ...) and targets (B, T)."""
    check_inputs(inputs, bias=bias)
    name, hidden, weight, target = inputs
    if hidden.dim() != 3 or hidden.shape[:2] != target.shape:
        remedy = HIDDEN_FIRST if weight is not None and weight.dim() == 3 else None
        what = f"got hidden {tuple(hidden.shape)} and target {tuple(target.shape)}"
        raise LigerzooError(what, where=name, expected="(B, T, H) and (B, T)", remedy=remedy)


def check_constants(inputs: LossInputs, **constants: tuple[Tensor | None, Shape]) -> None:
    """Raises unless each constant is None, or a floating-point tensor of its shape on the device of `hidden`."""
    for argument, (tensor, shape) in constants.items():
        if tensor is not None:
            check_tensor(inputs.name, argument, tensor, shapes=[shape], device=inputs.hidden.device)


def check_both_or_neither(name: str, reason: str, **numbers: int | Tensor | None) -> None:
    """Raises if some of the numbers are None and others are not."""
    if len({number is None for number in numbers.values()}) > 1:
        given = " and ".join(f"{argument}={number!r}" for argument, number in numbers.items())
        raise LigerzooError(given, where=name, expected=f"both or neither: {reason}")
