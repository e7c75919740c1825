"""The transform of a model's logits: a scale, then a softcap (Gemma 2).

    x = a z,   or  x = c tanh(a z / c)  with a softcap c;
    dx/dz = a, or  a (1 - tanh(a z / c)^2).

`math.softcapped` is the same for kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Transform(NamedTuple):
    """The scale a and the softcap c of logits; a softcap of None does not bound them."""

    scale: float = 1.0
    softcap: float | None = None

    def arguments(self) -> tuple[float | None, float | None]:
        """Returns `scale` and `softcap` as kernel arguments; None for a step that the kernel leaves out."""
        return None if self.scale == 1.0 else self.scale, self.softcap


def transformed(logits: Tensor, transform: Transform, temperature: float = 1.0) -> tuple[Tensor, Tensor | float]:
    """Returns x / temperature and its derivative in plain torch, in the dtype of `logits`."""
    scale, softcap = transform
    slope = scale / temperature
    if softcap is None:
        return (logits if slope == 1.0 else logits * slope), slope
    t = torch.tanh(logits * (scale / softcap))
    return t * (softcap / temperature), (1 - t * t) * slope
