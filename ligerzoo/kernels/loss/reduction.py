"""Checks of targets and weights, and reductions, shared by all losses over tokens.

`name` is the public function, for error messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ligerzoo.checks import FINITE, FRACTION, POSITIVE, POSITIVE_OR_NONE, check
from ligerzoo.errors import LigerzooError
from ligerzoo.foreign_names import our_name
from ligerzoo.kernels.autograd import any_true, innermost, requires_gradient
from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.kernels.loss.token_loss import Terms, TokenStatistics, token_statistics_from
from ligerzoo.tensor_checks import check_num_items, check_optional_floats, kind_of, require_tensor

Reduction = Literal["mean", "sum", "none"]


HIDDEN_FIRST = "The hidden states come first: (hidden, weight, target), not (weight, hidden, target)"
"""Remedy for arguments in the order of other libraries."""


def check_target(name: str, target: Tensor, tokens: torch.Size) -> None:
    """Raises unless the targets are a tensor of integers of shape `tokens`."""
    check_target_dtype(name, target)
    if target.shape != tokens:
        expected = f"{tuple(tokens)}, one token id for each token"
        raise LigerzooError(f"target has shape {tuple(target.shape)}", where=name, expected=expected)


def check_target_dtype(name: str, target: Tensor) -> None:
    """Raises unless the targets are a tensor of integers."""
    require_tensor(name, "target", target, "a tensor of integers")
    if kind_of(target) != "integer":
        expected = "token ids of an integer dtype"
        raise LigerzooError(f"target has dtype {target.dtype}", where=name, expected=expected)


def as_targets(name: str, target: Tensor, n_classes: int, ignore_index: int, argument: str = "target") -> Tensor:
    """Returns the targets, integers that messages call `argument`, in int64.

    Raises:
        ValueError: a target is neither in [0, n_classes) nor `ignore_index`. On a GPU the values are checked only if
            LIGERZOO_DEBUG=1, because the check is a host sync. Without it, the loss and gradient of such a token are
            NaN.
    """
    if (DEBUG or target.device.type == "cpu") and not torch.compiler.is_compiling():
        wrong = (target != ignore_index) & ((target < 0) | (target >= n_classes))
        if any_true(wrong):
            invalid = innermost(torch.where(wrong, target.long(), ignore_index))
            index = (invalid != ignore_index).nonzero()[0].tolist()
            what = f"{argument}{index if index else ''} is {int(invalid[tuple(index)])}"
            expected = f"0 to {n_classes - 1}, or ignore_index={ignore_index}"
            raise LigerzooError(what, where=name, expected=expected)
    return target.long()


def check_terms(name: str, terms: Terms) -> None:
    """Raises unless scale, softcap, temperature, label smoothing and z-loss are numbers in their ranges."""
    check(name, POSITIVE, temperature=terms.temperature)
    check(name, POSITIVE_OR_NONE, softcap=terms.softcap)
    check(name, FRACTION, label_smoothing=terms.label_smoothing)
    check(name, FINITE, logit_scale=terms.scale, z_loss=terms.z_loss)


class TokenReduction(NamedTuple):
    """How a loss follows from the losses of its tokens.

    Attributes:
        target: (...) int64.
        ignore_index: the target of an ignored token.
        token_weight: (...), in the losses' dtype and 0 at ignored tokens; None for 1.
        divisor: of the sum of the weighted losses; None for losses per token.
    """

    target: Tensor
    ignore_index: int
    token_weight: Tensor | None
    divisor: int | Tensor | None

    def loss(self, losses: Tensor) -> Tensor:
        """Returns the loss, from those of the flattened tokens."""
        losses = losses.view(self.target.shape)
        return reduce_losses(losses if self.token_weight is None else losses * self.token_weight, self.divisor)

    def statistics(self, results: Sequence[Tensor]) -> TokenStatistics:
        """Returns the statistics of the tokens, detached, from their `RowResults`."""
        return token_statistics_from([t.detach() for t in results], self.target, self.ignore_index)


def token_reduction(
    name: str,
    target: Tensor,
    n_classes: int,
    dtype: torch.dtype,
    terms: Terms,
    reduction: Reduction,
    num_items: int | Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
) -> TokenReduction:
    """Returns the reduction of a cross entropy.

    Args:
        name: the public function.
        target: (...) int64, each in [0, V) or ignored.
        n_classes: V.
        dtype: the dtype of the losses.
        terms: the transform and the loss.
        reduction, num_items, class_weight, token_weight: see `cross_entropy`.

    Raises:
        ValueError: a weight or the reduction is invalid.
    """
    check_optional_floats(name, class_weight=class_weight, token_weight=token_weight)
    if class_weight is not None and (class_weight.shape != (n_classes,) or requires_gradient(class_weight)):
        given = f"shape {tuple(class_weight.shape)} and requires_grad={requires_gradient(class_weight)}"
        expected = f"shape {(n_classes,)} and requires_grad=False"
        raise LigerzooError(f"class_weight has {given}", where=name, expected=expected)
    ignore_index = terms.ignore_index
    if token_weight is not None:
        if token_weight.shape != target.shape:
            what, expected = (
                f"token_weight has shape {tuple(token_weight.shape)}",
                f"{tuple(target.shape)}, the shape of target",
            )
            raise LigerzooError(what, where=name, expected=expected)
        token_weight = torch.where(target == ignore_index, 0.0, token_weight.to(dtype))
    divisor = denominator(name, dtype, target, reduction, ignore_index, num_items, class_weight, token_weight)
    return TokenReduction(target, ignore_index, token_weight, divisor)


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
    what, expected = (
        f"reduction={reduction!r} with num_items={num_items!r}",
        '"mean", "sum" or "none", and num_items only',
    )
    raise LigerzooError(what, where=name, expected=f'{expected} with "mean"', remedy=our_name(reduction))


def reduce_losses(losses: Tensor, divisor: int | Tensor | None) -> Tensor:
    """Returns the sum of the losses divided by the `denominator`; the losses themselves if that is None."""
    return losses if divisor is None else losses.sum() / divisor
