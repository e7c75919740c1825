"""Memory without values, as after `to_empty`: which tensors `init_weights` has left without."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ligerzoo.dtensors import is_dtensor
from ligerzoo.errors import LigerzooError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that have a NaN, which no initialization draws."""


def forget_values(module: nn.Module) -> None:
    """Fills the parameters and buffers that a module itself owns with NaN."""
    with torch.no_grad():
        for _, tensor in _own_tensors(module):
            tensor.fill_(math.nan)


def check_values(name: str, module: nn.Module) -> None:
    """Raises LigerzooError if a parameter or buffer that `forget_values` has filled was not set since."""
    missing = [own for own, tensor in _own_tensors(module) if tensor.isnan().any()]
    if not missing:
        return
    kind, names = type(module).__name__, ", ".join(missing)
    what = f"init_weights of {kind} has not set {names}, which has no values after to_empty or on meta"
    remedy = f"Override init_weights(self, std) in {kind}: call super().init_weights(std), and set {names}."
    raise LigerzooError(what, where=f"{kind} {name!r}", remedy=remedy)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and values of the tensors of a module; of a DTensor, those of this process."""
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if tensor.dtype in _DTYPES and not tensor.is_meta:
            yield name, tensor.to_local() if is_dtensor(tensor) else tensor
