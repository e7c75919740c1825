"""Loads and saves models in Hugging Face format, from and to directories and the Hugging Face hub.

Loading reads config.json, compares all tensors that it implies with the headers of the safetensors files, builds the
model on the meta device and assigns the stored tensors one by one. Saving is the inverse, with the same names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from tqdm import tqdm

from ligerzoo import convert
from ligerzoo.convert import architecture_for, architecture_for_config, architecture_of, architecture_of_model
from ligerzoo.convert.architecture import Architecture, is_beyond_last_layer, is_classifier
from ligerzoo.convert.fields import ALTERNATIVE_ENTRIES, convert_overrides, parse_dtype, refuse, stored_dtype
from ligerzoo.convert.sequence_classifier import LABEL_OPTIONS, classifier_architecture, read_classifier, read_labels
from ligerzoo.convert.weights import Layout, Rule, Shape, StoredTensors, TensorSlice, assemble, shapes_of
from ligerzoo.errors import CheckpointError, ConfigError, first_names
from ligerzoo.files.atomic import reading_directory
from ligerzoo.files.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_json, write_checkpoint
from ligerzoo.files.locate import CONFIG_FILE, GENERATION_FILE, find_checkpoint
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.sequence_classifier import SequenceClassifier

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = {HEAD: EMBEDDING, EMBEDDING: HEAD}
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Model = TypeVar("Model", bound=LanguageModel)


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model was loaded from. Saving uses it to write the same names and entries again.

    Attributes:
        raw_config: content of config.json.
        config: our config as read from it; None if `from_pretrained` changed some fields.
        layout: names and shapes of the stored tensors.
        tied: the parameter that the files omit because it is tied to a stored one; empty if they store both.
        extra_tensors: tensors that are not part of the model but are saved again, such as rotary frequencies.
        missing: names of the parameters that the files lack, after `strict=False`. They keep their initialization.
        unexpected: names of the stored tensors that the model lacks, after `strict=False`. They are left out.
    """

    raw_config: Mapping[str, Any]
    config: Any
    layout: Layout
    tied: frozenset[str]
    extra_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class AutoModel:
    """Loads and builds models of any architecture, and registers new ones."""

    from_pretrained = CausalLM.from_pretrained

    @staticmethod
    def from_config(
        config: Any, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> CausalLM:
        """Builds a model with random weights.

        Args:
            config: config of an architecture in ligerzoo.models, or of a registered class.
            device: device of the weights. Defaults to torch's default device.
            dtype: dtype of the weights. Defaults to torch's default dtype.

        Raises:
            ConfigError: The config's class belongs to no model class.
        """
        make = cast("Callable[..., CausalLM]", architecture_for_config(type(config)).model_class)
        given = {"device": device, "dtype": dtype}
        return make(config, **{name: value for name, value in given.items() if value is not None})

    @staticmethod
    def register(
        config_class: type, model_class: type[CausalLM], *, model_type: str, layout: tuple[Rule, ...] = ()
    ) -> None:
        """Makes a class of your own save, load and show in `ligerzoo info` like those of ligerzoo.models.

        Registration lasts as long as the process. Register the same classes before you load their checkpoints.

        Args:
            config_class: config of the model: a frozen dataclass with fields that JSON can represent. If it extends
                `ligerzoo.models.config.DecoderConfig`, the types of its values are checked.
            model_class: a subclass of CausalLM that is built as `model_class(config)`.
            model_type: `model_type` in config.json.
            layout: rules of `ligerzoo.convert.weights` for tensors that checkpoints store under other names or shapes.
                The default stores each parameter under its own name, or as the nearest base class in ligerzoo.models.

        Raises:
            ConfigError: An argument is invalid, or the name or a class is in use already.
        """
        convert.register(config_class, model_class, model_type=model_type, layout=layout)


class AutoModelForSequenceClassification:
    """Loads and builds sequence classifiers and reward models with the decoder of any architecture."""

    from_pretrained = SequenceClassifier.from_pretrained

    @staticmethod
    def from_config(
        config: Any,
        *,
        num_labels: int | None = None,
        id2label: Mapping[int, str] | None = None,
        label2id: Mapping[str, int] | None = None,
        problem_type: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> SequenceClassifier:
        """Builds a model with random weights.

        Args:
            config: config of a text architecture in ligerzoo.models, or of a registered class.
            num_labels: number of labels; 1 for a reward model. Default: as many as there are names, or 2.
            id2label: the name of each label by its index. Default: LABEL_0, LABEL_1, ...
            label2id: the index of each label by its name.
            problem_type: see `ligerzoo.models.sequence_classifier.Labels`.
            device: device of the weights. Defaults to torch's default device.
            dtype: dtype of the weights. Defaults to torch's default dtype.

        Raises:
            ConfigError: The config's class belongs to no model class, or to one that reads images; or the labels are
                invalid.
        """
        options = {"num_labels": num_labels, "id2label": id2label, "label2id": label2id, "problem_type": problem_type}
        architecture = classifier_architecture(architecture_for_config(type(config)), read_labels({}, options))
        return architecture.build(config, device=device).to(dtype or torch.get_default_dtype())


def load(
    name_or_path: str | Path,
    model_class: type[Model],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    strict: bool = True,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    **overrides: Any,
) -> Model:
    """Loads a model from a checkpoint, in evaluation mode.

    On a CPU, in the stored dtype, the weights are private views of memory-mapped files: loading copies only experts
    that are stored one by one. For a GPU, each tensor is copied to the device directly from the file.

    Args:
        name_or_path: directory, or id of a repository on the hub ("org/name"), of which config.json,
            generation_config.json and the safetensors files of the model are downloaded.
        model_class: expected class, or a subclass of your own. `CausalLM` accepts all.
        dtype: dtype of the weights; "auto" means that of config.json, or else that of the stored embedding.
        device: device of the weights. Defaults to torch's default device.
        strict: False loads a checkpoint into an extended class. Parameters that the files lack keep the initialization
            of the constructor, and tensors that the model lacks are left out. A warning and `model.origin` list them.
            A tensor with another shape stays an error.
        revision: branch, tag or commit on the hub.
        token: access token for private and gated repositories. Defaults to the token stored by `hf auth login`.
        cache_dir: directory of the downloaded files. Defaults to the hub library's cache.
        local_files_only: use cached files only, without network access.
        overrides: values of config fields, which take precedence over config.json.

    Raises:
        ConfigError: config.json describes another class than `model_class`, or has invalid or unsupported entries; or
            an override is not a field of the config, or has an invalid value.
        CheckpointError: Files are missing or damaged; or a tensor is missing, unexpected or of another shape than
            config.json implies; or the directory was replaced while its files were opened.
    """
    directory = find_checkpoint(
        name_or_path, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
    )
    device = _available_device(device)
    with contextlib.ExitStack() as files:
        with reading_directory(directory):
            raw, architecture, config = _read_config(directory / CONFIG_FILE, model_class, overrides)
            has_generation_config = os.path.lexists(directory / GENERATION_FILE)
            generation_config = read_json(directory / GENERATION_FILE) if has_generation_config else {}
            checkpoint = files.enter_context(Checkpoint(directory))
        model: Model = _build_on_meta(architecture, config, model_class, checkpoint)
        shapes = shapes_of(model.state_dict())
        # Files may hold layers beyond config.json's, such as MTP layers. An override must not drop layers silently.
        num_layers = None if "num_hidden_layers" in overrides else getattr(config, "num_hidden_layers", None)
        match = _match(checkpoint, architecture, config, shapes, num_layers, strict=strict)
        if dtype == "auto":
            dtype = stored_dtype(raw) or _embedding_dtype(checkpoint, match.slices)
        dtype = parse_dtype(dtype, where="dtype")
        weights = _read(checkpoint, match.slices, shapes, dtype, device)
        extra_tensors = {
            name: checkpoint.read(name) for name in checkpoint.tensors if architecture.is_extra_tensor(name)
        }

    weights |= {name: weights[TIED[name]] for name in match.tied}
    if device.type != "meta" and (match.missing or _has_tensors_outside_state_dict(model)):
        model = architecture.build(config, model_class, device)
    weights |= {name: _cast(tensor, dtype) for name, tensor in model.state_dict().items() if name in match.missing}
    model.load_state_dict(weights, assign=True)
    if match.missing or match.unexpected:
        warnings.warn(_describe_mismatch(directory, type(model), match), stacklevel=3)
    raw = _tie_if_equal(model, raw)
    read_config = None if overrides else model.config
    model.origin = Origin(raw, read_config, match.layout, match.tied, extra_tensors, match.missing, match.unexpected)
    model.generation_config = generation_config
    return model.eval()


def _available_device(device: str | torch.device | None) -> torch.device:
    """Returns the device, torch's default device if None.

    Raises:
        ConfigError: the name is not a device, or it is a GPU and torch has none.
    """
    available = " or ".join(["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))])
    try:
        chosen = torch.get_default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise ConfigError("unknown device", where="argument device", got=repr(device), expected=available) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "torch finds no GPU", where="argument device", got=repr(str(chosen)), expected=available,
            remedy="Install a torch built for CUDA on a machine with a GPU, or leave out the device.",
        )  # fmt: skip
    return chosen


def _read_config(
    path: Path, model_class: type[LanguageModel] = LanguageModel, overrides: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Architecture, Any]:
    """Returns the content of config.json, the architecture that it names, and our config."""
    overrides = overrides or {}
    raw = read_json(path)
    with _naming_source(path, overrides):
        refuse(raw, "quantization_config", unless=(None,), remedy="Load the repository's unquantized original.")
        refuse(raw, "is_causal", unless=(None, True))
        stored_dtype(raw)  # raises if it is invalid
        architecture = architecture_of(raw.get("model_type"))
        label_options = LABEL_OPTIONS if issubclass(model_class, SequenceClassifier) else ()
        if label_options:
            labels = {name: overrides[name] for name in label_options if name in overrides}
            overrides = {name: value for name, value in overrides.items() if name not in labels}
            architecture = read_classifier(architecture, raw, labels)
        elif is_classifier(raw):
            raise ConfigError(
                "the checkpoint is a sequence classifier", where="architectures", got=raw["architectures"],
                expected="a causal language model", remedy="Load it with AutoModelForSequenceClassification.",
            )  # fmt: skip
        config_class = _config_class(architecture, model_class)
        _refuse_unknown_overrides(overrides, config_class, label_options)
        config = architecture.config_from_hf(raw, config_class, convert_overrides(overrides, config_class))
        return raw, architecture, config


@contextlib.contextmanager
def _naming_source(path: Path, overrides: Mapping[str, Any]) -> Iterator[None]:
    """Adds the source of a field to errors about it: config.json, or an argument of `from_pretrained`."""
    try:
        yield
    except ConfigError as error:
        name = re.match(r"\w*", str(error.where))
        where = f"argument {error.where}" if name and name[0] in overrides else f"{path}, {error.where}"
        raise ConfigError(
            error.what, where=where, got=error.got, expected=error.expected, remedy=error.remedy
        ) from error


def _config_class(architecture: Architecture, model_class: type[LanguageModel]) -> type:
    """Returns the config class to load: the architecture's, or that of a registered subclass of its model class.

    Raises:
        ConfigError: `model_class` is unrelated to the architecture.
    """
    if issubclass(architecture.model_class, model_class):
        return architecture.config_class
    if issubclass(model_class, architecture.model_class):
        config_class = architecture_for(model_class).config_class
        if issubclass(config_class, architecture.config_class):
            return config_class
    raise ConfigError(
        "the checkpoint has another architecture",
        where="model_type",
        got=repr(architecture.model_type),
        expected=model_class.__name__,
        remedy=f"Load it with {architecture.model_class.__name__}.from_pretrained or AutoModel.from_pretrained.",
    )


def _refuse_unknown_overrides(overrides: Mapping[str, Any], config_class: type, label_options: tuple[str, ...]) -> None:
    names = [field.name for field in dataclasses.fields(config_class)]
    options = [
        name for name, option in inspect.signature(load).parameters.items() if option.kind is option.KEYWORD_ONLY
    ]
    for name in overrides:
        if name not in names:
            nearest = difflib.get_close_matches(name, [*names, *options, *label_options], n=1)
            raise ConfigError(
                "unknown", where=name, expected=f"an option of from_pretrained or a field of {config_class.__name__}",
                remedy=f"Did you mean {nearest[0]!r}?" if nearest else None,
            )  # fmt: skip


def _build_on_meta(architecture: Architecture, config: Any, model_class: type[Model], checkpoint: Checkpoint) -> Model:
    """Builds the model without weights.

    Raises:
        CheckpointError: The files hold fewer tensors than the config has layers. This bounds the size of the model.
        ConfigError: The sizes are too large, or invalid together.
    """
    layers = getattr(config, "all_layers", 0)
    if layers > len(checkpoint.tensors):
        raise CheckpointError(
            "fewer tensors than layers",
            where=checkpoint.directory,
            got=len(checkpoint.tensors),
            expected=f"{layers} layers",
        )
    path = checkpoint.directory / CONFIG_FILE
    try:
        with _naming_source(path, {}):
            model: Model = architecture.build_on_meta(config, model_class)
            return model
    except RuntimeError as error:  # the number of elements overflows
        raise ConfigError("no model can be built with these sizes", where=path, got=error) from error


@dataclass(frozen=True)
class _Match:
    """How the stored tensors and the parameters of a model correspond. The attributes are as in `Origin`.

    Attributes:
        slices: the slices to read.
    """

    layout: Layout
    slices: Sequence[TensorSlice]
    tied: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def _match(
    checkpoint: Checkpoint, architecture: Architecture, config: Any, shapes: Mapping[str, Shape],
    num_layers: int | None, *, strict: bool,
) -> _Match:  # fmt: skip
    """Compares the stored tensors with the parameters that config.json implies, by name, shape and dtype.

    Ignores tensors of layers from `num_layers` on; with None, such tensors are unexpected.

    Raises:
        CheckpointError: A stored tensor has another shape or dtype, or is incomplete; or, if `strict`, is missing or
            unexpected.
    """
    layout = architecture.layout_of(checkpoint.tensors, shapes)

    def is_stored(name: str) -> bool:  # checks one slice, because experts can be any number
        return next(layout.slices_of(name, shapes)).stored_name in checkpoint.tensors

    not_stored = [name for name in TIED if name in shapes and not is_stored(name)]
    tied = not_stored if config.tie_word_embeddings and len(not_stored) == 1 and HEAD in shapes else []
    may_lack = architecture.optional if strict else shapes
    missing = [name for name in shapes if name in may_lack and name not in tied and not is_stored(name)]
    left_out = {*tied, *missing}
    needed = (part for name in shapes if name not in left_out for part in layout.slices_of(name, shapes))
    # Each slice is a whole parameter or a whole stored tensor. More slices than there are of both cannot be stored, so
    # no more are listed, even if config.json has billions of experts.
    slices = list(islice(needed, len(shapes) + len(checkpoint.tensors) + 1))
    _refuse_missing(checkpoint, slices)
    unexpected = _check_tensors(
        checkpoint,
        slices,
        is_ignored=lambda name: (
            architecture.is_extra_tensor(name)
            or name in architecture.unused
            or (num_layers is not None and is_beyond_last_layer(name, num_layers))
        ),
        strict=strict,
    )
    return _Match(layout, slices, frozenset(tied), tuple(missing), tuple(unexpected))


def _refuse_missing(checkpoint: Checkpoint, slices: Sequence[TensorSlice]) -> None:
    missing = [name for name in dict.fromkeys(part.stored_name for part in slices) if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(
            "tensors are missing", where=checkpoint.directory, got=f"no {first_names(missing, 5)}",
            remedy="Compare config.json with the files: they may be of different models, or the upload incomplete. "
            "If the class extends the saved one, load with strict=False.",
        )  # fmt: skip


def _check_tensors(
    checkpoint: Checkpoint, slices: Sequence[TensorSlice], is_ignored: Callable[[str], bool], *, strict: bool
) -> list[str]:
    """Checks the names, shapes and dtypes of the stored tensors.

    Returns:
        The names of unexpected tensors, except ignored ones; empty if `strict`, because then they are errors.
    """
    expected = {part.stored_name: part.stored_shape for part in slices}
    unexpected = []
    for name, info in checkpoint.tensors.items():
        where = f"{checkpoint.directory / info.file}, tensor {name!r}"
        if name not in expected:
            if is_ignored(name):
                continue
            if strict:
                remedy = "config.json describes a model without it. To leave it out, load with strict=False."
                raise CheckpointError("unexpected tensor", where=where, remedy=remedy)
            unexpected.append(name)
        elif info.shape != expected[name]:
            raise CheckpointError("wrong shape", where=where, got=info.shape, expected=expected[name])
        elif info.dtype not in WEIGHT_DTYPES:
            dtypes = " or ".join(str(dtype) for dtype in WEIGHT_DTYPES)
            raise CheckpointError("not a dtype of weights", where=where, got=info.dtype, expected=dtypes)
    return unexpected


def _embedding_dtype(checkpoint: Checkpoint, slices: Sequence[TensorSlice]) -> torch.dtype:
    """Returns the stored dtype of the embedding or the head, or of any tensor if neither is stored."""
    part = next((part for part in slices if part.name in TIED), slices[0])
    return checkpoint.tensors[part.stored_name].dtype


def _read(
    checkpoint: Checkpoint,
    slices: Sequence[TensorSlice],
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Reads the parameters, one slice at a time."""
    total = sum(checkpoint.tensors[name].nbytes for name in {part.stored_name for part in slices})
    with tqdm(total=total, desc="Loading", unit="B", unit_scale=True, disable=None, leave=False) as progress:

        def read(part: TensorSlice) -> Tensor:
            value = checkpoint.read(part.stored_name)[part.stored_index]
            progress.update(value.nbytes)
            return value.to(device)

        return assemble(slices, shapes, read, dtype=dtype, device=device)


def _has_tensors_outside_state_dict(model: LanguageModel) -> bool:
    """Returns whether a module holds a tensor that only its constructor can compute.

    Such a tensor is a buffer that is not persistent, or a plain attribute. On the meta device it has no data.
    """
    persistent = model.state_dict().keys()
    buffers = (name not in persistent for name, _ in model.named_buffers())
    attributes = (isinstance(value, Tensor) for module in model.modules() for value in vars(module).values())
    return any(buffers) or any(attributes)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _describe_mismatch(directory: Path, model_class: type, match: _Match) -> str:
    parts = []
    if match.missing:
        parts.append(f"missing parameters, which keep their initialization: {first_names(match.missing)}")
    if match.unexpected:
        parts.append(f"tensors that {model_class.__name__} lacks, which are left out: {first_names(match.unexpected)}")
    return f"{directory}: {'; '.join(parts)}. model.origin.missing and model.origin.unexpected list all."


def _tie_if_equal(model: LanguageModel, raw: dict[str, Any]) -> dict[str, Any]:
    """Ties the head to the embedding if the config says so and their weights are equal.

    If they differ, the files take precedence: sets `tie_word_embeddings` to False in the model's config and in the
    returned config.json.
    """
    if not (model.config.tie_word_embeddings and isinstance(model, CausalLM)):
        return raw
    parameters = model.state_dict()
    head, embedding = parameters[HEAD], parameters[EMBEDDING]
    if head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding):
        model.tie_weights()
        return raw
    model.config = dataclasses.replace(model.config, tie_word_embeddings=False)  # type: ignore[type-var]
    return _untied({**raw, "tie_word_embeddings": False})


def _untied(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Sets `tie_word_embeddings` to False at every level of config.json that has it."""
    untied = {name: False if name == "tie_word_embeddings" else value for name, value in raw.items()}
    return {name: _untied(value) if isinstance(value, Mapping) else value for name, value in untied.items()}


def save(
    model: LanguageModel, directory: str | Path, *, max_shard_size: int | str = "5GB", native: bool = False
) -> None:
    """Writes config.json, generation_config.json and the weights in Hugging Face format. Other files are kept.

    Tensors are written with the names and shapes they were loaded from, and config.json with the entries it had, except
    for changed values. The directory is replaced in one step: a process killed at any time leaves the old checkpoint or
    the new one.

    Args:
        model: a model of ligerzoo.models, of a subclass, or of a registered class.
        directory: created if it does not exist.
        max_shard_size: maximum bytes of tensors per file, as a number or a string such as "5GB".
        native: ignore the layout of the checkpoint that the model was loaded from, and use that of a new model.

    Raises:
        ConfigError: The model's class or its config class is not registered.
        CheckpointError: The directory cannot be written, or a tensor cannot be stored, or the model has other tensors
            than its class builds.
    """
    architecture = architecture_of_model(model)
    _refuse_other_config(model, architecture)
    _refuse_changed_modules(model, architecture, Path(directory))
    origin = None if native else model.origin
    files = {CONFIG_FILE: _config_json(model, origin)}
    if model.generation_config:
        files[GENERATION_FILE] = _json(model.generation_config)
    write_checkpoint(directory, _stored_tensors(model, origin), files, max_shard_size=max_shard_size)


def _refuse_other_config(model: LanguageModel, architecture: Architecture) -> None:
    """Raises ConfigError if loading would build a config with other fields."""
    config_class: type[Any] = type(model.config)
    names, expected = (
        {field.name for field in dataclasses.fields(cls)} for cls in (config_class, architecture.config_class)
    )
    if names != expected:
        raise ConfigError(
            f"the config has other fields than {architecture.config_class.__name__}", where=config_class.__name__,
            got=first_names(sorted(names - expected)) or None, expected=first_names(sorted(expected - names)) or None,
            remedy=f'Call AutoModel.register({config_class.__name__}, {type(model).__name__}, model_type="...").',
        )  # fmt: skip


def _refuse_changed_modules(model: LanguageModel, architecture: Architecture, directory: Path) -> None:
    """Raises CheckpointError if modules were replaced, such as by adapters: the result could not be loaded."""
    expected = architecture.build_on_meta(model.config, type(model)).state_dict().keys()
    names = model.state_dict().keys()
    if names != expected:
        raise CheckpointError(
            "tensors differ from those of the architecture", where=directory,
            got=first_names(sorted(names - expected)) or None, expected=first_names(sorted(expected - names)) or None,
            remedy="Merge adapters into the weights and remove parametrizations before saving.",
        )  # fmt: skip


def _is_own(origin: Origin | None, architecture: Architecture) -> bool:
    """Returns whether a model was loaded from a checkpoint of the same architecture."""
    return origin is not None and architecture.describes(origin.raw_config)


def _stored_tensors(model: LanguageModel, origin: Origin | None) -> Mapping[str, Tensor]:
    """Returns the tensors to save by their stored names, in the layout of the origin, or else that of a new model.

    A tied weight is saved once, unless the origin stored it twice. Other parameters that share memory are saved under
    each of their names.
    """
    architecture = architecture_of_model(model)
    if not _is_own(origin, architecture):
        origin = None
    layout = origin.layout if origin else architecture.layout_of_new
    state: dict[str, Tensor] = model.state_dict()
    head = model.get_output_embeddings()
    if model.config.tie_word_embeddings and head is not None and head.weight is model.model.embed_tokens.weight:
        for name in origin.tied if origin else (HEAD,):
            del state[name]
    extra_tensors = origin.extra_tensors if origin else {}
    slices = [*layout.slices(shapes_of(state)), *Layout().slices(shapes_of(extra_tensors))]
    return StoredTensors(slices, {**state, **extra_tensors})


def _config_json(model: LanguageModel, origin: Origin | None) -> str:
    architecture = architecture_of_model(model)
    is_own = _is_own(origin, architecture)
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
    if dtype != model.dtype and not (dtype is None and origin is not None):
        content.pop("dtype", None)
        content["torch_dtype"] = str(model.dtype).removeprefix("torch.")  # the spelling that every version reads
    return _json(content)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


class Saveable(Protocol):
    """A `Processor` or a `Tokenizer`, which can be uploaded with a model."""

    def save_pretrained(self, directory: str | Path) -> None: ...


def push(
    model: LanguageModel,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "Upload model",
    processor: Saveable | None = None,
) -> str:
    """Uploads a model to the hub in one commit and returns the URL of the commit.

    Adds a short model card if the repository has no README.md.

    Args:
        model: a model that `save` accepts.
        repo_id: "org/name"; created if it does not exist.
        private: whether a new repository is private.
        token: access token. Defaults to the token stored by `hf auth login`.
        commit_message: message of the commit.
        processor: `Processor` or `Tokenizer` to upload in the same commit; it replaces that of the repository. None
            keeps the repository's.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        save(model, folder)
        stale = [SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors"]  # deleted unless uploaded again
        if processor is not None:
            from ligerzoo.vision.processor import FILE_PATTERNS

            processor.save_pretrained(folder)
            stale += FILE_PATTERNS
        if not api.file_exists(repo_id, "README.md"):
            (folder / "README.md").write_text(_model_card(model, processor, repo_id), encoding="utf-8")
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=commit_message, delete_patterns=stale
        )
        return str(commit.commit_url)


def _pipeline_tag(model: LanguageModel) -> str:
    if isinstance(model, SequenceClassifier):
        return "text-classification"
    return "image-text-to-text" if model.modalities else "text-generation"


def _model_card(model: LanguageModel, processor: Saveable | None, repo_id: str) -> str:
    name, module = type(model).__name__, type(model).__module__
    module = "ligerzoo.models" if module.startswith("ligerzoo.models.") else module
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = [(f"from {module} import {name}", f'model = {name}.from_pretrained("{repo_id}")')]
    if processor is not None:
        kind = type(processor).__name__
        lines.insert(0, (f"from ligerzoo import {kind}", f'{kind.lower()} = {kind}.from_pretrained("{repo_id}")'))
    imports, calls = map("\n".join, zip(*lines, strict=True))
    return f"""---
library_name: ligerzoo
pipeline_tag: {_pipeline_tag(model)}
---
# {repo_id.split("/")[-1]}

A {name} with {parameters:,} parameters in {str(model.dtype).removeprefix("torch.")}, saved by ligerzoo in Hugging Face
format.

```python
{imports}

{calls}
```
"""
