"""Moves the tokens of padded rows together, for layers that read a row from its start, such as recurrences."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenOrder(NamedTuple):
    """An order of the positions of each row in which its tokens come first, padding last.

    Attributes:
        lengths: (B,) int64, number of tokens in each row.
        mask: (B, T) bool, False for padding, in the original order.
        sources: (B * T,) int64, the original positions in the new order, in all rows.
        targets: (B * T,) int64, the new positions in the original order.
    """

    lengths: Tensor
    mask: Tensor
    sources: Tensor
    targets: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Moves the tokens of each row to its start, (B, T, H) -> (B, T, H)."""
        return x.flatten(0, 1).index_select(0, self.sources).view_as(x)

    def undo(self, x: Tensor) -> Tensor:
        """Moves tokens back to where they were, (B, T, H) -> (B, T, H), with zeros at padding."""
        return x.flatten(0, 1).index_select(0, self.targets).view_as(x).masked_fill(~self.mask[..., None], 0.0)


def tokens_first(mask: Tensor) -> TokenOrder:
    """Returns the order in which the tokens of each row come first.

    Args:
        mask: (B, T) bool, False for padding, anywhere in the row.
    """
    rows, tokens = mask.shape
    order = mask.logical_not().byte().argsort(stable=True, dim=1)
    first = tokens * order.new_ones(rows).cumsum(0).sub(1)[:, None]  # index of the first position of each row
    return TokenOrder(mask.sum(1), mask, (order + first).flatten(), (order.argsort(1) + first).flatten())
