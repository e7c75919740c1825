"""Layers with a state in place of keys and values: what they do with padding, packed rows and caches.

Shapes: B batch, T tokens in the call, H hidden features, C channels of a convolution, k its kernel size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers.context import Context
from ligerzoo.layers.documents import Documents
from ligerzoo.layers.exactness import Obstacle, never_exact
from ligerzoo.layers.projection import check_features
from ligerzoo.layers.row_parts import RowParts
from ligerzoo.layers.state_cache import RecurrentLayerCache, StaticRecurrentLayerCache


class RecurrentMixer(nn.Module, ABC):
    """Base class of layers in which a token sees a state of the earlier tokens, such as `GatedDeltaNet`.

    The state of a text begins with its first token: padding, and the other segments of a packed row, have no effect.

    Attributes:
        hidden_size: H.
    """

    hidden_size: int

    def forward(self, x: Tensor, context: Context, cache: RecurrentLayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H); 0 for padding.

        Args:
            x: the hidden states of T new tokens.
            context: padding and segments of these tokens.
            cache: the states after the earlier tokens; they are updated.

        Raises:
            ValueError: the context has a 4-D attention mask, which a recurrence cannot apply; or padding within a text,
                in rows that several processes divide.
        """
        check_features(self, x, self.hidden_size)
        context.require_padding_mask(type(self).__name__)
        mask = None if context.segment_start is not None else context.call_padding_mask()
        if mask is None:
            return self.mix(x, context.segment_start, None, cache, context.parts)
        if context.parts.count > 1:
            out = self.mix(
                x, _segments_of_padding(mask, context.documents, type(self).__name__), None, cache, context.parts
            )
            return out.masked_fill(~context.parts.own(mask.expand(len(x), -1))[..., None], 0.0)
        order = tokens_first(mask.expand(x.shape[:2]))
        return order.undo(self.mix(order.apply(x), None, order.lengths, cache, context.parts))

    @abstractmethod
    def mix(
        self,
        x: Tensor,
        segment_start: Tensor | None,
        lengths: Tensor | None,
        cache: RecurrentLayerCache | None,
        parts: RowParts,
    ) -> Tensor:
        """x: (B, T, H) -> (B, T, H).

        Args:
            x: the hidden states.
            segment_start: see `Context`.
            lengths: (B,) int64, tokens of each row, which come first; None for T.
            cache: see `forward`.
            parts: the tokens that x has.
        """

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """See `Attention.exact_obstacles`."""
        yield never_exact(self)

    def new_cache(self, capacity: int | None = None) -> RecurrentLayerCache:
        """Returns an empty cache: of fixed size if `capacity` is given."""
        return RecurrentLayerCache() if capacity is None else StaticRecurrentLayerCache(capacity)


def _segments_of_padding(mask: Tensor, documents: Documents | None, layer: str) -> Tensor:
    """Returns the first token of each token's text, or padding, (B or 1, T) int64, of a padding mask, (B or 1, T)."""
    if documents is None or documents.rows is None:
        raise ValueError(
            f"attention_mask: got padding within a text; expected it at the ends of rows, for {layer} with "
            "context parallelism in eager mode. Pack texts with cu_seqlens or position_ids"
        )
    is_start = F.pad(mask[:, 1:] != mask[:, :-1], (1, 0), value=False)
    return (torch.arange(mask.shape[1], device=mask.device) * is_start).cummax(1).values


def last_inputs(x: Tensor, before: Tensor | None, lengths: Tensor, count: int) -> Tensor:
    """Returns the last inputs of each row, (B, count, C).

    Args:
        x: (B, T, C) inputs, of which the first `lengths`, (B,), count.
        before: (B, count, C) inputs before them; None for zeros.
        lengths: (B,) int64.
        count: k - 1.
    """
    before = x.new_zeros(len(x), count, x.shape[2]) if before is None else before
    index = lengths[:, None] + torch.arange(count, device=x.device)  # into the inputs with those before them
    rows = torch.arange(len(x), device=x.device)[:, None]
    earlier, new = before[rows, index.clamp(max=count - 1)], x[rows, (index - count).clamp(min=0)]
    return torch.where((index < count)[..., None], earlier, new)


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
