"""Weight layouts: how the tensors stored in a checkpoint map to the parameters of a model, as data.

A layout is a tuple of rules. A `SliceRule` maps each parameter to slices of stored tensors:

    parameters[slice.name][slice.index] = stored[slice.stored_name][slice.stored_index]

possibly transposed. Loading copies from right to left (`stored_tensors.assemble`), saving from left to right
(`stored_tensors.StoredTensors`). A rule finds parameters by a dotted path in their names ("self_attn.q_proj" is part of
"model.layers.3.self_attn.q_proj.bias"), so one rule covers the weights and biases of all layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ligerzoo.convert.tensor_slices import Shape, TensorSlice


class Rule:
    """One rule of a layout: a `SliceRule`, a `Rename`, or `ModuleRules`."""

    def rules_for(self, name: str) -> Iterator[Rule]:
        """Yields the rules for a parameter: this one."""
        yield self

    def in_wrapper(self, is_own: bool) -> tuple[Rule, ...]:
        """Returns the rules for our modules under the names of transformers, see `Architecture.wrapper_layout`.

        Args:
            is_own: the rule is part of the layout of a user's own class.
        """
        return ()


class SliceRule(Rule, ABC):
    """A rule that maps a parameter to slices of stored tensors."""

    @abstractmethod
    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        """Returns the slices that make up a parameter that the rule finds, or None if it doesn't apply to it.

        Args:
            name: name of the parameter.
            shapes: shapes of all parameters, by name.
        """

    @abstractmethod
    def path_in(self, name: str) -> str | None:
        """Returns the dotted path by which the rule finds a parameter; None if it is not in the name."""

    def replaced_path(self, name: str) -> str | None:
        """Returns the path that the rule replaces, so that no `Rename` does; None if it keeps the name."""
        return self.path_in(name)


class _PathRule(SliceRule):
    """A rule that finds parameters by one path."""

    path: str

    def path_in(self, name: str) -> str | None:
        return self.path if _contains(name, self.path) else None


class _InPlaceRule(_PathRule):
    """A rule that keeps names. In the wrapper, our parameters differ from transformers', and so do their names."""

    suffix: str

    def replaced_path(self, name: str) -> None:
        return None

    def in_wrapper(self, is_own: bool) -> tuple[Rule, ...]:
        return (Rename(f"{self.path}_{self.suffix}", self.path),)


@dataclass(frozen=True)
class Rename(Rule):
    """A tensor or module with another name in the checkpoint. Rules may swap names: each parameter is renamed once.

    Attributes:
        stored_path: dotted path in the checkpoint.
        path: dotted path in the model.
    """

    stored_path: str
    path: str

    def in_wrapper(self, is_own: bool) -> tuple[Rule, ...]:
        is_elsewhere = self.path.count(".") != self.stored_path.count(".")  # a router's bias, in another module
        return () if is_own or is_elsewhere else (self,)


@dataclass(frozen=True)
class Fused(SliceRule):
    """One stored tensor that concatenates several parameters along dimension 0, such as fused q, k and v.

    Attributes:
        stored_path: dotted path in the checkpoint.
        paths: dotted paths of the parameters, in the order of their rows.
    """

    stored_path: str
    paths: tuple[str, ...]

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        path = next(path for path in self.paths if _contains(name, path))
        position = self.paths.index(path)
        parts = [_replace_path(name, path, other) for other in self.paths]
        if not all(part in shapes for part in parts):  # only some parts have this parameter, such as an added bias
            return None
        rows = [shapes[part][0] for part in parts]
        first, last = sum(rows[:position]), sum(rows[: position + 1])
        stored_name, stored_shape = _replace_path(name, path, self.stored_path), (sum(rows), *shapes[name][1:])
        return [TensorSlice(stored_name, stored_shape, name, stored_index=(slice(first, last),))]

    def path_in(self, name: str) -> str | None:
        return next((path for path in self.paths if _contains(name, path)), None)

    def in_wrapper(self, is_own: bool) -> tuple[Rule, ...]:
        return (self,)


@dataclass(frozen=True)
class PerExpert(_PathRule):
    """One or more stored tensors per expert that form one parameter of shape (experts, rows, ...).

    Attributes:
        stored_paths: dotted paths in the checkpoint, with "{expert}" for the expert's index. Several paths have equal
            numbers of rows, and the parameter concatenates them in this order.
        path: dotted path of the parameter.
    """

    stored_paths: tuple[str, ...]
    path: str

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterator[TensorSlice]:
        """Yields slices one at a time, because a malicious config.json may set any number of experts."""
        experts, all_rows, *rest = shapes[name]
        rows = all_rows // len(self.stored_paths)
        for expert in range(experts):
            for i, path in enumerate(self.stored_paths):
                stored_name = _replace_path(name, self.path, path.format(expert=expert))
                index = (expert, slice(i * rows, (i + 1) * rows))
                yield TensorSlice(stored_name, (rows, *rest), name, index=index)


@dataclass(frozen=True)
class Cut(_PathRule):
    """Several stored tensors that hold the rows of one parameter, such as the convolutions of q, k and v.

    Attributes:
        stored_paths: dotted paths in the checkpoint, in the order of their rows.
        path: dotted path of the parameter.
        rows: number of rows of each stored tensor.
    """

    stored_paths: tuple[str, ...]
    path: str
    rows: tuple[int, ...]

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterator[TensorSlice]:
        first = 0
        for path, rows in zip(self.stored_paths, self.rows, strict=True):
            stored_name, stored_shape = _replace_path(name, self.path, path), (rows, *shapes[name][1:])
            yield TensorSlice(stored_name, stored_shape, name, index=(slice(first, first + rows),))
            first += rows


@dataclass(frozen=True)
class FusedByHead(SliceRule):
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

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterator[TensorSlice]:
        """Yields slices one at a time, because a malicious config.json may set any number of heads."""
        path = next(path for path, *_ in self.parts if _contains(name, path))
        head_rows = sum(rows for _, rows, _ in self.parts)
        stored_name = _replace_path(name, path, self.stored_path)
        stored_shape = (self.heads * head_rows, *shapes[name][1:])
        for head in range(self.heads):
            stored_first = head * head_rows
            for part_path, rows, first in self.parts:
                if part_path == path:
                    stored_index = (slice(stored_first, stored_first + rows),)
                    index = (slice(first + head * rows, first + (head + 1) * rows),)
                    yield TensorSlice(stored_name, stored_shape, name, stored_index, index)
                stored_first += rows

    def path_in(self, name: str) -> str | None:
        return next((path for path, *_ in self.parts if _contains(name, path)), None)


@dataclass(frozen=True)
class Interleaved(_InPlaceRule):
    """Stacked gate and up projections whose outputs alternate in the checkpoint; the parameter has the gate's first.

    Attributes:
        path: dotted path of the parameter, a stack of matrices (experts, 2I, H) or of biases (experts, 2I).
        transposed: matrices are stored as (experts, H, 2I).
    """

    suffix = "split"
    path: str
    transposed: bool = False

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
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
class Transposed(_InPlaceRule):
    """Stacked matrices that are stored transposed, for products `x @ W`.

    Attributes:
        path: dotted path of the parameter.
    """

    suffix = "transposed"
    path: str

    def slices(self, name: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        *stack, rows, columns = shapes[name]
        return [TensorSlice(name, (*stack, columns, rows), name, transposed=True)]


@dataclass(frozen=True)
class ModuleRules(Rule):
    """Rules that apply to one part of the model only, such as the vision tower.

    Attributes:
        prefix: beginning of the names of the part's parameters.
        rules: rules for these parameters.
    """

    prefix: str
    rules: tuple[Rule, ...]

    def rules_for(self, name: str) -> Iterator[Rule]:
        return _rules_for(name, self.rules if name.startswith(self.prefix) else ())

    def in_wrapper(self, is_own: bool) -> tuple[Rule, ...]:
        return (self,)


@dataclass(frozen=True)
class Layout:
    """Names and shapes of an architecture's tensors in a checkpoint.

    Of the rules that find a parameter, the first that is not a `Rename` decides its slices. Then each `Rename` renames
    its path in what no earlier rule has renamed: `Rename("transformer.h", "model.layers")` and `Rename("ln_1",
    "input_layernorm")` both rename model.layers.0.input_layernorm.weight. A name that a rule gives is not renamed
    again, so rules may swap names. Without a rule the stored name is the parameter's name.

    Attributes:
        rules: the rules, in the order in which they apply.
        prefixes: for parts of the model: the prefix of its parameters, and the possible prefixes in checkpoints, of
            which the first applies. They are replaced after the rules. By default a checkpoint of the bare decoder
            (`LlamaModel`) may lack "model.".
        is_own: the layout of a user's own class, in which a rule without effect is an error.
    """

    rules: tuple[Rule, ...] = ()
    prefixes: tuple[tuple[str, ...], ...] = (("model.", "model.", ""),)
    is_own: bool = False

    def with_prefix(self, prefix: str, stored_prefix: str) -> Layout:
        """Returns this layout with one possible stored prefix for one part of the model."""
        chosen = tuple((prefix, stored_prefix) if entry[0] == prefix else entry for entry in self.prefixes)
        return replace(self, prefixes=chosen)

    def without_experts(self) -> Layout:
        """Returns this layout with stacked experts."""
        return replace(self, rules=tuple(rule for rule in self.rules if not isinstance(rule, PerExpert)))

    def slices(self, shapes: Mapping[str, Shape]) -> Iterator[TensorSlice]:
        """Yields the slices of all parameters."""
        for name in shapes:
            yield from self.slices_of(name, shapes)

    def slices_of(self, name: str, shapes: Mapping[str, Shape]) -> Iterator[TensorSlice]:
        """Yields the slices of one parameter. `shapes` holds the shapes of all parameters."""
        rules = list(_rules_for(name, self.rules))
        renames = [rule for rule in rules if isinstance(rule, Rename)]
        others = [rule for rule in rules if isinstance(rule, SliceRule) and rule.path_in(name) is not None]
        found = ((r.replaced_path(name), slices) for r in others if (slices := r.slices(name, shapes)) is not None)
        path, slices = next(found, (None, [TensorSlice(name, shapes[name], name)]))
        before, after = (name, "") if path is None else _around(name, path)
        new_before, new_after = _renamed(before, renames), _renamed(after, renames)
        for part in slices:
            middle = part.stored_name.removeprefix(before).removesuffix(after).strip(".")
            stored_name = _joined(new_before, middle, new_after)
            yield replace(part, stored_name=self._with_stored_prefix(stored_name))

    def unused_rules(self, shapes: Mapping[str, Shape]) -> list[Rule]:
        """Returns the rules without which all parameters have the same slices."""

        def firsts(layout: Layout) -> list[TensorSlice]:
            return [next(layout.slices_of(name, shapes)) for name in shapes]

        others = [replace(self, rules=(*self.rules[:i], *self.rules[i + 1 :])) for i in range(len(self.rules))]
        return [rule for rule, other in zip(self.rules, others, strict=True) if firsts(other) == firsts(self)]

    def _with_stored_prefix(self, name: str) -> str:
        names = (stored + name.removeprefix(prefix) for prefix, stored, *_ in self.prefixes if name.startswith(prefix))
        return next(names, name)


def _rules_for(name: str, rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yields the rules for a parameter, with those of the modules that contain it."""
    return (rule for each in rules for rule in each.rules_for(name))


def _renamed(name: str, renames: Sequence[Rename]) -> str:
    """Applies to a part of a name the first rule that finds it, and the others to what is before and after its path."""
    rule = next((rule for rule in renames if _contains(name, rule.path)), None)
    if rule is None:
        return name
    others = [other for other in renames if other is not rule]
    before, after = _around(name, rule.path)
    return _joined(_renamed(before, others), rule.stored_path, _renamed(after, others))


def _around(name: str, path: str) -> tuple[str, str]:
    """Returns the parts of a name before and after a dotted path, without dots at the ends."""
    start = f".{name}.".index(f".{path}.")
    return name[:start].strip("."), name[start + len(path) :].strip(".")


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _contains(name: str, path: str) -> bool:
    return f".{path}." in f".{name}."


def _replace_path(name: str, old: str, new: str) -> str:
    """Replaces the first occurrence of a dotted path in a name."""
    return f".{name}.".replace(f".{old}.", f".{new}.", 1).strip(".")
