"""State dicts of models, sharded or not, under the names of checkpoints, for `torch.distributed.checkpoint`.

Engines read a checkpoint into the tensors of a state dict that has its names, and write such a state dict:

    state = stored.of_model(model.state_dict())     # Hugging Face's names and shapes
    dcp.load(state, storage_reader=...)             # each process reads its parts
    model.load_state_dict(stored.to_model(state))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.stored_tensors import StoredTensors, assemble
from ligerzoo.convert.tensor_slices import TensorSlice, shapes_of, within
from ligerzoo.dtensors import as_shard_of, full, is_dtensor, is_sharded, local, shard_of
from ligerzoo.errors import CheckpointError, first_names
from ligerzoo.hub.sharding import GatheredTensors
from ligerzoo.hub.tying import TIED, under_both_names
from ligerzoo.models.language_model import LanguageModel


class StoredState:
    """Names and shapes of a model's tensors in its checkpoint.

    A parameter that is one stored tensor is returned unchanged, also a DTensor. Of experts that are stored one by one,
    each process has those of its shard. Stored tensors that several parameters make up, such as fused projections, are
    whole in each process.

    Args:
        model: a model on any device, also meta. The layout is that of the checkpoint that it was loaded from, or else
            that of a new model.
        prefix: what precedes the names of its parameters in state dicts.
    """

    def __init__(self, model: LanguageModel, prefix: str = "") -> None:
        shapes, origin = shapes_of(model.state_dict()), model.origin
        layout = origin.layout if origin else architecture_of_model(model).layouts(model.config)[0]
        tied = origin.tied if origin else frozenset({"lm_head.weight"} if model.config.tie_word_embeddings else ())
        left_out = {*tied, *(origin.missing if origin else ())}
        self._prefix, self._shapes, self._tied = prefix, shapes, tied & shapes.keys()
        self._slices = {name: list(layout.slices_of(name, shapes)) for name in shapes if name not in left_out}
        self._given: dict[str, Tensor] = {}
        self._stored: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """Names of all stored tensors."""
        return list(dict.fromkeys(part.stored_name for parts in self._slices.values() for part in parts))

    def check(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a state dict of the model without the prefix of its names. Raises CheckpointError as `of_model`."""
        given = {name.removeprefix(self._prefix): tensor for name, tensor in state.items()}
        others = given.keys() - self._shapes.keys(), self._slices.keys() - given.keys()
        if any(others):
            unknown, missing = (first_names(sorted(names)) or None for names in others)
            what, remedy = "tensors differ from those of the architecture", "Train without adapters."
            raise CheckpointError(what, where="state dict", got=unknown, expected=missing, remedy=remedy)
        return given

    def of_model(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a state dict of the model under the names of the checkpoint. All processes must call it.

        One of two tied weights is enough.

        Raises:
            CheckpointError: Tensors are missing or unknown, such as those of adapters.
        """
        given = self.check(state)
        stored: dict[str, Tensor] = {}
        combined: dict[str, Tensor] = {}
        for name, parts in self._slices.items():
            if parts[0].is_copy:
                stored[parts[0].stored_name] = given[name]
            elif _is_stack(given[name], parts):
                own, box = local(given[name]), shard_of(given[name])
                within_shard = (within(part, box) for part in parts)
                stored |= {part.stored_name: own[part.index] for part in within_shard if part is not None}
            else:
                combined[name] = given[name]
        slices = [part for name in combined for part in self._slices[name]]
        rebuilt = (GatheredTensors if is_sharded(combined.values()) else StoredTensors)(slices, combined)
        stored |= {name: rebuilt[name].contiguous() for name in rebuilt}
        self._given, self._stored = given, stored
        return dict(stored)

    def to_model(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a state dict for the model from one that `of_model` returned and whose tensors were read since.

        The tensors may also be whole ones, of a model that is not sharded.

        Raises:
            CheckpointError: A tensor is missing.
        """
        state: dict[str, Tensor] = {}
        for name, parts in self._slices.items():
            like = self._given.get(name)
            box = None if like is None else shard_of(like)
            own = [one for part in parts if (one := part if box is None else within(part, box)) is not None]
            if missing := [part.stored_name for part in own if part.stored_name not in stored]:
                raise CheckpointError("tensors are missing", where="state dict", got=f"no {first_names(missing)}")
            if parts[0].is_copy:
                state[name] = stored[parts[0].stored_name]
            elif like is not None and _is_stack(like, parts) and self._has_read_in_place(stored, own):
                state[name] = like
            else:
                state[name] = self._assembled(name, own, stored)
        if self._tied <= (self._given or self._shapes).keys():
            state |= under_both_names({name: tensor for name, tensor in state.items() if name in TIED})
        self._given, self._stored = {}, {}
        return {f"{self._prefix}{name}": tensor for name, tensor in state.items()}

    def _assembled(self, name: str, parts: Sequence[TensorSlice], stored: Mapping[str, Tensor]) -> Tensor:
        """Returns a parameter from its slices of stored tensors, or a DTensor like the one that `of_model` got."""
        like = self._given.get(name)
        if like is not None and not parts:  # a shard without elements
            return like
        example = stored[parts[0].stored_name] if like is None else like
        shape = self._shapes[name] if like is None else shard_of(like).shape
        device = local(example).device

        def read(part: TensorSlice) -> Tensor:
            return part.select(full(stored[part.stored_name])).to(device)

        [value] = assemble(parts, {name: shape}, read, dtypes={name: example.dtype}, device=device).values()
        return value if like is None else as_shard_of(like, value)

    def _has_read_in_place(self, stored: Mapping[str, Tensor], parts: Sequence[TensorSlice]) -> bool:
        """Whether the tensors are views of a parameter, as `of_model` returned them."""
        return all(stored[part.stored_name] is self._stored.get(part.stored_name) for part in parts)


def _is_stack(tensor: Tensor, parts: Sequence[TensorSlice]) -> bool:
    """Whether a parameter's entries are stored one by one, and each is whole in the process that has it."""
    if any(part.stored_index or len(part.stored_shape) == tensor.ndim for part in parts):
        return False
    return not is_dtensor(tensor) or all(getattr(placement, "dim", 0) == 0 for placement in tensor.placements)
