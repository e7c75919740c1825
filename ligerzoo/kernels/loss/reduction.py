"""Checks of targets and weights, and reductions, shared by all losses over tokens.

`name` is the public function, for error messages.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ligerzoo.checks import FINITE, FRACTION, POSITIVE, check, check_optional
from ligerzoo.kernels.autograd import any_true, innermost, requires_gradient
from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.kernels.loss.token_loss import Terms
from ligerzoo.tensor_checks import check_floats, check_num_items, check_optional_floats, kind_of, require_tensor

Reduction = Literal["mean", "sum", "none"]


def check_target(name: str, target: Tensor, tokens: torch.Size) -> None:
    """Raises unless the targets are a tensor of integers of shape `tokens`."""
    check_target_dtype(name, target)
    if target.shape != tokens:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}; expected {tuple(tokens)}, one token id for each token"
        )


def check_target_dtype(name: str, target: Tensor, argument: str = "target") -> None:
    """Raises unless the targets are a tensor of integers."""
    require_tensor(name, argument, target, "a tensor of integers")
    if kind_of(target) != "integer":
        raise ValueError(f"{name}: {argument} has dtype {target.dtype}; expected token ids of an integer dtype")


def as_targets(name: str, target: Tensor, n_classes: int, ignore_index: int, argument: str = "target") -> Tensor:
    """Returns the targets, which messages call `argument`, in int64.

    Raises:
        TypeError: it is not a tensor.
        ValueError: the dtype is not an integer, or a target is neither in [0, n_classes) nor `ignore_index`. On a GPU
            the values are checked only if LIGERZOO_DEBUG=1, because the check is a host sync. Without it, the loss and
            gradient of such a token are NaN.
    """
    check_target_dtype(name, target, argument)
    if (DEBUG or target.device.type == "cpu") and not torch.compiler.is_compiling():
        wrong = (target != ignore_index) & ((target < 0) | (target >= n_classes))
        if any_true(wrong):
            invalid = innermost(torch.where(wrong, target.long(), ignore_index))
            index = (invalid != ignore_index).nonzero()[0].tolist()
            raise ValueError(
                f"{name}: {argument}{index if index else ''} is {int(invalid[tuple(index)])}; "
                f"expected 0 to {n_classes - 1}, or ignore_index={ignore_index}"
            )
    return target.long()


def check_class_weight(name: str, class_weight: Tensor | None, n_classes: int) -> None:
    """Raises unless the class weights are None, or a tensor of shape (V,) that requires no gradient."""
    check_optional_floats(name, class_weight=class_weight)
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
        TypeError: it is not a tensor.
        ValueError: the dtype is not floating-point, or the shape is not the targets'.
    """
    if token_weight is None:
        return None
    check_floats(name, token_weight=token_weight)
    if token_weight.shape != target.shape:
        raise ValueError(
            f"{name}: token_weight has shape {tuple(token_weight.shape)}; "
            f"expected {tuple(target.shape)}, the shape of target"
        )
    return torch.where(target == ignore_index, 0.0, token_weight.to(dtype))


def check_terms(name: str, terms: Terms) -> None:
    """Raises unless scale, softcap, temperature, label smoothing and z-loss are numbers in their ranges."""
    check(name, POSITIVE, temperature=terms.temperature)
    check_optional(name, POSITIVE, softcap=terms.softcap)
    check(name, FRACTION, label_smoothing=terms.label_smoothing)
    check(name, FINITE, logit_scale=terms.scale, z_loss=terms.z_loss)


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
    check_num_items(name, num_items=num_items)
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
