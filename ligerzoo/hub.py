"""Models from and to checkpoints in Hugging Face format: a directory, or a repository on the hub.

Loading: find the files; read config.json; compare every tensor that the config implies with the headers of the
safetensors files; only then build the model without memory ("meta") and give it the tensors one by one. Saving is the
way back, under the same names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

import torch
from torch import Tensor
from tqdm import tqdm

from ligerzoo.convert import architecture_for, architecture_of
from ligerzoo.convert.architecture import Architecture, is_beyond_last_layer
from ligerzoo.convert.fields import ALTERNATIVE_ENTRIES, parse_dtype, refuse, stored_dtype
from ligerzoo.convert.weights import Layout, Shape, StoredTensors, TensorSlice, assemble, shapes_of
from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.files.atomic import reading_directory
from ligerzoo.files.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_json, write_checkpoint
from ligerzoo.files.locate import CONFIG_FILE, GENERATION_FILE, find_checkpoint
from ligerzoo.models.causal_lm import CausalLM

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = {HEAD: EMBEDDING, EMBEDDING: HEAD}
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Model = TypeVar("Model", bound=CausalLM)


@dataclass(frozen=True)
class Origin:
    """What a loaded model remembers of its checkpoint, so that saving gives the same names back.

    Attributes:
        raw_config: config.json as it was read.
        config: our config as read from it.
        layout: how the tensors stand on disk.
        absent: the name of ours that a tied weight does not have on disk; empty where it has both.
        extra_tensors: tensors that the model does not use but hands on (such as old files' rotary frequencies).
    """

    raw_config: Mapping[str, Any]
    config: Any
    layout: Layout
    absent: frozenset[str]
    extra_tensors: Mapping[str, Tensor] = field(default_factory=dict)


class AutoModel:
    """Loads the class that a checkpoint's `model_type` names; the arguments are those of `load`."""

    from_pretrained = CausalLM.from_pretrained


def load(
    name_or_path: str | Path,
    model_class: type[Model],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Model:
    """A model with the weights of a checkpoint, in evaluation mode.

    On a CPU, in the stored dtype, the weights are private views of the memory-mapped files: loading copies nothing but
    experts that are stored one by one. For a GPU each tensor goes there straight from the file.

    Args:
        name_or_path: a directory, or the id of a repository on the hub ("org/name"). Of the latter only config.json,
            generation_config.json and the safetensors files of the model are downloaded.
        model_class: the class that is expected, or your own subclass of one; `CausalLM` takes any.
        dtype: of the weights; "auto" is the one config.json names, else that of the stored embedding.
        device: of the weights; torch's default device when None.
        revision: branch, tag or commit on the hub.
        token: for private and gated repositories; by default the one that `hf auth login` stored.
        cache_dir: where the hub's files are kept.
        local_files_only: no network, only what is cached already.

    Raises:
        ConfigError: config.json asks for something else than `model_class`, or for what is not supported.
        CheckpointError: files are missing or damaged; or a tensor is missing, unexpected or of another shape than
            config.json implies; or the directory was replaced while its files were opened.
    """
    directory = find_checkpoint(
        name_or_path, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
    )
    with contextlib.ExitStack() as opened:
        with reading_directory(directory):
            raw, architecture, config = _read_config(directory / CONFIG_FILE)
            _refuse_other_class(architecture, model_class, directory / CONFIG_FILE)
            has_generation_config = os.path.lexists(directory / GENERATION_FILE)
            generation_config = read_json(directory / GENERATION_FILE) if has_generation_config else {}
            checkpoint = opened.enter_context(Checkpoint(directory))
        stored = checkpoint.tensors
        if config.all_layers > len(stored):  # before a model of so many layers is built
            raise CheckpointError(
                "fewer tensors than layers",
                where=directory,
                got=len(stored),
                expected=f"{config.all_layers} layers",
            )
        try:
            with _naming_file(directory / CONFIG_FILE):
                model: Model = architecture.build_on_meta(config, model_class)
        except RuntimeError as error:  # more elements than torch can count, before it looks for memory
            raise ConfigError("sizes of an impossible model", where=directory / CONFIG_FILE, got=error) from error
        shapes = shapes_of(model.state_dict())
        layout = architecture.layout_of(stored, shapes)
        pieces = _pieces(layout, shapes, len(stored))
        absent = [piece for piece in pieces if piece.name in TIED and piece.stored_name not in stored]
        if config.tie_word_embeddings and len(absent) == 1:  # the one weight may stand under either name, or under both
            pieces.remove(absent[0])
        _refuse_misfits(checkpoint, pieces, architecture.is_extra_tensor, config.num_hidden_layers)
        if dtype == "auto":
            embedding = next(piece.stored_name for piece in pieces if piece.name in TIED)
            dtype = stored_dtype(raw) or stored[embedding].dtype
        weights = _read(checkpoint, pieces, shapes, parse_dtype(dtype, where="dtype"), device)
        weights |= {piece.name: weights[TIED[piece.name]] for piece in absent}
        extra_tensors = {name: checkpoint.read(name) for name in stored if architecture.is_extra_tensor(name)}

    model.load_state_dict(weights, assign=True)
    if config.tie_word_embeddings:
        if weights[HEAD] is weights[EMBEDDING] or torch.equal(weights[HEAD], weights[EMBEDDING]):
            model.tie_weights()
        else:  # the config says tied, the files hold two weights: the files are right
            config = dataclasses.replace(config, tie_word_embeddings=False)
            raw, model.config = _untied({**raw, "tie_word_embeddings": False}), config
    model.origin = Origin(raw, config, layout, frozenset(piece.name for piece in absent), extra_tensors)
    model.generation_config = generation_config
    return model.eval()


def _read_config(path: Path) -> tuple[dict[str, Any], Architecture, Any]:
    """config.json as it stands, the architecture it names, and our config of it."""
    raw = read_json(path)
    with _naming_file(path):
        refuse(raw, "quantization_config", unless=(None,), remedy="Load the repository's unquantized original.")
        refuse(raw, "is_causal", unless=(None, True))
        stored_dtype(raw)  # which refuses what is none
        architecture = architecture_of(raw.get("model_type"))
        return raw, architecture, architecture.config_from_hf(raw)


@contextlib.contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Name config.json in the errors of those who know its fields alone."""
    try:
        yield
    except ConfigError as error:
        where = f"{path}, {error.where}"
        raise ConfigError(
            error.what, where=where, got=error.got, expected=error.expected, remedy=error.remedy
        ) from error


def _refuse_other_class(architecture: Architecture, model_class: type[CausalLM], path: Path) -> None:
    known = architecture.model_class
    if not (issubclass(known, model_class) or issubclass(model_class, known)):
        raise ConfigError(
            "the checkpoint is of another architecture",
            where=path,
            got=f"model_type {architecture.model_type!r}",
            expected=model_class.__name__,
            remedy=f"Load it with {known.__name__}.from_pretrained or AutoModel.from_pretrained.",
        )


def _untied(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with no tied head, whether it says so of the whole model or of a part."""
    tied = {name: False if name == "tie_word_embeddings" else value for name, value in raw.items()}
    return {name: _untied(value) if isinstance(value, Mapping) else value for name, value in tied.items()}


def _pieces(layout: Layout, shapes: Mapping[str, Shape], n_stored: int) -> list[TensorSlice]:
    """The pieces that the files should hold, or enough of them to find one missing.

    A piece is all of one of our tensors or all of one on disk. So more pieces than tensors on both sides are more than
    the files can hold, and however many experts config.json speaks of, no more are listed.
    """
    return list(islice(layout.slices(shapes), len(shapes) + n_stored + 1))


def _refuse_misfits(
    checkpoint: Checkpoint,
    pieces: Sequence[TensorSlice],
    is_extra_tensor: Callable[[str], bool],
    num_hidden_layers: int,
) -> None:
    """Raises CheckpointError unless the files hold just the tensors that config.json implies, but for known
    leftovers."""
    wanted = {piece.stored_name: piece.stored_shape for piece in pieces}
    missing = [name for name in wanted if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(
            "tensors are missing", where=checkpoint.directory, got=f"no {_some(missing)}",
            remedy="Compare config.json with the files: they may be of different models, or the upload incomplete.",
        )  # fmt: skip
    for name, info in checkpoint.tensors.items():
        where = f"{checkpoint.directory / info.file}, tensor {name!r}"
        if name not in wanted:
            if is_extra_tensor(name) or is_beyond_last_layer(name, num_hidden_layers):
                continue
            raise CheckpointError("unexpected tensor", where=where, remedy="config.json describes a model without it.")
        if info.shape != wanted[name]:
            raise CheckpointError("tensor of another shape", where=where, got=info.shape, expected=wanted[name])
        if info.dtype not in WEIGHT_DTYPES:
            expected = " or ".join(str(dtype) for dtype in WEIGHT_DTYPES)
            raise CheckpointError(
                "tensor of a dtype that is no weight's", where=where, got=info.dtype, expected=expected
            )


def _read(
    checkpoint: Checkpoint,
    pieces: Sequence[TensorSlice],
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    device: str | torch.device | None,
) -> dict[str, Tensor]:
    """Our tensors, read one piece at a time."""
    device = torch.get_default_device() if device is None else torch.device(device)
    total = sum(checkpoint.tensors[name].nbytes for name in {piece.stored_name for piece in pieces})
    with tqdm(total=total, desc="Loading", unit="B", unit_scale=True, disable=None, leave=False) as progress:

        def read(piece: TensorSlice) -> Tensor:
            part = checkpoint.read(piece.stored_name)[piece.stored_index]
            progress.update(part.nbytes)
            return part.to(device)

        return assemble(pieces, shapes, read, dtype=dtype, device=device)


def save(model: CausalLM, directory: str | Path, *, max_shard_size: int | str = "5GB", native: bool = False) -> None:
    """Writes config.json, generation_config.json and the weights in Hugging Face format; other files there stay.

    Every tensor goes where it was loaded from, by name and layout, and config.json says what it said but for what has
    changed. The directory is replaced in one step: whenever the process dies, it holds the old checkpoint or the new.

    Args:
        model: one of the zoo's.
        directory: made when it does not exist.
        max_shard_size: bytes of tensors in one file, as a number or like "5GB".
        native: as a new model is saved, whatever layout the checkpoint that the model came from had.

    Raises:
        ConfigError: the model is none of the zoo's.
        CheckpointError: the directory cannot be written, or a tensor cannot be stored, or the model has others than
            its architecture.
    """
    _refuse_changed(model, Path(directory))
    origin = None if native else model.origin
    files = {CONFIG_FILE: _config_json(model, origin)}
    if model.generation_config:
        files[GENERATION_FILE] = _json(model.generation_config)
    write_checkpoint(directory, _disk_tensors(model, origin), files, max_shard_size=max_shard_size)


def _refuse_changed(model: CausalLM, directory: Path) -> None:
    """Raises CheckpointError if modules were put in the place of others, as adapters are: nothing could load that."""
    ours = architecture_for(type(model)).build_on_meta(model.config, type(model)).state_dict().keys()
    own = model.state_dict().keys()
    strange, lacking = sorted(own - ours), sorted(ours - own)
    if strange or lacking:
        raise CheckpointError(
            "tensors other than the architecture's", where=directory, got=_some(strange) if strange else None,
            expected=_some(lacking) if lacking else None,
            remedy="Merge adapters into the weights, or take parametrizations off, before you save.",
        )  # fmt: skip


def _disk_tensors(model: CausalLM, origin: Origin | None) -> Mapping[str, Tensor]:
    """The tensors to save by their names on disk, in the layout of the origin or else that of a new model.

    The weight of a tied head goes once, unless the origin had it twice. Other weights that share memory, which no
    config tells of, go under every name.
    """
    layout = origin.layout if origin else architecture_for(type(model)).layout_of_new
    state: dict[str, Tensor] = model.state_dict()
    if model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight:
        for name in origin.absent if origin else (HEAD,):
            del state[name]
    extra_tensors = origin.extra_tensors if origin else {}
    pieces = [*layout.slices(shapes_of(state)), *Layout().slices(shapes_of(extra_tensors))]
    return StoredTensors(pieces, {**state, **extra_tensors})


def _config_json(model: CausalLM, origin: Origin | None) -> str:
    architecture = architecture_for(type(model))
    if origin is not None and model.config == origin.config:
        content = dict(origin.raw_config)
    else:
        ours = architecture.config_to_hf(model.config)
        # What our config tells it tells whole, by leaving entries out as well, and nothing may belie it.
        told = get_type_hints(type(model.config)).keys() | ALTERNATIVE_ENTRIES
        inherited = {key: value for key, value in (origin.raw_config if origin else {}).items() if key not in told}
        classes = {"architectures": [architecture.hf_class], "model_type": architecture.model_type}
        content = {**classes, **inherited, **ours}
    dtype = stored_dtype(content)
    if dtype != model.dtype and not (dtype is None and origin is not None):
        content.pop("dtype", None)
        content["torch_dtype"] = str(model.dtype).removeprefix("torch.")  # the spelling that every version reads
    return _json(content)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


class Saves(Protocol):
    """What can be uploaded with a model: a `Processor` or a `Tokenizer`."""

    def save_pretrained(self, directory: str | Path) -> None: ...


def push(
    model: CausalLM,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "Upload model",
    processor: Saves | None = None,
) -> str:
    """Uploads the model, and a small model card where the repository has none, and returns the commit's address.

    Args:
        model: one of the zoo's.
        repo_id: "org/name"; made when it does not exist.
        processor: the `Processor` or `Tokenizer` to upload in the same commit, in place of the one that the repository
            may have; None leaves that as it is.
        private: whether a new repository is private.
        token: by default the one that `hf auth login` stored.
        commit_message: of the one commit this makes.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        save(model, folder)
        stale = [SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors"]  # of an earlier model, unless uploaded anew
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


def _model_card(model: CausalLM, processor: Saves | None, repo_id: str) -> str:
    name = type(model).__name__
    parameters = sum(parameter.numel() for parameter in model.parameters())
    loads = [(f"from ligerzoo.models import {name}", f'model = {name}.from_pretrained("{repo_id}")')]
    if processor is not None:
        kind = type(processor).__name__
        loads.insert(0, (f"from ligerzoo import {kind}", f'{kind.lower()} = {kind}.from_pretrained("{repo_id}")'))
    imports, lines = map("\n".join, zip(*loads, strict=True))
    return f"""---
library_name: ligerzoo
pipeline_tag: {"image-text-to-text" if model.modalities else "text-generation"}
---
# {repo_id.split("/")[-1]}

A {name} with {parameters:,} parameters in {str(model.dtype).removeprefix("torch.")}, saved by ligerzoo in Hugging Face
format.

```python
{imports}

{lines}
```
"""


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
