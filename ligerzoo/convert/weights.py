"""Weight tables: how the tensors of a checkpoint relate to ours, as data. Loading and saving both come from the table.

A table is a tuple of rules, and a rule tells of which pieces one of our tensors is made:

    ours[piece.our_index] = theirs[piece.their_index]

Loading runs the pieces forwards (`assemble`), saving backwards (`DiskTensors`). Rules know a tensor by a dotted path in
its name ("self_attn.q_proj" is in "model.layers.3.self_attn.q_proj.bias"): one rule serves all layers, weight and bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a tensor on disk that is a part of one of ours. It is all of the one or all of the other.

    Attributes:
        theirs: name of the tensor on disk.
        their_shape: of all of it.
        ours: name of our tensor.
        their_index: the part of theirs; () is all of it.
        our_index: the part of ours; () is all of it.
    """

    theirs: str
    their_shape: Shape
    ours: str
    their_index: tuple[slice, ...] = ()
    our_index: tuple[int | slice, ...] = ()


class Rule(Protocol):
    """A line of a weight table."""

    def pieces(self, ours: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        """The pieces of one of our tensors, or None if the rule is not about it.

        Args:
            ours: its name.
            shapes: of all our tensors.
        """
        ...


@dataclass(frozen=True)
class Rename:
    """A tensor or module that has another name on disk. Names may be swapped: each of ours is renamed once."""

    theirs: str
    ours: str

    def pieces(self, ours: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        if not _holds(ours, self.ours):
            return None
        return [TensorSlice(_replaced(ours, self.ours, self.theirs), shapes[ours], ours)]


@dataclass(frozen=True)
class Fused:
    """One tensor on disk whose rows are those of several of ours, one after the other."""

    theirs: str
    ours: tuple[str, ...]

    def pieces(self, ours: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        place = next((place for place, path in enumerate(self.ours) if _holds(ours, path)), None)
        if place is None:
            return None
        path = self.ours[place]
        parts = [_replaced(ours, path, other) for other in self.ours]
        if not all(part in shapes for part in parts):  # such as a bias that only one of them has been given
            return None
        rows = [shapes[part][0] for part in parts]
        first, last = sum(rows[:place]), sum(rows[: place + 1])
        theirs, shape = _replaced(ours, path, self.theirs), (sum(rows), *shapes[ours][1:])
        return [TensorSlice(theirs, shape, ours, their_index=(slice(first, last),))]


@dataclass(frozen=True)
class PerExpert:
    """Tensors of each expert on disk that are stacked in one of ours, [experts, rows, ...].

    Attributes:
        theirs: with "{expert}" for its number; the rows of several are of one number, and one after the other in ours.
        ours: the stack.
    """

    theirs: tuple[str, ...]
    ours: str

    def pieces(self, ours: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        return self._of_each_expert(ours, shapes[ours]) if _holds(ours, self.ours) else None

    def _of_each_expert(self, ours: str, shape: Shape) -> Iterator[TensorSlice]:
        """One by one, for config.json may speak of any number of experts."""
        experts, all_rows, *rest = shape
        rows = all_rows // len(self.theirs)
        for expert in range(experts):
            for place, path in enumerate(self.theirs):
                theirs = _replaced(ours, self.ours, path.format(expert=expert))
                index = (expert, slice(place * rows, (place + 1) * rows))
                yield TensorSlice(theirs, (rows, *rest), ours, our_index=index)


@dataclass(frozen=True)
class Under:
    """Rules for one part of the model, whose modules are called as those of another.

    Attributes:
        prefix: what the part's names begin with.
        rules: the part's own table.
    """

    prefix: str
    rules: tuple[Rule, ...]

    def pieces(self, ours: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
        return _pieces_by(self.rules, ours, shapes) if ours.startswith(self.prefix) else None


@dataclass(frozen=True)
class Layout:
    """One way in which an architecture's tensors stand on disk.

    Attributes:
        rules: the table. The first rule about a tensor holds for it; without one it has our name.
        prefixes: what stands at the beginning of names, where that is not ours: (ours, theirs) for each part.
    """

    rules: tuple[Rule, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()

    def with_prefix(self, ours: str, theirs: str) -> Layout:
        """The same with another beginning of one part's names."""
        return self if ours == theirs else replace(self, prefixes=(*self.prefixes, (ours, theirs)))

    def pieces(self, shapes: Mapping[str, Shape]) -> Iterator[TensorSlice]:
        """The pieces of all our tensors, each told when it is asked for."""
        for ours in shapes:
            yield from self.pieces_of(ours, shapes)

    def pieces_of(self, ours: str, shapes: Mapping[str, Shape]) -> Iterator[TensorSlice]:
        """The pieces of one of our tensors; `shapes` are those of all."""
        pieces = _pieces_by(self.rules, ours, shapes)
        for piece in [TensorSlice(ours, shapes[ours], ours)] if pieces is None else pieces:
            yield replace(piece, theirs=self._prefixed(piece.theirs)) if self.prefixes else piece

    def _prefixed(self, name: str) -> str:
        found = (theirs + name.removeprefix(ours) for ours, theirs in self.prefixes if name.startswith(ours))
        return next(found, name)


def _pieces_by(rules: Iterable[Rule], ours: str, shapes: Mapping[str, Shape]) -> Iterable[TensorSlice] | None:
    """The pieces of one of our tensors by the first rule that is about it, if there is one."""
    return next((pieces for rule in rules if (pieces := rule.pieces(ours, shapes)) is not None), None)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Names to shapes, which is what a layout must know of our tensors."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def assemble(
    pieces: Iterable[TensorSlice],
    shapes: Mapping[str, Shape],
    read: Callable[[TensorSlice], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Our tensors from those on disk, one piece at a time.

    A tensor of one piece stays what `read` gives, where that has the dtype. One of several is made once and filled.

    Args:
        pieces: all of every tensor that is wanted.
        shapes: of our tensors.
        read: the part of the tensor on disk that a piece tells, on the device.
        dtype: of our tensors.
        device: of our tensors.
    """
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        part = read(piece)
        if not piece.our_index:
            tensors[piece.ours] = part.to(dtype)
            continue
        if piece.ours not in tensors:
            tensors[piece.ours] = torch.empty(shapes[piece.ours], dtype=dtype, device=device)
        tensors[piece.ours][piece.our_index] = part
    return tensors


class DiskTensors(Mapping[str, Tensor]):
    """The tensors on disk from ours: views where there is nothing to fuse; what is fused is made anew at each access.

    Args:
        pieces: all of every tensor.
        tensors: ours.
    """

    def __init__(self, pieces: Iterable[TensorSlice], tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._pieces: dict[str, list[TensorSlice]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.theirs, []).append(piece)
        for parts in self._pieces.values():
            parts.sort(key=lambda piece: [rows.start for rows in piece.their_index])
        elements = sum(math.prod(parts[0].their_shape) for parts in self._pieces.values())
        assert elements == sum(tensor.numel() for tensor in tensors.values()), "the weight table is not one to one"

    def __getitem__(self, theirs: str) -> Tensor:
        parts = [self._tensors[piece.ours][piece.our_index] for piece in self._pieces[theirs]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def _holds(name: str, path: str) -> bool:
    return f".{path}." in f".{name}."


def _replaced(name: str, old: str, new: str) -> str:
    """The name with one dotted path in place of another."""
    return f".{name}.".replace(f".{old}.", f".{new}.", 1).strip(".")
