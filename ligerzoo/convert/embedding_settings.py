"""Settings of embedding models in the files of sentence-transformers, in the spellings of all versions.

New files have the spelling that all versions read.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import get_args

from ligerzoo.checks import AT_LEAST_1, is_list, is_text
from ligerzoo.entries import BOOLEAN, STRING, Entries, JsonType, check_one_of, is_object, list_of, object_entry
from ligerzoo.errors import ConfigError, LigerzooError, first_names, unknown_names
from ligerzoo.files.layout import CONFIG_FILE, MODULES_FILE, SETTINGS_FILE
from ligerzoo.files.modules import Module, ModuleFiles
from ligerzoo.layers.pooling import POOLING_MODES
from ligerzoo.models.embedding import (
    DenseStage,
    EmbeddingSettings,
    EmbeddingStage,
    NormalizeStage,
    PoolingStage,
    Similarity,
)

_CLASSES: Mapping[type, str] = {PoolingStage: "Pooling", DenseStage: "Dense", NormalizeStage: "Normalize"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Entries of older versions, in the order in which vectors are concatenated."""

_TORCH_ACTIVATIONS = {
    "tanh": "torch.nn.modules.activation.Tanh",
    "identity": "torch.nn.modules.linear.Identity",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
    "silu": "torch.nn.modules.activation.SiLU",
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
}
_SETTINGS = ("prompts", "default_prompt_name", "similarity", "dimensions")
"""Settings in config_sentence_transformers.json."""

_SIMILARITIES: Mapping[str, str] = {**{name: name for name in get_args(Similarity)}, "dot_score": "dot"}
_EMBEDDING, _TOKENS = "sentence_embedding", "token_embeddings"
_MODALITIES = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_REPOSITORY = ("subfolder", "token", "cache_dir", "revision", "local_files_only", "trust_remote_code")
_ARGUMENTS = {
    ("model_args", "model_kwargs"): ("torch_dtype", "dtype", "attn_implementation", "add_pooling_layer"),
    ("tokenizer_args", "processor_kwargs"): ("padding_side", "use_fast", "model_max_length"),
    ("config_args", "config_kwargs"): (),
}
"""Arguments of transformers in the config of the first module that change nothing here, or that we read."""

_MODE_LIST = list_of(STRING, "a pooling mode, or a list of them")
_PROMPTS = JsonType[Mapping[str, str]](
    "an object of texts", is_object, lambda value: all(map(is_text, value.values())), problem="invalid value"
)
_FEATURES = JsonType[int]("1 to 16,777,216", AT_LEAST_1.accepts, lambda n: n <= 2**24, problem="not a size")
_LENGTH = JsonType[int]("an integer, 1 or more", AT_LEAST_1.accepts, problem="not a number of tokens")


def read_settings(files: ModuleFiles, features: int) -> EmbeddingSettings:
    """Returns what the files of sentence-transformers say.

    Raises:
        ConfigError: an entry is unknown, or has an invalid or unsupported value.
    """
    first, *others = files.modules
    kinds = [module.class_name for module in files.modules]
    where = files.where(MODULES_FILE)
    if first != Module("", "Transformer") or kinds[1:2] != ["Pooling"] or not {*kinds[2:]} <= {"Dense", "Normalize"}:
        expected = "Transformer in the checkpoint's directory, then Pooling, then any of Dense and Normalize"
        raise ConfigError("modules are not supported", where=where, got=", ".join(kinds), expected=expected)
    if len({path for path, _ in files.modules}) < len(files.modules):
        raise ConfigError("two modules have one directory", where=where, got=first_names([path for path, _ in others]))
    stages: list[EmbeddingStage] = []
    size = features
    for path, kind in others:
        name = f"{path}/{CONFIG_FILE}"
        reader = _Reader(files.where(name), files.entries.get(name, {}))
        stages.append(_READERS[kind](reader, path, size))
        reader.refuse_others()
        size = stages[-1].output_size(size)
    reader = _Reader(files.where(files.transformer), files.entries.get(files.transformer, {}))
    max_length, lowercase = _read_transformer(reader)
    reader.refuse_others()
    return _with_prompts(EmbeddingSettings(stages=tuple(stages), max_length=max_length, lowercase=lowercase), files)


def _with_prompts(settings: EmbeddingSettings, files: ModuleFiles) -> EmbeddingSettings:
    """Returns settings with those that config_sentence_transformers.json has."""
    reader = _Reader(files.where(SETTINGS_FILE), files.entries.get(SETTINGS_FILE, {}))
    reader.require("model_type", "SentenceTransformer")
    reader.require("similarity_fn_name", *_SIMILARITIES)
    prompts = _PROMPTS.read(reader.get("prompts") or {}, f"{reader.where}, prompts")
    return changed_settings(
        settings,
        f"{reader.where}, ",
        prompts=dict(prompts),
        default_prompt_name=reader.get("default_prompt_name"),
        similarity=_SIMILARITIES[str(reader.get("similarity_fn_name") or "cosine")],
        dimensions=reader.get("truncate_dim"),
    )


def changed_settings(settings: EmbeddingSettings, where: str, **changes: object) -> EmbeddingSettings:
    """Returns settings with other values. An error about one begins with `where`."""
    try:
        return replace(settings, **changes)  # type: ignore[arg-type]
    except LigerzooError as error:
        name = where + str(error.where).rpartition(": ")[2]
        raise ConfigError(error.what, where=name, got=error.got, expected=error.expected) from error


class _Reader:
    """Reads the entries of one module's config, and refuses all others.

    Args:
        where: the file.
        entries: its content.
    """

    def __init__(self, where: str, entries: Entries) -> None:
        self.where, self._entries = where, dict(entries)
        self._read: list[str] = []

    def get(self, *names: str) -> object:
        """Returns the first of these entries that is not null, or None."""
        self._read += names
        return next((self._entries[name] for name in names if self._entries.get(name) is not None), None)

    def require(self, name: str, *accepted: object) -> None:
        """Raises ConfigError unless an entry is absent, null or accepted."""
        check_one_of(self.get(name), (None, *accepted), f"{self.where}, {name}")

    def flag(self, name: str, default: bool) -> bool:
        """Returns an entry that must be true or false."""
        value = self.get(name)
        return default if value is None else BOOLEAN.read(value, f"{self.where}, {name}")

    def size(self, size: int, *names: str) -> None:
        """Raises ConfigError unless an entry is a number of features, `size`."""
        value = self.get(*names)
        if value is not None and value != size:
            what, where = "another number of features than the module before has", f"{self.where}, {names[0]}"
            raise ConfigError(what, where=where, got=repr(value)[:50], expected=size)

    def refuse_others(self) -> None:
        """Raises ConfigError if there are other entries than those that were read."""
        for name, nearest in unknown_names(self._entries, self._read):
            raise ConfigError("unknown entry", where=f"{self.where}, {name}", remedy=nearest)


def read_modes(value: object, where: str) -> tuple[str, ...]:
    """Returns the modes of a pooling from one or a list of them."""
    modes = [value] if is_text(value) else list(value) if is_list(value) else value
    for mode in _MODE_LIST.read(modes, where) or [""]:
        check_one_of(mode, POOLING_MODES, where)
    return tuple(_MODE_LIST.read(modes, where))


def _read_pooling(reader: _Reader, path: str, size: int) -> PoolingStage:
    reader.size(size, "embedding_dimension", "word_embedding_dimension")
    chosen = [mode for name, mode in _OLD_MODES.items() if reader.flag(name, default=False)]
    given = reader.get("pooling_mode")
    modes = tuple(chosen or ["mean"]) if given is None else read_modes(given, f"{reader.where}, pooling_mode")
    return PoolingStage(path=path, modes=modes, include_prompt=reader.flag("include_prompt", default=True))


def _read_dense(reader: _Reader, path: str, size: int) -> DenseStage:
    _require_embeddings(reader)
    reader.size(size, "in_features")
    out_features = _FEATURES.read(reader.get("out_features"), f"{reader.where}, out_features")
    activation = reader.get("activation_function")
    names = {name: ours for ours, name in _TORCH_ACTIVATIONS.items()}
    names |= {f"torch.nn.{name.rpartition('.')[2]}": ours for name, ours in names.items()}
    check_one_of(activation, (None, *names), f"{reader.where}, activation_function")
    bias, residual = reader.flag("bias", default=True), reader.flag("use_residual", default=False)
    ours = "tanh" if activation is None else names[str(activation)]
    return DenseStage(path=path, out_features=out_features, bias=bias, activation=ours, residual=residual)


def _read_normalize(reader: _Reader, path: str, size: int) -> NormalizeStage:
    _require_embeddings(reader)
    return NormalizeStage(path=path)


def _require_embeddings(reader: _Reader) -> None:
    """Raises ConfigError unless a module reads and writes the embeddings of texts."""
    for name in ("module_input_name", "module_output_name"):
        reader.require(name, _EMBEDDING)


_READERS: Mapping[str, Callable[[_Reader, str, int], EmbeddingStage]] = {
    "Pooling": _read_pooling,
    "Dense": _read_dense,
    "Normalize": _read_normalize,
}


def _read_transformer(reader: _Reader) -> tuple[int | None, bool]:
    """Returns `max_length` and `lowercase` of the settings."""
    reader.require("transformer_task", "feature-extraction")
    reader.require("module_output_name", _TOKENS)
    for name in ("query_length", "document_length", "query_expansion"):
        reader.require(name)
    reader.get("unpad_inputs")
    modalities = reader.get("modality_config")
    if modalities not in (None, _MODALITIES):
        what, where = "inputs other than plain texts are not supported", f"{reader.where}, modality_config"
        raise ConfigError(what, where=where, got=repr(modalities)[:200], expected=json.dumps(_MODALITIES))
    lengths = [reader.get("max_seq_length")]
    for names, accepted in _ARGUMENTS.items():
        arguments = object_entry({names[-1]: reader.get(*names)}, names[-1])
        for name, _ in unknown_names(arguments, [*accepted, *_REPOSITORY]):
            raise ConfigError("argument is not supported", where=f"{reader.where}, {names[-1]}", got=name)
        lengths.append(arguments.get("model_max_length"))
    processing = object_entry({"processing_kwargs": reader.get("processing_kwargs")}, "processing_kwargs")
    text = object_entry(processing, "text")
    for name in [name for name in processing if name != "text"] + [name for name in text if name != "max_length"]:
        raise ConfigError("argument is not supported", where=f"{reader.where}, processing_kwargs", got=name)
    lengths.insert(0, text.get("max_length"))
    length = next((length for length in lengths if length is not None), None)
    max_length = None if length is None else _LENGTH.read(length, f"{reader.where}, max_seq_length")
    return max_length, reader.flag("do_lower_case", default=False)


def written_files(settings: EmbeddingSettings, files: ModuleFiles, features: int) -> Iterator[tuple[str, bytes]]:
    """Yields the names and contents of the files of sentence-transformers that are to change."""
    before = read_settings(files, features) if files.modules else None
    modules = (Module("", "Transformer"), *(Module(stage.path, _CLASSES[type(stage)]) for stage in settings.stages))
    if files.modules != modules:
        entries = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
        yield MODULES_FILE, _json([{"idx": i, "name": str(i), **entry} for i, entry in enumerate(entries)])
    size, stages = features, () if before is None else before.stages
    for stage in settings.stages:
        if stage not in stages:
            yield f"{stage.path}/{CONFIG_FILE}", _json(_stage_entries(stage, size))
        size = stage.output_size(size)
    own: dict[str, object] = {
        "prompts": dict(settings.prompts),
        "default_prompt_name": settings.default_prompt_name,
        "similarity_fn_name": settings.similarity,
    }
    if settings.dimensions is not None:
        own["truncate_dim"] = settings.dimensions
    if before is None or any(getattr(settings, name) != getattr(before, name) for name in _SETTINGS):
        others = {n: v for n, v in files.entries.get(SETTINGS_FILE, {}).items() if n != "truncate_dim"}
        yield SETTINGS_FILE, _json({**others, **own})
    if before is None or (settings.max_length, settings.lowercase) != (before.max_length, before.lowercase):
        name = files.transformer
        own = {"max_seq_length": settings.max_length, "do_lower_case": settings.lowercase}
        yield name, _json({**files.entries.get(name, {}), **own})


def _stage_entries(stage: EmbeddingStage, size: int) -> dict[str, object]:
    """Returns the config of a module in the spelling that all versions of sentence-transformers read."""
    match stage:
        case PoolingStage():
            flags = {name: mode in stage.modes for name, mode in _OLD_MODES.items()}
            if stage.modes == tuple(mode for mode in _OLD_MODES.values() if mode in stage.modes):
                return {"word_embedding_dimension": size, **flags, "include_prompt": stage.include_prompt}
            modes = list(stage.modes)
            return {"embedding_dimension": size, "pooling_mode": modes, "include_prompt": stage.include_prompt}
        case DenseStage():
            entries: dict[str, object] = {"in_features": size, "out_features": stage.out_features, "bias": stage.bias}
            entries["activation_function"] = _TORCH_ACTIVATIONS[stage.activation]
            return {**entries, "use_residual": True} if stage.residual else entries
    return {}


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
