"""A model's weights in memory, under the names and in the layout of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ligerzoo.convert import architecture_for
from ligerzoo.convert.weights import Layout, Shape, StoredTensors, TensorSlice, assemble, shapes_of
from ligerzoo.errors import CheckpointError, first_names
from ligerzoo.hub.matching import EMBEDDING, HEAD, Source, match_tensors
from ligerzoo.hub.origin import Origin, is_of
from ligerzoo.models.causal_lm import CausalLM


def hf_state_dict(model: CausalLM) -> dict[str, Tensor]:
    """Returns the weights under the names and in the shapes that `save_pretrained` writes.

    Made for sending weights to another library, such as vLLM, and for optimizers' and trainers' checkpoints. Tensors
    share memory with the parameters, except those that concatenate several parameters, such as Phi3's `qkv_proj`: they
    are copies. A tied weight is returned once, unless the checkpoint that the model was loaded from stores it twice.

    Raises:
        ConfigError: The model's class is not registered.
        CheckpointError: The model has other tensors than its class builds, such as adapters.
    """
    refuse_changed_modules(model, "hf_state_dict")
    return dict(stored_tensors(model, model.origin))


def load_hf_state_dict(model: CausalLM, state: Mapping[str, Tensor]) -> None:
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
    refuse_changed_modules(model, "load_hf_state_dict")
    architecture = architecture_for(type(model))
    _refuse_other_values(state)
    parameters: dict[str, Tensor] = model.state_dict()
    shapes = shapes_of(parameters)
    source = Source(
        state,
        where="state",
        locate=lambda name: f"state, tensor {name!r}",
        if_missing="Give all weights of the model; hf_state_dict() returns their names and shapes.",
        if_unexpected="Leave it out, or load the weights into a model that has it.",
    )
    slices = match_tensors(source, architecture, model.config, shapes, num_layers=None, strict=True).slices
    _refuse_parameters_without_data(parameters)
    if _is_tied(model):
        _refuse_different_tied_weights(state, slices)
    with torch.no_grad():
        for name, parts in groupby(slices, key=lambda part: part.name):
            _copy(parts, state, parameters[name])


def refuse_changed_modules(model: CausalLM, where: str | Path) -> None:
    """Raises CheckpointError if modules were replaced, such as by adapters: the result could not be loaded."""
    architecture = architecture_for(type(model))
    expected = architecture.build_on_meta(model.config, type(model)).state_dict().keys()
    names = model.state_dict().keys()
    if names != expected:
        raise CheckpointError(
            "tensors differ from those of the architecture", where=where,
            got=first_names(sorted(names - expected)) or None, expected=first_names(sorted(expected - names)) or None,
            remedy="Merge adapters into the weights and remove parametrizations first.",
        )  # fmt: skip


def stored_tensors(model: CausalLM, origin: Origin | None) -> Mapping[str, Tensor]:
    """Returns the tensors to save by their stored names, in the layout of the origin, or else that of a new model.

    A tied weight is saved once, unless the origin stored it twice. Other parameters that share memory are saved under
    each of their names.
    """
    architecture = architecture_for(type(model))
    if not is_of(origin, architecture):
        origin = None
    layout = origin.layout if origin else architecture.layout_of_new
    state: dict[str, Tensor] = model.state_dict()
    if _is_tied(model):
        for name in origin.tied if origin else (HEAD,):
            del state[name]
    extra_tensors = origin.extra_tensors if origin else {}
    slices = [*layout.slices(shapes_of(state)), *Layout().slices(shapes_of(extra_tensors))]
    return StoredTensors(slices, {**state, **extra_tensors})


def _is_tied(model: CausalLM) -> bool:
    return model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight


def _refuse_other_values(state: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                "not a tensor", where=f"state, tensor {name!r}", got=type(tensor).__name__, expected="a torch.Tensor"
            )
        if tensor.is_meta:
            raise CheckpointError("a meta tensor has no data", where=f"state, tensor {name!r}")


def _refuse_parameters_without_data(parameters: Mapping[str, Tensor]) -> None:
    if empty := [name for name, parameter in parameters.items() if parameter.is_meta]:
        raise CheckpointError(
            "parameters on the meta device hold no data", where="model", got=first_names(empty),
            remedy='Call to_empty(device="cpu") and tie_weights() first, or build the model on a device.',
        )  # fmt: skip


def _refuse_different_tied_weights(state: Mapping[str, Tensor], slices: Iterable[TensorSlice]) -> None:
    given = [part.stored_name for part in slices if part.name in (HEAD, EMBEDDING)]
    if len(given) == 2 and not torch.equal(*(_full(state[name]) for name in given)):
        raise CheckpointError(
            "tied weights have different values", where=f"state, tensors {given[0]!r} and {given[1]!r}",
            expected="equal tensors, or one of them",
            remedy="For independent weights, build the model with tie_word_embeddings=False.",
        )  # fmt: skip


def _copy(parts: Iterable[TensorSlice], state: Mapping[str, Tensor], parameter: Tensor) -> None:
    """Copies the slices of stored tensors that make up a parameter. With a DTensor, each rank copies its shard."""

    def read(part: TensorSlice) -> Tensor:
        return _full(state[part.stored_name])[part.stored_index]

    if not isinstance(parameter, DTensor):
        for part in parts:
            parameter[part.index].copy_(read(part))
        return
    parts = list(parts)
    shapes: dict[str, Shape] = {parts[0].name: tuple(parameter.shape)}
    value = assemble(
        parts, shapes, lambda part: read(part).to(parameter.device), dtype=parameter.dtype, device=parameter.device
    )
    [whole] = value.values()
    parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
