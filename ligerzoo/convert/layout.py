"""Weight layouts: how the tensors stored in a checkpoint map to the parameters of a model, as data.

A layout is a tuple of rules. A rule maps each parameter to slices of stored tensors:

    parameters[slice.name][slice.index] = stored[slice.stored_name][slice.stored_index]

possibly transposed. Loading copies from right to left (`stored_tensors.assemble`), saving from left to right
(`stored_tensors.StoredTensors`). A rule finds parameters by a dotted path in their names ("self_attn.q_proj" is part of
"model.layers.3.self_attn.q_proj.bias"), so one rule covers the weights and biases of all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from ligerzoo.convert.tensor_slices import Shape, TensorSlice


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


def _contains(name: str, path: str) -> bool:
    return f".{path}." in f".{name}."


def _replace_path(name: str, old: str, new: str) -> str:
    """Replaces the first occurrence of a dotted path in a name."""
    return f".{name}.".replace(f".{old}.", f".{new}.", 1).strip(".")
