"""Checks of targets and weights, and reductions, shared by all losses over tokens.

`name` is the public function, for error messages.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import any_true, innermost, requires_gradient
from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.kernels.loss.token_loss import Terms

Reduction = Literal["mean", "sum", "none"]


def check_target(name: str, target: Tensor, tokens: torch.Size) -> None:
    """Raises ValueError unless the targets are integers of shape `tokens`."""
    if target.shape != tokens or target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)} and dtype {target.dtype}; "
            f"expected shape {tuple(tokens)} and an integer dtype"
        )


def as_targets(name: str, target: Tensor, n_classes: int, ignore_index: int) -> Tensor:
    """Returns the targets in int64.

    Raises:
        ValueError: the dtype is not an integer, or a target is neither in [0, n_classes) nor `ignore_index`. On a GPU
            the values are checked only if LIGERZOO_DEBUG=1, because the check is a host sync. Without it, the loss and
            gradient of such a token are NaN.
    """
    check_target(name, target, target.shape)
    if (DEBUG or target.device.type == "cpu") and not torch.compiler.is_compiling():
        wrong = (target != ignore_index) & ((target < 0) | (target >= n_classes))
        if any_true(wrong):
            invalid = innermost(torch.where(wrong, target.long(), ignore_index))
            position = tuple(int(i) for i in (invalid != ignore_index).nonzero()[0])
            raise ValueError(
                f"{name}: the target at {position} is {int(invalid[position])}; "
                f"expected 0 to {n_classes - 1}, or ignore_index={ignore_index}"
            )
    return target.long()


def check_class_weight(name: str, class_weight: Tensor | None, n_classes: int) -> None:
    """Raises ValueError unless the class weights are None or have shape (V,) and require no gradient."""
    if class_weight is not None and (class_weight.shape != (n_classes,) or requires_gradient(class_weight)):
        raise ValueError(
            f"{name}: class_weight has shape {tuple(class_weight.shape)} and requires_grad="
            f"{requires_gradient(class_weight)}; expected shape {(n_classes,)} and requires_grad=False"
        )


def as_token_weight(
    name: str, token_weight: Tensor | None, target: Tensor, ignore_index: int, dtype: torch.dtype
) -> Tensor | None:  # fmt: skip
    """Returns the token weights in the losses' dtype, 0 for ignored tokens.

    Raises:
        ValueError: the shape is not the targets'.
    """
    if token_weight is None:
        return None
    if token_weight.shape != target.shape:
        raise ValueError(
            f"{name}: token_weight has shape {tuple(token_weight.shape)}; "
            f"expected {tuple(target.shape)}, the shape of target"
        )
    return torch.where(target == ignore_index, 0.0, token_weight.to(dtype))


def check_terms(name: str, terms: Terms) -> None:
    """Raises ValueError for a temperature, softcap or label smoothing out of range."""
    for what, number, fits, expected in (
        ("temperature", terms.temperature, terms.temperature > 0, "more than 0"),
        ("softcap", terms.softcap, terms.softcap is None or terms.softcap > 0, "more than 0, or None"),
        ("label_smoothing", terms.label_smoothing, 0 <= terms.label_smoothing <= 1, "0 to 1"),
    ):
        if not fits:
            raise ValueError(f"{name}: {what}={number}; expected {expected}")


def denominator(
    name: str,
    dtype: torch.dtype,
    target: Tensor,
    reduction: Reduction,
    ignore_index: int,
    num_items: int | Tensor | None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
) -> int | Tensor | None:
    """Returns the divisor of the summed, weighted token losses, as in `cross_entropy`; None for reduction="none".

    It is never 0: without a valid token the loss is 0.

    Args:
        name: the public function.
        dtype: the dtype of the losses.
        target: (...) int64.
        reduction: "mean", "sum" or "none".
        ignore_index: the target of an ignored token.
        num_items: with "mean", the divisor.
        class_weight: (V,), or None.
        token_weight: (...), or None.

    Raises:
        ValueError: the reduction is unknown, `num_items` is given for another reduction than "mean", or it is not
            positive.
    """
    has_dimensions = isinstance(num_items, Tensor) and num_items.dim() > 0
    if has_dimensions or (isinstance(num_items, int | float) and num_items <= 0):
        raise ValueError(f"{name}: num_items={num_items!r}; expected a positive number or a 0-d tensor")
    match reduction:
        case "none" if num_items is None:
            return None
        case "sum" if num_items is None:
            return 1
        case "mean" if num_items is not None:
            return num_items.to(dtype) if isinstance(num_items, Tensor) else num_items
        case "mean":
            valid = target != ignore_index
            if class_weight is None and token_weight is None:
                return valid.sum().clamp(min=1)
            weights = valid.to(dtype)
            if class_weight is not None:
                classes = torch.where(valid, target, 0).clamp(0, class_weight.shape[0] - 1)  # others have a NaN loss
                weights = weights * class_weight[classes].to(dtype)
            if token_weight is not None:
                weights = weights * token_weight
            total = weights.sum()
            return torch.where(total == 0, torch.inf, total)  # without any weight, the mean and its gradients are 0
    raise ValueError(
        f"{name}: reduction={reduction!r} with num_items={num_items!r}; "
        f'expected "mean", "sum" or "none", and num_items only with "mean"'
    )


def reduce_losses(losses: Tensor, divisor: int | Tensor | None) -> Tensor:
    """Returns the sum of the losses divided by the `denominator`; the losses themselves if that is None."""
    return losses if divisor is None else losses.sum() / divisor
