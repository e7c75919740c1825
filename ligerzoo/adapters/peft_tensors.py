"""The tensors of PEFT's adapter_model.safetensors that hold updates: their names, shapes and layout.

A linear layer has lora_A.weight (r, K) and lora_B.weight (O, r), and with DoRA lora_magnitude_vector (O,). An embedding
has lora_embedding_A (r, V) and lora_embedding_B (H, r). E experts have lora_A.weight (E r, K), expert by expert, and
lora_B.weight (O, r E), in which the expert is the faster index. If transformers' gate and up projections alternate, so
do the rows of B.

Transformers' experts are one module with two parameters. PEFT wraps it twice, and names the tensors of the first one
as those of the wrapper's `base_layer`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ligerzoo.adapters.targets import Target
from ligerzoo.convert.tensor_slices import Shape
from ligerzoo.layers.lora import UpdateTensors

PREFIX = "base_model.model."


@dataclass(frozen=True)
class StoredUpdate:
    """The update of one weight of transformers, of which our targets are rows.

    Attributes:
        targets: our weights with updates, in the order of their rows.
        wrappers: how many wrappers of the same module are around this one.
    """

    targets: tuple[Target, ...]
    wrappers: int = 0

    @property
    def name(self) -> str:
        """The name in `target_modules`, or in `target_parameters`."""
        target = self.targets[0]
        return target.stored_parameter if target.is_parameter else target.stored_module

    @property
    def prefix(self) -> str:
        """Beginning of the names of the tensors."""
        return f"{PREFIX}{self.targets[0].stored_module}.{'base_layer.' * self.wrappers}"

    @property
    def tensor_names(self) -> tuple[str, str, str]:
        """Names of A, B and the magnitudes."""
        a, b = ("lora_A.weight", "lora_B.weight")
        if self.targets[0].is_embedding:
            a, b = ("lora_embedding_A", "lora_embedding_B")
        return f"{self.prefix}{a}", f"{self.prefix}{b}", f"{self.prefix}lora_magnitude_vector"

    def select(self, tensors: Mapping[str, Tensor]) -> UpdateTensors:
        """Returns the tensors of the update, of those of a file."""
        a, b, magnitudes = self.tensor_names
        return UpdateTensors(tensors[a], tensors[b], tensors.get(magnitudes))

    def name_tensors(self, tensors: UpdateTensors) -> dict[str, Tensor]:
        """Returns the tensors of the update by name: the inverse of `select`."""
        return {name: tensor for name, tensor in zip(self.tensor_names, tensors, strict=True) if tensor is not None}

    def shapes(self, rank: int) -> tuple[Shape, Shape, Shape]:
        """Shapes of A, B and the magnitudes."""
        *experts, rows, columns = self.targets[0].stored_shape
        if self.targets[0].is_embedding:
            rows, columns = columns, rows
        rank *= experts[0] if experts else 1
        return (rank, columns), (rows, rank), (rows,)


def stored_updates(targets: list[Target]) -> list[StoredUpdate]:
    """Groups targets by the weight of transformers that they are part of."""
    by_weight: dict[str, list[Target]] = {}
    for target in targets:
        by_weight.setdefault(target.stored_parameter, []).append(target)
    by_module: dict[str, list[list[Target]]] = {}
    for group in by_weight.values():
        by_module.setdefault(group[0].stored_module, []).append(sorted(group, key=lambda target: target.rows))
    return [
        StoredUpdate(tuple(group), len(groups) - 1 - position)
        for groups in by_module.values()
        for position, group in enumerate(groups)
    ]


def pack_experts(a: Tensor, b: Tensor, is_interleaved: bool) -> tuple[Tensor, Tensor]:
    """(E, r, K) and (E, O, r) -> (E r, K) and (O, r E)."""
    if is_interleaved:
        b = torch.stack(b.chunk(2, 1), 2).flatten(1, 2)
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def unpack_experts(a: Tensor, b: Tensor, experts: int, is_interleaved: bool) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_experts`."""
    if is_interleaved:
        b = torch.cat([b[::2], b[1::2]])
    return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)  # type: ignore[no-untyped-call]
