"""`TensorPlan`: which parameters of a layer tensor parallelism divides. Each layer states its own.

Each process computes a layer with its part of the heads, of the intermediate features, of the experts or of the
vocabulary, and the outputs of all processes are added up (Shoeybi et al. 2019). What no plan names, such as norms and
routers, is whole in every process, which computes it for a part of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor, nn

Kind = Literal["sum", "experts", "embedding", "head"]
"""How parts of a layer become its output: by a sum; see `ligerzoo.parallel.tensor` for the others."""

_COLUMN = {"weight": 0, "bias": 0, "lora_B": 0, "lora_magnitude_vector": 0}
_ROW = {"weight": 1, "lora_A": 1}
_EMBEDDING = {"weight": 0, "lora_embedding_A": 1}


class Heads(NamedTuple):
    """Output features of a linear layer that are heads.

    Attributes:
        features: of all heads.
        number: number of heads.
    """

    features: int
    number: int

    def own(self, x: Tensor, rank: int, processes: int) -> Tensor:
        """Returns the heads of a process, (features, ...): one of several that share it if there are fewer heads."""
        size, first = self.features // self.number, rank * self.number // processes
        return x.narrow(0, first * size, max(1, self.number // processes) * size)


class DividedParameter(NamedTuple):
    """A parameter of a layer, and how its processes use it.

    Attributes:
        module: the module that owns it.
        name: its name there.
        dim: the dimension that is divided; None if it is whole.
        is_added_once: whether it is a term of the sum of all processes, as the bias of a row-parallel layer.
        parts: its parts in the first dimension, such as queries, keys and values: it is whole, and a process computes
            with its heads of each part. Empty if it does not.
    """

    module: nn.Module
    name: str
    dim: int | None
    is_added_once: bool = False
    parts: tuple[Heads, ...] = ()

    @property
    def value(self) -> Tensor:
        """The parameter."""
        return self.module._parameters[self.name]  # type: ignore[return-value]


@dataclass(frozen=True)
class TensorPlan:
    """How tensor parallelism divides a layer.

    Attributes:
        units: sizes that the number of processes has to divide, by name, such as heads.
        columns: linear layers whose output features are divided, by attribute name.
        rows: linear layers whose input features are divided; their products are parts of a sum.
        norms: norms over all features of which a process has some, as `AllHeadsRMSNorm`.
        shared: numbers of heads that others share, by name, such as heads of keys and values: several processes have
            the same one if they are fewer. The number of processes has to divide them, or to be a multiple of them.
        heads: the output features of columns and norms that are such heads. Fewer of them than processes are whole in
            every process.
        fused: children whose output features are divided within each of several parts. Their parameters are whole in
            every process, since a part of a DTensor is in one piece.
        kind: how the parts become the output. All but "sum" divide the layer's own parameters.
        own: own parameters that are divided by their first dimension.
        nested: parameters of children that are divided, by dotted name, with the dimension.
        obstacle: why the layer cannot be divided; None if it can.
    """

    units: Mapping[str, int]
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    shared: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[str, Heads] = field(default_factory=dict)
    fused: Mapping[str, tuple[Heads, ...]] = field(default_factory=dict)
    kind: Kind = "sum"
    own: tuple[str, ...] = ()
    nested: Mapping[str, int] = field(default_factory=dict)
    obstacle: str | None = None

    def obstacles(self, processes: int) -> Iterator[str]:
        """Yields why this number of processes cannot divide the layer."""
        if self.obstacle:
            yield self.obstacle
        indivisible = {unit: count for unit, count in self.units.items() if count % processes}
        indivisible |= {unit: count for unit, count in self.shared.items() if count % processes and processes % count}
        for unit, count in indivisible.items():
            yield f"has {count} {unit}, which {processes} processes cannot share equally"

    def parameters(self, layer: nn.Module, processes: int) -> Iterator[DividedParameter]:
        """Yields all parameters of the layer and its children."""
        tables: dict[nn.Module, dict[str, int]] = {layer: dict.fromkeys(self.own, 0)}
        for path, dimension in self.nested.items():
            child, _, parameter = path.rpartition(".")
            tables.setdefault(layer.get_submodule(child), {})[parameter] = dimension
        if self.kind != "sum":
            tables = {layer: self._of_own(layer)}
        parts = dict(self.fused) | {name: (one,) for name, one in self.heads.items() if one.number < processes}
        columns = [name for name in (*self.columns, *self.norms) if name not in parts]
        tables |= {layer.get_submodule(name): _COLUMN for name in columns}
        row_layers = [layer.get_submodule(name) for name in self.rows]
        tables |= dict.fromkeys(row_layers, _ROW)
        parts_of = {layer.get_submodule(name): heads for name, heads in parts.items()}
        for module in layer.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    dim, is_once = tables.get(module, {}).get(name), module in row_layers and name == "bias"
                    heads = parts_of.get(module, ()) if name in _COLUMN else ()
                    yield DividedParameter(module, name, dim, is_once, heads)

    def _of_own(self, layer: nn.Module) -> dict[str, int]:
        if self.kind == "experts":
            return dict.fromkeys(layer._parameters, 0)  # also the updates of LoRA, a pair for each expert
        return _EMBEDDING if self.kind == "embedding" else _COLUMN
