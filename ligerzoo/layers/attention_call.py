"""The arguments of a computation of attention, in the notation of `attention_paths`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.layers.documents import Documents
from ligerzoo.layers.masks import AttentionMask, as_additive


class AttentionCall(NamedTuple):
    """The arguments of `attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask | Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    is_causal: bool = True
    sinks: Tensor | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the queries are on a CPU."""
        return self.q.is_cpu

    @property
    def scores(self) -> int:
        """T * S."""
        return self.q.shape[1] * self.k.shape[1]

    @property
    def documents(self) -> Documents | None:
        """The documents of a `CausalMask`, if the host knows them."""
        return getattr(self.mask, "documents", None)

    @property
    def is_differentiable(self) -> bool:
        """Whether backward may follow."""
        tensors = self.q, self.k, self.v, self.sinks
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    @property
    def masks_future(self) -> bool:
        """Whether a kernel must mask later tokens."""
        if self.q.shape[1] == 1:  # an `if`, since torch.compile would leave a comparison of the length symbolic
            return False
        return self.is_causal and self.mask is None

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """Returns the matrix to add to scores of `dtype`; None for no mask."""
        return as_additive(self.mask, dtype)
