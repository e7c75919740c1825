"""The tokens of an objective over several processes, which each compute its loss as a whole.

Under context parallelism every process of a group has the hidden states of whole rows. Log-probabilities of tokens,
which cost most of a loss, are computed by parts: each process has 1 / n of them, and gathers those of the others.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor


class TokenParts(Protocol):
    """A division of tokens, in the order of the processes; see `ligerzoo.layers.row_parts.RowParts`."""

    @property
    def count(self) -> int: ...
    def of(self, tokens: int) -> TokenParts: ...
    def own(self, x: Tensor, dim: int = 1, fill: int = 0) -> Tensor: ...
    def gather(self, x: Tensor) -> Tensor: ...


objective_parts: ContextVar[TokenParts | None] = ContextVar("objective_parts", default=None)
"""Set while a model whose rows are divided calls an objective."""


def divided_tokens(tokens: int) -> TokenParts | None:
    """Returns how the processes divide the tokens of the objective that runs; None if one computes all of them."""
    parts = None if torch.compiler.is_compiling() else objective_parts.get()
    return None if parts is None else parts.of(tokens)
