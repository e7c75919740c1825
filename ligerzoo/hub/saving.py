"""Saves models as directories in Hugging Face format: the inverse of loading, with the same names."""

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import ALTERNATIVE_ENTRIES, stored_dtype
from ligerzoo.convert.stored_tensors import StoredTensors
from ligerzoo.dtensors import is_sharded
from ligerzoo.errors import CheckpointError, ConfigError, first_names
from ligerzoo.files.checkpoint_writer import write_checkpoint
from ligerzoo.files.layout import CONFIG_FILE, GENERATION_FILE
from ligerzoo.hub.sharding import GatheredTensors, write_gathered
from ligerzoo.hub.state import as_stored, check_dense, check_names_and_shapes
from ligerzoo.hub.tying import under_both_names
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.pretrained import LoadedFrom


def save(
    model: LanguageModel,
    directory: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    native: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    is_main_process: bool | None = None,
    tensors_class: type[StoredTensors] | None = None,
) -> None:
    """Writes config.json, generation_config.json and the weights in Hugging Face format. Other files are kept.

    Tensors are written with the names and shapes they were loaded from, and config.json with the entries it had, except
    for changed values. The directory is replaced in one step: a process killed at any time leaves the old checkpoint or
    the new one.

    If weights are DTensors, as with FSDP2 and tensor parallelism, all ranks must call this function. One rank writes.
    Each rank holds its shards and one whole parameter at a time.

    Args:
        model: a model of ligerzoo.models, of a subclass, or of a registered class.
        directory: created if it does not exist.
        max_shard_size: maximum bytes of tensors per file, as a number or a string such as "5GB".
        native: ignore the layout of the checkpoint that the model was loaded from, and use that of a new model.
        state_dict: weights to save instead of those of the model, by the names of `model.state_dict()`. Without
            DTensors, the processes that do not write may pass an empty one, as accelerate's `get_state_dict` returns.
        is_main_process: whether this process writes the files. None means yes, or the lowest rank if weights are
            DTensors.
        tensors_class: computes parameters when they are written, from those of the state dict, in the same shapes and
            dtypes. Not for DTensors.

    Raises:
        ConfigError: The model's class or its config class is not registered.
        CheckpointError: The directory cannot be written, or a tensor cannot be stored, or the weights have other names
            or shapes than those that the model's class builds.
    """
    state: Mapping[str, Tensor] = model.state_dict() if state_dict is None else state_dict
    if is_main_process is not False or is_sharded(state.values()):
        write = prepared(model, directory, native=native, state_dict=state_dict, tensors_class=tensors_class)
        write(directory, max_shard_size=max_shard_size, is_main_process=is_main_process)


class Write(Protocol):
    """Writes a directory, see `prepared`. `is_main_process` is that of `save`."""

    def __call__(
        self, directory: str | Path, *, max_shard_size: int | str = "5GB", is_main_process: bool | None = None
    ) -> None: ...


def prepared(
    model: LanguageModel,
    where: str | Path,
    *,
    native: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    tensors_class: type[StoredTensors] | None = None,
) -> Write:
    """Returns what writes a model's files later, without reading the model: FSDP2 exchanges parameters in forward.

    Args:
        model: see `save`, as for `native`, `state_dict` and `tensors_class`.
        where: a directory, for the error message.

    Raises:
        ConfigError: As `save`.
        CheckpointError: As `save`.
    """
    state: Mapping[str, Tensor] = model.state_dict() if state_dict is None else state_dict
    has_head = model.get_output_embeddings() is not None
    if state_dict is not None and model.config.tie_word_embeddings and has_head:
        state = under_both_names(state_dict)
    architecture = architecture_of_model(model)
    _check_config_fields(model, architecture)
    if state_dict is not None:
        _check_floating(state_dict)
    check_names_and_shapes(state, model, where)
    origin = None if native else model.origin
    files: dict[str, str | bytes] = {**architecture.files_of(model)}
    files[CONFIG_FILE] = _json(config_entries(model, origin, next(iter(state.values())).dtype))
    if model.generation_config:
        files[GENERATION_FILE] = _json(model.generation_config)
    tensors = as_stored(model, origin, state, tensors_class)
    if isinstance(tensors, GatheredTensors):
        write_whole = partial(write_gathered, tensors=tensors, files=files, meta=tensors.meta(), mesh=tensors.mesh)
        return partial(write_whole, folders=architecture.folders)
    meta = tensors.meta() if tensors_class else None  # accesses each parameter once only

    def write(directory: str | Path, *, max_shard_size: int | str = "5GB", is_main_process: bool | None = None) -> None:
        write_checkpoint(
            directory, tensors, files, max_shard_size=max_shard_size, meta=meta, folders=architecture.folders
        )

    return write


def _check_floating(state_dict: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for values that are not dense tensors in a dtype of weights."""
    check_dense(state_dict, "state_dict")
    for name, tensor in state_dict.items():
        if not tensor.is_floating_point():
            what = "not a dtype of weights"
            where = f"state_dict, tensor {name!r}"
            raise CheckpointError(what, where=where, got=tensor.dtype, expected="a floating-point dtype")


def _check_config_fields(model: LanguageModel, architecture: Architecture) -> None:
    """Raises ConfigError if loading would build a config with other fields."""
    config_class: type[Any] = type(model.config)
    names, expected = (
        {field.name for field in dataclasses.fields(cls)} for cls in (config_class, architecture.config_class)
    )
    if names != expected:
        what, where = f"the config has other fields than {architecture.config_class.__name__}", config_class.__name__
        got, missing = (first_names(sorted(ones)) or None for ones in (names - expected, expected - names))
        remedy = f'Call AutoModel.register({where}, {type(model).__name__}, model_type="...").'
        raise ConfigError(what, where=where, got=got, expected=missing, remedy=remedy)


def config_entries(model: LanguageModel, origin: LoadedFrom | None, weight_dtype: torch.dtype) -> dict[str, object]:
    """Returns the entries of config.json: those of the origin, except for changed values."""
    architecture = architecture_of_model(model)
    is_own = origin is not None and architecture.describes(origin.raw_config)
    if origin is not None and is_own and model.config == origin.config:
        content = dict(origin.raw_config)
    else:
        # Entries of our config replace the inherited ones; an entry that our config omits is dropped.
        replaced = ALTERNATIVE_ENTRIES | {field.name for field in dataclasses.fields(model.config)}  # type: ignore[arg-type]
        if not is_own:
            replaced |= {"architectures", "model_type"}
        inherited = {
            name: value for name, value in (origin.raw_config if origin else {}).items() if name not in replaced
        }
        classes = {"architectures": [architecture.hf_class], "model_type": architecture.model_type}
        content = {**classes, **inherited, **architecture.config_to_hf(model.config)}
    dtype = stored_dtype(content)
    if dtype != weight_dtype and not (dtype is None and origin is not None):
        content.pop("dtype", None)
        content["torch_dtype"] = str(weight_dtype).removeprefix("torch.")  # the spelling that every version reads
    return content


def _json(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"
