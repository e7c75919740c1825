"""Compares stored tensors with the parameters that a config implies, by name, shape and dtype."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ligerzoo.convert.architecture import Architecture, is_beyond_last_layer
from ligerzoo.convert.layout import Layout, Rename
from ligerzoo.convert.tensor_slices import Shape, TensorSlice
from ligerzoo.errors import CheckpointError, first_names
from ligerzoo.files.checkpoint import Checkpoint, TensorInfo
from ligerzoo.hub.tying import EMBEDDING, HEAD, TIED

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class TensorSource:
    """The tensors to load, in files or in memory, and how error messages describe them.

    Attributes:
        tensors: shapes and dtypes, by stored name.
        where: the directory or argument that holds the tensors.
        if_missing: remedy for missing tensors.
        if_unexpected: remedy for an unexpected tensor.
        num_layers: tensors of layers from this index on are ignored; None if they are unexpected.
        files: the files, whose index may disagree with them; None for tensors in memory.
    """

    tensors: Mapping[str, TensorInfo] | Mapping[str, Tensor]
    where: str
    if_missing: str
    if_unexpected: str
    num_layers: int | None = None
    files: Checkpoint | None = None

    def locate(self, name: str) -> str:
        """Returns where a stored tensor is."""
        return f"{self.where}, tensor {name!r}" if self.files is None else self.files.locate(name)


@dataclass(frozen=True)
class Match:
    """How the stored tensors and the parameters of a model correspond. Other attributes are as in `LoadedFrom`.

    Attributes:
        slices: the slices to read.
        num_layers: as in `TensorSource`.
    """

    layout: Layout
    slices: Sequence[TensorSlice]
    tied: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    num_layers: int | None


def match_tensors(
    source: TensorSource, architecture: Architecture, config: Any, shapes: Mapping[str, Shape], *, strict: bool
) -> Match:
    """Compares the stored tensors with the parameters that config.json implies.

    Raises:
        CheckpointError: A stored tensor has another shape or dtype, or is incomplete; or, if `strict`, is missing or
            unexpected; or the index and the files disagree about a tensor that the model has, or, if `strict`, the
            index does not list a stored tensor.
    """
    architecture.check_rules(config, shapes)
    stored = {name: tuple(info.shape) for name, info in source.tensors.items()}
    layout = architecture.layout_of(config, stored, shapes)

    def is_stored(name: str) -> bool:  # checks one slice, because experts can be any number
        return next(layout.slices_of(name, shapes)).stored_name in source.tensors

    # A classifier of a tied causal language model whose files hold the head only: it is the embedding.
    if config.tie_word_embeddings and HEAD in architecture.unused & source.tensors.keys() and not is_stored(EMBEDDING):
        layout = replace(layout, rules=(Rename(HEAD, EMBEDDING), *layout.rules))
    without_weight = [name for name in TIED if name in shapes and not is_stored(name)]
    tied = without_weight if config.tie_word_embeddings and len(without_weight) == 1 and HEAD in shapes else []
    may_lack = architecture.optional if strict else shapes
    missing = [name for name in shapes if name in may_lack and name not in tied and not is_stored(name)]
    left_out = {*tied, *missing}
    needed = (part for name in shapes if name not in left_out for part in layout.slices_of(name, shapes))
    # Each slice is a whole parameter or at least a row of a stored tensor. More slices than there are of both cannot be
    # stored, so no more are listed, even if config.json has billions of experts.
    rows = sum(info.shape[0] if info.shape else 1 for info in source.tensors.values())
    slices = list(islice(needed, len(shapes) + rows + 1))

    def is_ignored(name: str) -> bool:
        return (
            architecture.is_extra_tensor(name)
            or name in architecture.unused
            or (source.num_layers is not None and is_beyond_last_layer(name, source.num_layers))
        )

    expected = {part.stored_name for part in slices}
    everything = expected | {next(layout.slices_of(name, shapes)).stored_name for name in missing}
    unlisted = source.files.unlisted if source.files else {}
    if source.files is not None:
        disagreeing = [name for name in source.files.absent if name in (everything if strict else expected)]
        disagreeing += [name for name in unlisted if name in everything or (strict and not is_ignored(name))]
        for name in disagreeing:
            raise source.files.disagreement(name)
    if absent := [part.stored_name for part in slices if part.stored_name not in source.tensors]:
        got = f"no {first_names(list(dict.fromkeys(absent)), 5)}"
        raise CheckpointError("tensors are missing", where=source.where, got=got, remedy=source.if_missing)
    unexpected = _check_tensors(source, slices, is_ignored, strict=strict)
    unexpected += [name for name in unlisted if not is_ignored(name)]
    return Match(layout, slices, frozenset(tied), tuple(missing), tuple(unexpected), source.num_layers)


def _check_tensors(
    source: TensorSource, slices: Sequence[TensorSlice], is_ignored: Callable[[str], bool], *, strict: bool
) -> list[str]:
    """Checks the names, shapes and dtypes of the stored tensors.

    Returns:
        The names of unexpected tensors, except ignored ones; empty if `strict`, because then they are errors.
    """
    expected = {part.stored_name: part.stored_shape for part in slices}
    unexpected = []
    for name, info in source.tensors.items():
        if name not in expected:
            if is_ignored(name):
                continue
            if strict:
                raise CheckpointError("unexpected tensor", where=source.locate(name), remedy=source.if_unexpected)
            unexpected.append(name)
        else:
            check_stored_tensor(info, expected[name], source.locate(name))
    return unexpected


def check_stored_tensor(info: TensorInfo | Tensor, shape: Shape, where: str, remedy: str | None = None) -> None:
    """Raises CheckpointError unless a tensor has this shape and a dtype of weights.

    Args:
        info: the tensor.
        shape: the shape that a config implies.
        where: the tensor's file and name.
        remedy: what to do about another shape.
    """
    if tuple(info.shape) != shape:
        raise CheckpointError("wrong shape", where=where, got=tuple(info.shape), expected=shape, remedy=remedy)
    if info.dtype not in WEIGHT_DTYPES:
        expected = " or ".join(map(str, WEIGHT_DTYPES))
        raise CheckpointError("not a dtype of weights", where=where, got=info.dtype, expected=expected)
