"""What all losses over tokens have in common: their targets, their weights, and how they are reduce_losses.

`name` is the function that an error is about.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.kernels.loss.token_loss import Terms

Reduction = Literal["mean", "sum", "none"]


def check_target(name: str, target: Tensor, tokens: torch.Size) -> None:
    """Raises ValueError for targets of another shape than the tokens', or that are no integers."""
    if target.shape != tokens or target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(
            f"{name}: target {tuple(target.shape)} {target.dtype}; expected {tuple(tokens)}, an integer for each token"
        )


def as_targets(name: str, target: Tensor, n_classes: int, ignore_index: int) -> Tensor:
    """The targets in int64.

    Raises:
        ValueError: they are no integers; or one is neither a class nor the ignored one, where looking costs no wait
            for a GPU. There the check is made only when LIGERZOO_DEBUG=1; without it such a token's loss and gradient
            are NaN.
    """
    check_target(name, target, target.shape)
    if (DEBUG or target.device.type == "cpu") and not torch.compiler.is_compiling():
        wrong = (target != ignore_index) & ((target < 0) | (target >= n_classes))
        if bool(wrong.any()):
            position = tuple(int(i) for i in wrong.nonzero()[0])
            raise ValueError(
                f"{name}: the target at {position} is {int(target[position])}; "
                f"expected 0 to {n_classes - 1}, or {ignore_index} for a token that does not count"
            )
    return target.long()


def check_class_weight(name: str, class_weight: Tensor | None, n_classes: int) -> None:
    """Raises ValueError for class weights of another shape than (V,), or that want a gradient."""
    if class_weight is not None and (class_weight.shape != (n_classes,) or class_weight.requires_grad):
        raise ValueError(
            f"{name}: class_weight has shape {tuple(class_weight.shape)} and requires_grad="
            f"{class_weight.requires_grad}; expected {(n_classes,)}, a constant"
        )


def as_token_weight(
    name: str, token_weight: Tensor | None, target: Tensor, ignore_index: int, dtype: torch.dtype
) -> Tensor | None:  # fmt: skip
    """The tokens' weights in the losses' dtype, 0 for those that do not count, whatever theirs were; ValueError for
    another shape than the targets'."""
    if token_weight is None:
        return None
    if token_weight.shape != target.shape:
        raise ValueError(
            f"{name}: token_weight has shape {tuple(token_weight.shape)}; expected the targets', {tuple(target.shape)}"
        )
    return torch.where(target == ignore_index, 0.0, token_weight.to(dtype))


def check_terms(name: str, terms: Terms) -> None:
    """Raises ValueError for numbers that would give no loss."""
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
    """What the sum of the tokens' weighted losses, of that dtype, is divided by, as `cross_entropy` says: never 0, so
    that no valid token gives 0. None if they are not to be summed.

    Raises:
        ValueError: the reduction is unknown or has no use for `num_items`, or that is no number above 0.
    """
    is_no_number = isinstance(num_items, Tensor) and num_items.dim() > 0
    if is_no_number or (isinstance(num_items, int | float) and num_items <= 0):
        raise ValueError(f"{name}: num_items={num_items!r}; expected a number above 0, or a 0-d tensor of one")
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
                known = torch.where(valid, target, 0).clamp(0, class_weight.shape[0] - 1)  # of others the loss is NaN
                weights = weights * class_weight[known].to(dtype)
            if token_weight is not None:
                weights = weights * token_weight
            total = weights.sum()
            return torch.where(total == 0, 1.0, total)
    raise ValueError(
        f"{name}: reduction={reduction!r} with num_items={num_items!r}; "
        f'expected "mean", "sum" or "none", and num_items only with "mean"'
    )


def reduce_losses(losses: Tensor, divisor: int | Tensor | None) -> Tensor:
    """The sum of the tokens' losses over the `denominator`; the losses themselves if there is none."""
    return losses if divisor is None else losses.sum() / divisor
