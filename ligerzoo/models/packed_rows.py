"""Packs the tokens of padded rows into one row, so that nothing is computed for padding."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedRows(NamedTuple):
    """How the tokens of padded rows are packed into one row without padding.

    Attributes:
        shape: B, T.
        tokens: (n,) indices among all B * T of the tokens that are not padding; None if the rows are not packed.
        cu_seqlens: (B + 1,) boundaries of the rows in the packed one, on the CPU; None if the rows are not packed.
    """

    shape: torch.Size
    tokens: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @classmethod
    def of(cls, is_token: Tensor) -> PackedRows:
        """From a padding mask, (B, T) bool, False for padding; reads its values on the host."""
        tokens = is_token.flatten().nonzero()[:, 0]
        return cls(is_token.shape, tokens, F.pad(is_token.sum(1).cumsum(0), (1, 0)).cpu())

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (1, n, ...)."""
        return x if self.tokens is None else x.flatten(0, 1)[self.tokens.to(x.device)][None]

    def unpack(self, x: Tensor) -> Tensor:
        """(1, n, F) -> (B, T, F), with zeros for padding."""
        if self.tokens is None:
            return x
        padded = x.new_zeros(self.shape.numel(), x.shape[-1])
        padded[self.tokens] = x[0]
        return padded.view(*self.shape, -1)
