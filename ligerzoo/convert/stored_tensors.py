"""Parameters built from the tensors of a checkpoint (`assemble`), and the other way round (`StoredTensors`)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce

import torch
from torch import Tensor

from ligerzoo.convert.tensor_slices import Shape, TensorSlice
from ligerzoo.errors import ConfigError


def assemble(
    slices: Iterable[TensorSlice],
    shapes: Mapping[str, Shape],
    read: Callable[[TensorSlice], Tensor],
    *,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> dict[str, Tensor]:
    """Builds parameters from stored tensors, one slice at a time.

    A parameter with one slice is the tensor that `read` returns, without a copy if it has the right dtype. A parameter
    with several slices is allocated once and filled.

    Args:
        slices: every slice of every parameter to build.
        shapes: shapes of the parameters, by name.
        read: returns the part of the stored tensor that a slice selects (`TensorSlice.select`), on the device.
        dtypes: dtypes of the parameters, by name.
        device: device of the parameters.
    """
    tensors: dict[str, Tensor] = {}
    for part in slices:
        value = read(part)
        if not part.index:
            tensors[part.name] = value.to(dtypes[part.name]).contiguous()
            continue
        if part.name not in tensors:
            tensors[part.name] = torch.empty(shapes[part.name], dtype=dtypes[part.name], device=device)
        tensors[part.name][part.index] = value
    return tensors


class StoredTensors(Mapping[str, Tensor]):
    """A model's tensors as the checkpoint stores them.

    Returns views where possible. A tensor that several slices make up is rebuilt at each access.

    Args:
        slices: every slice of every parameter.
        tensors: parameters, by name.

    Raises:
        ConfigError: The layout does not map parameters and stored tensors one to one.
    """

    def __init__(self, slices: Iterable[TensorSlice], tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._slices: dict[str, list[TensorSlice]] = {}
        for part in slices:
            self._slices.setdefault(part.stored_name, []).append(part)
        for parts in self._slices.values():
            parts.sort(key=lambda part: [rows.start for rows in part.stored_index])
        stored = sum(math.prod(parts[0].stored_shape) for parts in self._slices.values())
        elements = sum(tensor.numel() for tensor in tensors.values())
        if stored != elements:
            what, remedy = "the weight layout is not one to one", "Two parameters may have the same stored name."
            got, expected = f"{stored} stored elements", f"{elements}, those of the model"
            raise ConfigError(what, where="layout", got=got, expected=expected, remedy=remedy)

    def parameter(self, name: str) -> Tensor:
        """Returns a parameter."""
        return self._tensors[name]

    def meta(self) -> dict[str, Tensor]:
        """Returns meta tensors with the shapes and dtypes, by stored name, without access to a parameter."""
        dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        return {
            stored_name: torch.empty(
                parts[0].stored_shape,
                dtype=reduce(torch.promote_types, (dtypes[part.name] for part in parts)),  # as torch.cat does
                device="meta",
            )
            for stored_name, parts in self._slices.items()
        }

    def __getitem__(self, stored_name: str) -> Tensor:
        parts = self._slices[stored_name]
        values = [self.parameter(part.name)[part.index] for part in parts]
        values = [value.mT if part.transposed else value for part, value in zip(parts, values, strict=True)]
        if len(parts) == 1:
            return values[0]
        if all(len(part.stored_index) == 1 for part in parts):  # rows
            return torch.cat(values)
        stored = values[0].new_empty(parts[0].stored_shape)
        for part, value in zip(parts, values, strict=True):
            stored[part.stored_index] = value
        return stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)


class ComputedTensors(StoredTensors):
    """Stored tensors of parameters that are computed when they are accessed; see `StoredTensors`.

    Keeps the last parameter: experts are many stored tensors of one, which follow each other.
    """

    _last: tuple[str, Tensor] | None = None

    def compute(self, name: str) -> Tensor:
        """Returns a parameter."""
        raise NotImplementedError

    def parameter(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # frees the memory before the next one is computed
            self._last = name, self.compute(name)
        return self._last[1]
