"""A model's weights in memory, under the names and in the layout of Hugging Face checkpoints."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from ligerzoo.checks import is_text
from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.layout import Layout
from ligerzoo.convert.stored_tensors import StoredTensors, assemble
from ligerzoo.convert.tensor_slices import Shape, TensorSlice, shapes_of
from ligerzoo.dtensors import full, is_dtensor, is_sharded, local, shard_like
from ligerzoo.errors import CheckpointError, first_names
from ligerzoo.hub.matching import TensorSource, match_tensors
from ligerzoo.hub.sharding import GatheredTensors
from ligerzoo.hub.tying import HEAD, TIED, check_equal, is_tied
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.pretrained import LoadedFrom


def hf_state_dict(model: LanguageModel) -> dict[str, Tensor]:
    """Returns the weights under the names and in the shapes that `save_pretrained` writes.

    Made for sending weights to another library, such as vLLM, and for the checkpoints of trainers. Tensors share memory
    with the parameters, except those that concatenate several parameters, such as Phi3's `qkv_proj`: they are copies. A
    tied weight is returned once, unless the checkpoint that the model was loaded from stores it twice.

    If parameters are DTensors, all ranks must call this function, and each gets copies of all weights. To hold one
    weight at a time, use `iterate_hf_state_dict`.

    Raises:
        ConfigError: The model's class is not registered.
        CheckpointError: The model has other tensors than its class builds, such as adapters.
    """
    return dict(iterate_hf_state_dict(model))


def iterate_hf_state_dict(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """Yields the items of `hf_state_dict` one at a time, such as for vLLM's `load_weights`.

    If parameters are DTensors, each is gathered when it is needed. All ranks must then exhaust the iterator.

    Raises:
        ConfigError: As `hf_state_dict`.
        CheckpointError: As `hf_state_dict`.
    """
    state = model.state_dict()
    check_names_and_shapes(state, model, "hf_state_dict")
    yield from as_stored(model, model.origin, state).items()


def load_hf_state_dict(model: LanguageModel, state: Mapping[str, Tensor]) -> None:
    """Copies weights with the names and shapes of a Hugging Face checkpoint into the parameters, in place.

    Parameters keep their identity, dtype, device and sharding, so optimizers and FSDP remain valid. Accepts each layout
    that `from_pretrained` accepts. All checks come first: an error leaves the model unchanged.

    Args:
        model: a model of ligerzoo.models, of a subclass, or of a registered class. If its parameters are DTensors, all
            ranks must call this function.
        state: tensors by name, on any device, in any dtype of weights. All parameters are required. A tied weight may
            be given once, or twice with equal values. Tensors that checkpoints contain although the model does not use
            them, such as rotary frequencies, are ignored.

    Raises:
        ConfigError: The model's class is not registered.
        CheckpointError: A tensor is missing, unexpected, without data, or has the wrong shape or dtype; or a tied
            weight is given twice with different values; or the model is on the meta device, or has other tensors than
            its class builds, such as adapters.
    """
    parameters: dict[str, Tensor] = model.state_dict()
    check_names_and_shapes(parameters, model, "load_hf_state_dict")
    check_dense(state, "state")
    architecture = architecture_of_model(model)
    shapes = shapes_of(parameters)
    source = TensorSource(
        state,
        where="state",
        if_missing="Give all weights of the model; hf_state_dict() returns their names and shapes.",
        if_unexpected="Leave it out, or load the weights into a model that has it.",
        num_layers=getattr(model.config, "num_hidden_layers", None) if architecture.keeps_extra_layers else None,
    )
    match = match_tensors(source, architecture, model.config, shapes, strict=True)
    slices = match.slices
    if match.missing:
        got = f"no {first_names(match.missing)}"
        raise CheckpointError("tensors are missing", where="state", got=got, remedy=source.if_missing)
    _refuse_parameters_without_data(parameters)
    if model.shares_head:
        tied = {part.stored_name: state[part.stored_name] for part in slices if part.name in TIED}
        remedy = "For independent weights, build the model with tie_word_embeddings=False."
        check_equal(tied, "state", remedy)
    state = _apart_from(parameters, state, slices)
    with torch.no_grad():
        for name, parts in groupby(slices, key=lambda part: part.name):
            _copy(parts, state, parameters[name])


def check_names_and_shapes(state: Mapping[str, Tensor], model: LanguageModel, where: str | Path) -> None:
    """Raises CheckpointError if modules were replaced, such as by adapters: the result could not be loaded.

    Args:
        state: the state dict of the model.
        model: a model of ligerzoo.models, of a subclass, or of a registered class.
        where: directory or function, for the error message.
    """
    architecture = architecture_of_model(model)
    expected = shapes_of(architecture.build(model.config, type(model), "meta").state_dict())
    architecture.check_rules(model.config, expected)
    if state.keys() != expected.keys():
        others = (state.keys() - expected.keys(), expected.keys() - state.keys())
        got, missing = (first_names(sorted(names)) or None for names in others)
        what = "tensors differ from those of the architecture"
        remedy = "Merge adapters into the weights and remove parametrizations first."
        raise CheckpointError(what, where=where, got=got, expected=missing, remedy=remedy)
    for name, shape in shapes_of(state).items():
        if shape != expected[name]:
            where, in_config = f"{where}, parameter {name!r}", f"{expected[name]}, as in the config"
            raise CheckpointError("wrong shape", where=where, got=shape, expected=in_config)


def as_stored(
    model: LanguageModel,
    origin: LoadedFrom | None,
    state: Mapping[str, Tensor],
    tensors_class: type[StoredTensors] | None = None,
) -> StoredTensors:
    """Returns the tensors to save by their stored names, in the layout of the origin, or else that of a new model.

    A tied weight is saved once, unless the origin stored it twice. Other parameters that share memory are saved under
    each of their names.

    Args:
        model: the model.
        origin: the checkpoint that determines the layout; None for the layout of a new model.
        state: all tensors of the model, by parameter name.
        tensors_class: class of the result. Default: the one that gathers DTensors, if there are any.
    """
    architecture = architecture_of_model(model)
    if origin is not None and not architecture.describes(origin.raw_config):
        origin = None
    layout = origin.layout if origin else architecture.layouts(model.config)[0]
    tensors = dict(state)
    if is_tied(model, state):
        for name in origin.tied if origin else (HEAD,):
            del tensors[name]
    extra_tensors = origin.extra_tensors if origin else {}
    slices = [*layout.slices(shapes_of(tensors)), *Layout().slices(shapes_of(extra_tensors))]
    kind = tensors_class or (GatheredTensors if is_sharded(tensors.values()) else StoredTensors)
    return kind(slices, {**tensors, **extra_tensors})


def check_dense(state: Mapping[str, Tensor], where: str) -> None:
    """Raises CheckpointError if a value is not a dense tensor with data, or a name is not a string.

    Args:
        state: tensors by name.
        where: the argument, for the error message.
    """
    for name, tensor in state.items():
        location = f"{where}, tensor {name!r}"
        if not is_text(name):
            raise CheckpointError("not a name", where=location, got=type(name).__name__, expected="a string")
        if not isinstance(tensor, Tensor):
            raise CheckpointError("not a tensor", where=location, got=type(tensor).__name__, expected="a torch.Tensor")
        if tensor.is_meta:
            raise CheckpointError("a meta tensor has no data", where=location)
        if tensor.layout is not torch.strided or tensor.is_nested:
            got = "a nested tensor" if tensor.is_nested else str(tensor.layout)
            raise CheckpointError("not a dense tensor", where=location, got=got, remedy="Call to_dense() on it.")


def _refuse_parameters_without_data(parameters: Mapping[str, Tensor]) -> None:
    if empty := [name for name, parameter in parameters.items() if parameter.is_meta]:
        what = "parameters on the meta device hold no data"
        remedy = 'Call to_empty(device="cpu") and tie_weights() first, or build the model on a device.'
        raise CheckpointError(what, where="model", got=first_names(empty), remedy=remedy)


def _apart_from(
    parameters: Mapping[str, Tensor], state: Mapping[str, Tensor], slices: Iterable[TensorSlice]
) -> Mapping[str, Tensor]:
    """Returns the state with copies of tensors that another parameter's copy would overwrite.

    Such as those of `hf_state_dict()` under other names: they share memory with the parameters.
    """
    memory = {_storage(parameter) for parameter in parameters.values()}
    overlapping = {
        part.stored_name
        for part in slices
        if _storage(state[part.stored_name]) in memory
        and not _is_same(state[part.stored_name], parameters[part.name], part)
    }
    return {**state, **{name: state[name].clone() for name in overlapping}}


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    own = local(tensor)
    return own.device, own.untyped_storage().data_ptr()


def _is_same(stored: Tensor, parameter: Tensor, part: TensorSlice) -> bool:
    """Whether the slices of both are the same elements of the same memory."""
    if is_dtensor(stored) or is_dtensor(parameter):
        return False
    return part.select(stored).is_set_to(parameter[part.index])


def _copy(parts: Iterable[TensorSlice], state: Mapping[str, Tensor], parameter: Tensor) -> None:
    """Copies the slices of stored tensors that make up a parameter. With a DTensor, each rank copies its shard."""

    def read(part: TensorSlice) -> Tensor:
        return part.select(full(state[part.stored_name])).to(parameter.device)

    if not is_dtensor(parameter):
        for part in parts:
            parameter[part.index].copy_(read(part))
        return
    parts = list(parts)
    shapes: dict[str, Shape] = {part.name: tuple(parameter.shape) for part in parts}
    [value] = assemble(parts, shapes, read, dtypes={parts[0].name: parameter.dtype}, device=parameter.device).values()
    parameter.copy_(shard_like(parameter, value))
