"""Runs a function of rows on a few rows at a time, to limit the memory of its temporary tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", bound=tuple[Tensor, ...])

_ELEMENTS = 2**18
"""Elements of the rows that are processed together."""


def in_row_chunks(function: Callable[..., Result], rows: Tensor, *tensors: Tensor | None) -> Result:
    """Returns `function(rows, *tensors)`, from calls for chunks of rows.

    Args:
        function: returns a named tuple of tensors (R, ...). Its results for a row depend on no other row.
        rows: (R, V).
        tensors: further arguments, (R, ...) or None.
    """
    size = max(1, _ELEMENTS // rows.shape[1])
    if len(rows) <= size:
        return function(rows, *tensors)
    chunks = zip(*(x.split(size) if x is not None else [None] * len(rows) for x in (rows, *tensors)), strict=False)
    results = [function(*chunk) for chunk in chunks]
    return type(results[0])(*map(torch.cat, zip(*results, strict=True)))
