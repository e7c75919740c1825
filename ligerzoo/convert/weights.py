"""Weight layouts: how the tensors stored in a checkpoint map to the parameters of a model, as data.

A layout is a tuple of rules. A rule maps each parameter to slices of stored tensors:

    parameters[slice.name][slice.index] = stored[slice.stored_name][slice.stored_index]

possibly transposed. copies from right to left (`assemble`), saving from left to right (`StoredTensors`). A rule finds
parameters by a dotted path in their names ("self_attn.q_proj" is part of "model.layers.3.self_attn.q_proj.bias"), so
one rule covers the weights and biases of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ligerzoo.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Maps a slice of a stored tensor to a slice of a parameter.

    In a layout, at least one of the two slices is a whole tensor, or both are rows; see also `within`.

    Attributes:
        stored_name: name of the stored tensor.
        stored_shape: shape of the whole stored tensor.
        name: name of the parameter.
        stored_index: index into the stored tensor, with steps of 1 or more; () selects all of it.
        index: index into the parameter; () selects all of it.
        transposed: the last two dimensions of the stored tensor are swapped.
    """

    stored_name: str
    stored_shape: Shape
    name: str
    stored_index: tuple[slice, ...] = ()
    index: tuple[int | slice, ...] = ()
    transposed: bool = False

    def select(self, stored: Tensor) -> Tensor:
        """Returns a view of the slice of the stored tensor, with the dimensions of the parameter."""
        selected = stored[self.stored_index]
        return selected.mT if self.transposed else selected

    @property
    def is_copy(self) -> bool:
        """Whether the parameter is the whole stored tensor, in the same layout."""
        return not (self.stored_index or self.index or self.transposed)


@runtime_checkable
class Rule(Protocol):
    """One rule of a layout."""

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        """Returns the slices that make up a parameter, or None if the rule doesn't apply to it.

        Args:
            name: name of the parameter.
            shapes: shapes of all parameters, by name.
        """
        ...


@dataclass(frozen=True)
class Rename:
    """A tensor or module with another name in the checkpoint. Rules may swap names: each parameter is renamed once.

    Attributes:
        stored_path: dotted path in the checkpoint.
        path: dotted path in the model.
    """

    stored_path: str
    path: str

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        if not _contains(name, self.path):
            return None
        return [TensorSlice(_replace_path(name, self.path, self.stored_path), shapes[name], name)]


@dataclass(frozen=True)
class Fused:
    """One stored tensor that concatenates several parameters along dimension 0, such as fused q, k and v.

    Attributes:
        stored_path: dotted path in the checkpoint.
        paths: dotted paths of the parameters, in the order of their rows.
    """

    stored_path: str
    paths: tuple[str, ...]

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        position = next((i for i, path in enumerate(self.paths) if _contains(name, path)), None)
        if position is None:
            return None
        path = self.paths[position]
        parts = [_replace_path(name, path, other) for other in self.paths]
        if not all(part in shapes for part in parts):  # only some parts have this parameter, such as an added bias
            return None
        rows = [shapes[part][0] for part in parts]
        first, last = sum(rows[:position]), sum(rows[: position + 1])
        stored_name, stored_shape = _replace_path(name, path, self.stored_path), (sum(rows), *shapes[name][1:])
        return [TensorSlice(stored_name, stored_shape, name, stored_index=(slice(first, last),))]


@dataclass(frozen=True)
class PerExpert:
    """One or more stored tensors per expert that form one parameter of shape (experts, rows, ...).

    Attributes:
        stored_paths: dotted paths in the checkpoint, with "{expert}" for the expert's index. Several paths have equal
            numbers of rows, and the parameter concatenates them in this order.
        path: dotted path of the parameter.
    """

    stored_paths: tuple[str, ...]
    path: str

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        return self._slices_per_expert(name, shapes[name]) if _contains(name, self.path) else None

    def _slices_per_expert(self, name: str, shape: Shape) -> Iterator[TensorSlice]:
        """Yields slices one at a time, because a malicious config.json may set any number of experts."""
        experts, all_rows, *rest = shape
        rows = all_rows // len(self.stored_paths)
        for expert in range(experts):
            for i, path in enumerate(self.stored_paths):
                stored_name = _replace_path(name, self.path, path.format(expert=expert))
                index = (expert, slice(i * rows, (i + 1) * rows))
                yield TensorSlice(stored_name, (rows, *rest), name, index=index)


@dataclass(frozen=True)
class FusedByHead:
    """One stored tensor that concatenates the rows of several parameters head by head, as Qwen3-Next's `in_proj_qkvz`.

    Attributes:
        stored_path: dotted path in the checkpoint.
        parts: for each part of a head's rows, in order: dotted path of the parameter, rows of the part in each head,
            and row of the parameter with which the part of the first head begins.
        heads: number of heads.
    """

    stored_path: str
    parts: tuple[tuple[str, int, int], ...]
    heads: int

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        path = self.path_in(name)
        return None if path is None else self._slices_by_head(name, path, shapes[name])

    def path_in(self, name: str) -> str | None:
        """Returns the path of the part that a parameter is; None for other parameters."""
        return next((path for path, *_ in self.parts if _contains(name, path)), None)

    def _slices_by_head(self, name: str, path: str, shape: Shape) -> Iterator[TensorSlice]:
        """Yields slices one at a time, because a malicious config.json may set any number of heads."""
        head_rows = sum(rows for _, rows, _ in self.parts)
        stored_name = _replace_path(name, path, self.stored_path)
        stored_shape = (self.heads * head_rows, *shape[1:])
        for head in range(self.heads):
            stored_first = head * head_rows
            for part_path, rows, first in self.parts:
                if part_path == path:
                    stored_index = (slice(stored_first, stored_first + rows),)
                    index = (slice(first + head * rows, first + (head + 1) * rows),)
                    yield TensorSlice(stored_name, stored_shape, name, stored_index, index)
                stored_first += rows


@dataclass(frozen=True)
class Interleaved:
    """Stacked gate and up projections whose outputs alternate in the checkpoint; the parameter has the gate's first.

    Attributes:
        path: dotted path of the parameter, a stack of matrices (experts, 2I, H) or of biases (experts, 2I).
        transposed: matrices are stored as (experts, H, 2I).
    """

    path: str
    transposed: bool = False

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        if not _contains(name, self.path):
            return None
        experts, outputs, *inputs = shapes[name]
        is_transposed = self.transposed and bool(inputs)
        stored_shape = (experts, *inputs, outputs) if is_transposed else (experts, outputs, *inputs)
        parts = []
        for first, rows in enumerate((slice(0, outputs // 2), slice(outputs // 2, outputs))):
            stored_index = [slice(0, experts), slice(first, outputs, 2), *(slice(0, size) for size in inputs)]
            if is_transposed:
                stored_index[1:] = reversed(stored_index[1:])
            index = (slice(0, experts), rows)
            parts.append(TensorSlice(name, stored_shape, name, tuple(stored_index), index, is_transposed))
        return parts


@dataclass(frozen=True)
class Transposed:
    """Stacked matrices that are stored transposed, for products `x @ W`.

    Attributes:
        path: dotted path of the parameter.
    """

    path: str

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        if not _contains(name, self.path):
            return None
        *stack, rows, columns = shapes[name]
        return [TensorSlice(name, (*stack, columns, rows), name, transposed=True)]


@dataclass(frozen=True)
class ModuleRules:
    """Rules that apply to one part of the model only, such as the vision tower.

    Attributes:
        prefix: beginning of the names of the part's parameters.
        rules: rules for these parameters.
    """

    prefix: str
    rules: tuple[Rule, ...]

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        return _first_match(self.rules, name, shapes) if name.startswith(self.prefix) else None


@dataclass(frozen=True)
class Layout:
    """Names and shapes of an architecture's tensors in a checkpoint.

    Attributes:
        rules: the first rule that applies to a parameter is used. Without one the stored name is the parameter's name.
        prefixes: pairs (prefix in the model, prefix in the checkpoint). They are replaced after the rules.
    """

    rules: tuple[Rule, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()

    def with_prefix(self, prefix: str, stored_prefix: str) -> Layout:
        """Returns this layout with another stored prefix for one part of the model."""
        return self if prefix == stored_prefix else replace(self, prefixes=(*self.prefixes, (prefix, stored_prefix)))

    def slices(self, shapes: Mapping[str, Shape]) -> Iterator[TensorSlice]:
        """Yields the slices of all parameters."""
        for name in shapes:
            yield from self.slices_of(name, shapes)

    def slices_of(self, name: str, shapes: Mapping[str, Shape]) -> Iterator[TensorSlice]:
        """Yields the slices of one parameter. `shapes` holds the shapes of all parameters."""
        slices = _first_match(self.rules, name, shapes)
        for part in [TensorSlice(name, shapes[name], name)] if slices is None else slices:
            yield replace(part, stored_name=self._with_stored_prefix(part.stored_name)) if self.prefixes else part

    def _with_stored_prefix(self, name: str) -> str:
        names = (stored + name.removeprefix(prefix) for prefix, stored in self.prefixes if name.startswith(prefix))
        return next(names, name)


def _first_match(rules: Iterable[Rule], name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
    return next((slices for rule in rules if (slices := rule.slices(name, shapes)) is not None), None)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Returns the shapes of tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class Box:
    """A box of elements of a tensor, such as the shard that one process holds.

    Attributes:
        offset: index of its first element in each dimension.
        shape: its size in each dimension.
    """

    offset: Shape
    shape: Shape


def within(part: TensorSlice, box: Box) -> TensorSlice | None:
    """Restricts a slice to a box of the parameter; None if they have no element in common.

    Args:
        part: a slice of the whole parameter.
        box: as many dimensions as the parameter.

    Returns:
        A slice whose `index` is relative to the box.
    """
    stored_slices = [
        part.stored_index[i] if i < len(part.stored_index) else slice(None) for i in range(len(part.stored_shape))
    ]
    sources = [range(size)[chosen] for size, chosen in zip(part.stored_shape, stored_slices, strict=True)]
    if part.transposed:
        sources[-2:] = reversed(sources[-2:])
    remaining = iter(sources)
    stored_index: list[slice] = []
    index: list[int | slice] = []
    for dimension, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        chosen = part.index[dimension] if dimension < len(part.index) else slice(None)
        if isinstance(chosen, int):
            if not offset <= chosen < offset + size:
                return None
            index.append(chosen - offset)
            continue
        source = next(remaining)
        start = chosen.start or 0
        begin, end = max(start, offset), min(start + len(source), offset + size)
        if begin >= end:
            return None
        own = source[begin - start : end - start]
        stored_index.append(slice(own.start, own.stop, own.step))
        index.append(slice(begin - offset, end - offset))
    if part.transposed:
        stored_index[-2:] = reversed(stored_index[-2:])
    is_whole = all(chosen == slice(0, size) for chosen, size in zip(index, box.shape, strict=True))
    return replace(part, stored_index=tuple(stored_index), index=() if is_whole else tuple(index))


def matrices_of(part: TensorSlice) -> Iterator[TensorSlice]:
    """Yields the slices of the single matrices in a slice of a stack of matrices, as `within` returns it."""
    stack, *rest = part.stored_index
    if len(rest) < 2:
        yield part
        return
    first, *others = part.index or (slice(0, stack.stop - stack.start),)
    assert isinstance(first, slice)
    for i in range(stack.stop - stack.start):
        stored_index = (slice(stack.start + i, stack.start + i + 1), *rest)
        yield replace(part, stored_index=stored_index, index=(slice(first.start + i, first.start + i + 1), *others))


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
            raise ConfigError(
                "the weight layout is not one to one", where="layout", got=f"{stored} stored elements",
                expected=f"{elements}, those of the model", remedy="Two parameters may have the same stored name.",
            )  # fmt: skip

    def parameter(self, name: str) -> Tensor:
        """Returns a parameter. Subclasses may create it at each access."""
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


def _contains(name: str, path: str) -> bool:
    return f".{path}." in f".{name}."


def _replace_path(name: str, old: str, new: str) -> str:
    """Replaces the first occurrence of a dotted path in a name."""
    return f".{name}.".replace(f".{old}.", f".{new}.", 1).strip(".")
