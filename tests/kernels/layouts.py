"""Memory layouts. Each function keeps the shape and values of a tensor; expanded ones repeat some values."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def offset(t: Tensor) -> Tensor:
    """Starts one element into its storage, so that vector loads are not aligned."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def sliced(t: Tensor) -> Tensor:
    """Every second element of every dimension of a larger tensor."""
    view = t.new_zeros([2 * n for n in t.shape])[(slice(1, None, 2),) * t.dim()]
    return view.copy_(t)


def padded(t: Tensor) -> Tensor:
    """The middle of longer rows."""
    return F.pad(t, (2, 3))[..., 2:-3] if t.dim() else t


def transposed(t: Tensor) -> Tensor:
    """Stores the dimensions in reverse order."""
    backwards = tuple(range(t.dim()))[::-1]
    return t.permute(backwards).contiguous().permute(backwards)


def swapped(t: Tensor) -> Tensor:
    """Stores (A, B, ...) as (B, A, ...), the layout of attention's queries."""
    return t if t.dim() < 3 else t.transpose(0, 1).contiguous().transpose(0, 1)


def repeated_rows(t: Tensor) -> Tensor:
    """One entry of the first dimension, expanded over it."""
    return t[:1].expand_as(t) if t.dim() else t


def constant(t: Tensor) -> Tensor:
    """One number expanded over all dimensions, like the gradient of a sum."""
    return t.flatten()[:1].view((1,) * t.dim()).expand_as(t)


LAYOUTS = [offset, sliced, padded, transposed, swapped, repeated_rows, constant]


def laid_out(inputs: Sequence[Tensor], layout: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Leaves with the values of `inputs` in the given layout."""
    return [layout(t.detach()).requires_grad_(t.requires_grad) for t in inputs]
