"""How the tokens of rows are divided over processes: not at all, unless `parallel.context_parallel` divides them.

Layers that do not mix tokens compute those of their process. A layer that mixes tokens exchanges heads for tokens: it
computes all tokens of the rows for some of its heads, and returns its own tokens with all heads:

    q, k, v = context.parts.to_heads(q, k, v)
    out = context.parts.to_tokens(attention(q, k, v, context.whole.mask(k.shape[1])), heads)

So masks, documents and kernels are those of one process. A layer that mixes tokens has `exchanged_heads`: heads that n
must divide, or 0 if it need not.

Shapes: B batch, T tokens of a row, n processes, c tokens of each, T / n rounded up; N heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result")


class RowParts:
    """Whole rows in one process.

    Attributes:
        count: n.
    """

    count: int = 1

    def of(self, tokens: int) -> RowParts:
        """Returns the parts of rows of this number of tokens."""
        return self

    def own(self, x: Tensor, dim: int = 1, fill: int = 0) -> Tensor:
        """Returns the tokens of this process, (B, T, ...) -> (B, c, ...).

        Args:
            x: equal in all processes.
            dim: dimension of the tokens.
            fill: value after the last token of the rows, where n * c is more than T.
        """
        return x

    def share(self, x: Tensor) -> Tensor:
        """Returns x, equal in all processes, of which each uses what its tokens need.

        Its gradient is that of all tokens, or the processes average their gradients.
        """
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Returns the tokens of all processes, (B, c, ...) -> (B, T, ...).

        All processes must compute the same with the result, and average their gradients.
        """
        return x

    def loss(
        self, head: Callable[..., Tensor], hidden: Tensor, target: Tensor, num_items: int | Tensor | None
    ) -> Tensor:
        """Returns `head(hidden, target, num_items)`, the loss of all tokens, from those of this process.

        Args:
            head: such as `LMHead`.
            hidden: (B, c, H).
            target: (B, T), already shifted.
            num_items: divisor of the summed loss; None for the number of targets that are not -100.
        """
        return head(hidden, target, num_items)

    def objective(
        self,
        head: Callable[..., Result],
        hidden: Tensor,
        target: Tensor,
        num_items: int | Tensor | None,
        objective: Callable[..., object],
    ) -> Result:
        """Returns `head(hidden, target, num_items, objective)` of whole rows, from the tokens of this process.

        Args:
            head: see `loss`, and so `hidden`, `target` and `num_items`.
            objective: computes a loss of hidden states, such as one of `ligerzoo.losses`.
        """
        return head(hidden, target, num_items, objective)

    def to_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Exchanges tokens for heads, such as of queries, keys and values: (B, c, N, D) -> (B, T, N / n, D) each.

        Heads that are too few, such as those of keys, are repeated as for grouped queries. Heads of zeros follow the
        last one, where n does not divide N.

        Args:
            parts: of one dtype.
        """
        return parts

    def to_tokens(self, x: Tensor, heads: int) -> Tensor:
        """Exchanges heads for tokens: (B, T, N / n, ...) -> (B, c, N, ...), N = `heads`."""
        return x

    def own_heads(self, weight: Tensor) -> Tensor:
        """Returns the heads of this process of a weight, (N, ...) -> (N / n, ...), with zeros beyond N."""
        return weight


WHOLE_ROWS = RowParts()
