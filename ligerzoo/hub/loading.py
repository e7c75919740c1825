"""Loads models in Hugging Face format, from directories and the Hugging Face hub.

Loading reads config.json, compares all tensors that it implies with the headers of the safetensors files, builds the
model on the meta device and assigns the stored tensors one by one.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import parse_dtype, stored_dtype
from ligerzoo.convert.stored_tensors import assemble
from ligerzoo.convert.tasks import task_of
from ligerzoo.convert.tensor_slices import TensorSlice, matrices_of, shapes_of, within
from ligerzoo.device import available_device
from ligerzoo.dtensors import as_shard_of, shard_of
from ligerzoo.errors import CheckpointError, ConfigError, first_names
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.files.layout import CONFIG_FILE, GENERATION_FILE
from ligerzoo.files.locate import find_checkpoint
from ligerzoo.files.modules import read_modules
from ligerzoo.files.quantized import QuantizedCheckpoint
from ligerzoo.files.transformers_options import HUB_OPTIONS, model_options
from ligerzoo.files.untrusted import read_json, read_tokenizer_files, reading_directory
from ligerzoo.hub.description import Description, read_description
from ligerzoo.hub.matching import Match, TensorSource, match_tensors
from ligerzoo.hub.staging import Staging
from ligerzoo.hub.tying import TIED, check_equal, tie_if_equal, under_both_names
from ligerzoo.kernels.preparation import preparing_triton
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.pretrained import LoadedFrom

Model = TypeVar("Model", bound=LanguageModel)


def load(
    name_or_path: str | Path,
    model_class: type[Model],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    strict: bool = True,
    shard: Callable[[Model], object] | None = None,
    **options: Any,
) -> Model:
    """Loads a model from a checkpoint, in evaluation mode.

    On a CPU, in the stored dtype, the weights are private views of memory-mapped files: loading copies only experts
    that are stored one by one. For a GPU, each tensor is copied to the device from the file, through buffers of 64 MiB.

    Args:
        name_or_path: directory, or id of a repository on the hub ("org/name"), of which config.json,
            generation_config.json and the safetensors files of the model are downloaded.
        model_class: expected class, or a subclass of your own. `CausalLM` accepts all.
        dtype: see `LanguageModel.from_pretrained`, as for `device`, `strict` and `options`.
        shard: makes parameters DTensors in place, of the model on the meta device, whose `origin` is set. Each process
            then reads the elements that it holds, see `ligerzoo.parallel.load_sharded`.

    Raises:
        ConfigError: config.json describes another class than `model_class`, or has invalid or unsupported entries; or
            an override is not a field of the config, or has an invalid value.
        CheckpointError: Files are missing or damaged; or a tensor is missing, unexpected or of another shape than
            config.json implies; or the index and the files disagree about it; or the directory was replaced while its
            files were opened; or, with `shard`, only the constructor can compute a tensor.
    """
    overrides, dtype, device = model_options(options, dtype, device)
    hub_options = {name: overrides.pop(name) for name in HUB_OPTIONS if name in overrides}
    directory = find_checkpoint(name_or_path, task_of(model_class).files, **hub_options)
    device = available_device(device)
    with _opened(directory, model_class, overrides) as (described, generation_config, checkpoint):
        model, match = _plan(described, model_class, checkpoint, dtype, strict=strict)
        is_extra, own = described.architecture.is_extra_tensor, {part.stored_name for part in match.slices}
        extra_names = [name for name in checkpoint.tensors if name not in own and is_extra(name, match.num_layers)]
        extra_tensors = {name: checkpoint.read(name) for name in extra_names}
        found = match.layout, match.tied, extra_tensors, match.missing, match.unexpected
        origin = LoadedFrom(described.raw, None if described.overrides else model.config, *found)
        if shard is not None:
            _refuse_unshardable(model, match, checkpoint)
            model.origin, model.generation_config = origin, generation_config
            shard(model)
        with preparing_triton() if device.type == "cuda" else contextlib.nullcontext():
            weights = _read(checkpoint, match.slices, model.state_dict(), device)
    model = _fill(model, weights, match, lambda: described.architecture.build(described.config, model_class, device))
    if match.missing or match.unexpected:
        warnings.warn(_describe_mismatch(checkpoint.directory, type(model), match), stacklevel=3)
    if shard is None:
        raw = tie_if_equal(model, described.raw)
        origin = replace(origin, raw_config=raw, config=None if described.overrides else model.config)
    else:
        model.tie_weights()
    model.origin, model.generation_config = origin, generation_config
    return model.eval()


def load_on_meta(name_or_path: str | Path, model_class: type[Model], *, dtype: str | torch.dtype = "auto") -> Model:
    """Builds the model of a checkpoint on the meta device, for engines that read the weights themselves.

    Its `origin` has the names and shapes of the stored tensors, which are compared with the model as in `load`.

    Args:
        name_or_path: see `load`, as for `model_class`.
        dtype: see `LanguageModel.from_pretrained`.

    Raises:
        ConfigError: As `load`.
        CheckpointError: As `load`; or the tensors are quantized.
    """
    directory = find_checkpoint(name_or_path)
    with _opened(directory, model_class, {}) as (described, generation_config, checkpoint):
        if described.quantization is not None:
            remedy = "Load the checkpoint with ligerzoo.AutoModel and save it with save_pretrained."
            raise CheckpointError("tensors are quantized", where=directory, expected="dense tensors", remedy=remedy)
        model, match = _plan(described, model_class, checkpoint, dtype, strict=True)
    model.tie_weights()
    model.origin = LoadedFrom(described.raw, model.config, match.layout, match.tied, missing=match.missing)
    model.generation_config = generation_config
    return model


@contextlib.contextmanager
def _opened(
    directory: Path, model_class: type[LanguageModel], overrides: Mapping[str, object]
) -> Iterator[tuple[Description, dict[str, object], QuantizedCheckpoint]]:
    """Reads config.json and generation_config.json and opens the weights: files of one version of the directory."""
    path, generation_path = directory / CONFIG_FILE, directory / GENERATION_FILE
    with contextlib.ExitStack() as files:
        with reading_directory(directory):
            raw = read_json(path)
            generation_config = read_json(generation_path) if os.path.lexists(generation_path) else {}
            modules = read_modules(directory, read_tokenizer_files(directory)) if task_of(model_class).files else None
            described = read_description(raw, path, model_class, overrides, modules)
            folders = described.architecture.folders
            checkpoint = files.enter_context(QuantizedCheckpoint(directory, described.quantization, folders))
        yield described, generation_config, checkpoint


def _plan(
    described: Description,
    model_class: type[Model],
    checkpoint: Checkpoint,
    dtype: str | torch.dtype,
    *,
    strict: bool,
) -> tuple[Model, Match]:
    """Builds the model without weights, in the dtypes to load, and finds its tensors in the files."""
    try:
        model, match = _match(described, model_class, checkpoint, strict=strict)
    except CheckpointError as error:
        explained = _explain_overrides(error, described, model_class, checkpoint)
        if explained is None:
            raise
        raise explained from error
    if dtype == "auto":
        dtype = stored_dtype(described.raw) or _embedding_dtype(checkpoint, match.slices)
    model.to(parse_dtype(dtype, where="argument dtype"))  # some layers keep tensors in fp32, such as routers' biases
    _keep_fp32(model, checkpoint, match.slices, described.architecture)
    return model, match


def _fill(model: Model, weights: dict[str, Tensor], match: Match, build: Callable[[], Model]) -> Model:
    """Returns a model with the weights that were read, and with the tensors that only the constructor computes.

    Args:
        model: on the meta device.
        weights: by name; without tied ones that are stored once, and without missing ones.
        match: how they were found.
        build: builds the model on its device.
    """
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    weights = under_both_names(weights) if match.tied else weights
    is_incomplete = match.missing or has_tensors_outside_state_dict(model)
    if is_incomplete and not all(weight.is_meta for weight in weights.values()):
        model = build()
    weights |= {name: tensor.to(dtypes[name]) for name, tensor in model.state_dict().items() if name in match.missing}
    model.load_state_dict(weights, assign=True)
    return model


def _explain_overrides(
    error: CheckpointError, described: Description, model_class: type[LanguageModel], checkpoint: Checkpoint
) -> CheckpointError | None:
    """Returns an error about the files that names the overrides; None unless the files fit config.json without them."""
    overrides = described.overrides
    if not overrides:
        return None
    try:
        alone = described.without_overrides()
        _match(alone, model_class, checkpoint, strict=True)
    except (CheckpointError, ConfigError):
        return None
    changed = [name for name, value in overrides.items() if getattr(alone.config, name) != value]
    arguments = ", ".join(f"{name}={overrides[name]!r}" for name in changed)
    stored = ", ".join(f"{name}={getattr(alone.config, name)!r}" for name in changed)
    remedy = f"The files have {stored}, as config.json says. Leave out the argument"
    if error.what != "wrong shape":
        remedy += ", or load with strict=False to initialize or leave out the tensors"
    where, got, expected = f"argument {arguments}, {error.where}", error.got, error.expected
    return CheckpointError(error.what, where=where, got=got, expected=expected, remedy=f"{remedy}.")


def _match(
    described: Description, model_class: type[Model], checkpoint: Checkpoint, *, strict: bool
) -> tuple[Model, Match]:
    layers = getattr(described.config, "all_layers", 0)
    if layers > len(checkpoint.tensors):  # bounds the size of the model
        what = "fewer tensors than layers"
        where = checkpoint.directory
        raise CheckpointError(what, where=where, got=len(checkpoint.tensors), expected=f"{layers} layers")
    # Files may hold layers beyond config.json's, such as MTP layers. An override must not drop layers silently.
    has_layers = "num_hidden_layers" not in described.overrides
    source = TensorSource(
        checkpoint.tensors,
        str(checkpoint.directory),
        if_missing="Compare config.json with the files: they may be of different models, or the upload incomplete. "
        "If the class extends the saved one, load with strict=False.",
        if_unexpected="config.json describes a model without it. To leave it out, load with strict=False.",
        num_layers=getattr(described.config, "num_hidden_layers", None) if has_layers else None,
        files=checkpoint,
    )
    model: Model = described.build_on_meta(model_class)
    shapes = shapes_of(model.state_dict())
    return model, match_tensors(source, described.architecture, described.config, shapes, strict=strict)


def _embedding_dtype(checkpoint: Checkpoint, slices: Sequence[TensorSlice]) -> torch.dtype:
    """Returns the stored dtype of the embedding or the head, or of any tensor if neither is stored."""
    part = next((part for part in slices if part.name in TIED), slices[0])
    return checkpoint.tensors[part.stored_name].dtype


def _keep_fp32(
    model: LanguageModel, checkpoint: Checkpoint, slices: Sequence[TensorSlice], architecture: Architecture
) -> None:
    """Gives parameters fp32 that the files store in fp32 among weights of another dtype, as `keeps_fp32` says."""
    if _embedding_dtype(checkpoint, slices) == torch.float32:
        return
    for part in slices:
        module, _, name = part.name.rpartition(".")
        if architecture.keeps_fp32(part.name) and checkpoint.tensors[part.stored_name].dtype == torch.float32:
            weight = model.get_parameter(part.name)
            setattr(model.get_submodule(module), name, nn.Parameter(weight.float(), weight.requires_grad))


def _read(
    checkpoint: QuantizedCheckpoint,
    slices: Sequence[TensorSlice],
    parameters: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Reads the parameters, one slice at a time. Of DTensors, reads the elements that this process holds.

    The results have the dtypes and shardings of `parameters`.
    """
    boxes = {name: shard_of(parameters[name]) for name in dict.fromkeys(part.name for part in slices)}
    own_slices = [own for part in slices if (own := within(part, boxes[part.name])) is not None]
    # Dequantizes one matrix of a stack at a time: the memory for intermediate results is that of a matrix.
    own_slices = [
        piece
        for part in own_slices
        for piece in (matrices_of(part) if part.stored_name in checkpoint.quantized else [part])
    ]
    total = sum(
        math.prod(len(range(rows.start, rows.stop, rows.step or 1)) for rows in part.stored_index)
        * checkpoint.tensors[part.stored_name].dtype.itemsize
        for part in own_slices
    )
    copy = Staging(device).copy if device.type == "cuda" else lambda value: value.to(device)
    with tqdm(total=total, desc="Loading", unit="B", unit_scale=True, disable=None, leave=False) as progress:

        def read(part: TensorSlice) -> Tensor:
            value = checkpoint.read_slice(part.stored_name, part.stored_index, copy)
            progress.update(value.numel() * checkpoint.tensors[part.stored_name].dtype.itemsize)
            return value.mT if part.transposed else value

        shapes = {name: box.shape for name, box in boxes.items()}
        dtypes = {name: parameters[name].dtype for name in boxes}
        weights = assemble(own_slices, shapes, read, dtypes=dtypes, device=device)
    for name in boxes.keys() - weights.keys():  # this process holds no element
        weights[name] = torch.empty(shapes[name], dtype=dtypes[name], device=device)
    return {name: as_shard_of(parameters[name], weight) for name, weight in weights.items()}


def _refuse_unshardable(model: LanguageModel, match: Match, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if a tensor is not in the files, or if tied weights have different values.

    Building the model to compute a tensor would allocate all weights. Shards of tied weights cannot be compared.
    """
    if match.missing or has_tensors_outside_state_dict(model):
        what = "tensors that only the constructor computes cannot be loaded in shards"
        got = first_names(match.missing) or f"buffers or attributes of {type(model).__name__}"
        remedy = "Load the model with from_pretrained, save it, and load that; or shard it after loading."
        raise CheckpointError(what, where=checkpoint.directory, got=got, remedy=remedy)
    if model.config.tie_word_embeddings:
        stored = {part.name: part for part in match.slices if part.name in TIED}.values()
        weights = {part.stored_name: checkpoint.read_slice(part.stored_name, part.stored_index) for part in stored}
        check_equal(weights, checkpoint.directory, "Load with tie_word_embeddings=False.")


def has_tensors_outside_state_dict(model: LanguageModel) -> bool:
    """Returns whether a module holds a tensor that only its constructor can compute.

    Such a tensor is a buffer that is not persistent, or a plain attribute. On the meta device it has no data.
    """
    persistent = model.state_dict().keys()
    buffers = (name not in persistent for name, _ in model.named_buffers())
    attributes = (isinstance(value, Tensor) for module in model.modules() for value in vars(module).values())
    return any(buffers) or any(attributes)


def _describe_mismatch(directory: Path, model_class: type, match: Match) -> str:
    parts = []
    if match.missing:
        parts.append(f"missing parameters, which keep their initialization: {first_names(match.missing)}")
    if match.unexpected:
        parts.append(f"tensors that {model_class.__name__} lacks, which are left out: {first_names(match.unexpected)}")
    return f"{directory}: {'; '.join(parts)}. model.origin.missing and model.origin.unexpected list all."
