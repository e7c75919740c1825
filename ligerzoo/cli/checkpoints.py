"""What commands do with checkpoints: load what the options name, and check and describe a new directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ligerzoo.checks import is_text
from ligerzoo.errors import ConfigError, LigerzooError

if TYPE_CHECKING:
    import torch

    from ligerzoo.models import CausalLM, EmbeddingModel
    from ligerzoo.models.language_model import LanguageModel
    from ligerzoo.text.tokenizer import Tokenizer
    from ligerzoo.vision.processor import Processor


@dataclass(frozen=True)
class ModelChoice:
    """The model that a command loads.

    Attributes:
        model: directory or hub id of the checkpoint; of the base model, if there is an adapter.
        revision: branch, tag or commit on the hub.
        tokenizer: directory or hub id of the tokenizer; None for that of the model.
        adapter: directory or hub id of an adapter.
        dtype: dtype of the weights.
        device: name of the device, see `find_device`.
    """

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    adapter: str | None = None
    dtype: str = "auto"
    device: str | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> ModelChoice:
        """Returns what the options of a command say; a command may lack some of them."""
        return cls(**{one.name: getattr(options, one.name) for one in fields(cls) if one.name in options})

    @property
    def text_source(self) -> str:
        """The directory or hub id of the tokenizer."""
        return self.tokenizer or self.model


def find_base_model(choice: ModelChoice) -> ModelChoice:
    """Returns the choice of the base model and its adapter, if the model is an adapter or there is one.

    The tokenizer is the adapter's if it has one, such as after adding tokens.

    Raises:
        CheckpointError: there is no such directory, or no such repository on the hub; or the adapter is of a kind that
            cannot be loaded.
        LigerzooError: adapter_config.json names no base model, or one that is not found here.
    """
    from ligerzoo.files.layout import ADAPTER_CONFIG_FILE, CONFIG_FILE, CONFIG_FILES
    from ligerzoo.files.locate import locate_files

    directory = locate_files(choice.model, CONFIG_FILES, revision=choice.revision)
    if (directory / ADAPTER_CONFIG_FILE).is_file() and not (directory / CONFIG_FILE).exists():
        if choice.adapter is not None:
            raise _two_adapters(choice.model, choice.adapter)
        base, revision = _base_of(directory, choice)
        directory = directory if Path(choice.model).is_dir() else _download_adapter(choice.model, directory.name)
        return _with_adapter(replace(choice, model=base, revision=revision), directory)
    if choice.adapter is None:
        return choice
    if Path(choice.adapter).is_dir():
        return _with_adapter(choice, Path(choice.adapter))
    commit = locate_files(choice.adapter, [ADAPTER_CONFIG_FILE]).name
    return _with_adapter(choice, _download_adapter(choice.adapter, commit))


def _two_adapters(model: str, adapter: str) -> LigerzooError:
    """Returns the error of a model that is an adapter although an adapter is given, which may be the model."""
    from ligerzoo.files.layout import CONFIG_FILE, CONFIG_FILES
    from ligerzoo.files.locate import locate_files

    if not (locate_files(adapter, CONFIG_FILES) / CONFIG_FILE).exists():
        return LigerzooError("the base model is an adapter too", where=model, expected="the model that it adapts")
    got, remedy = f"an adapter as the model, and {adapter} as the adapter", f"`{adapter} --adapter {model}`"
    remedy = f"Exchange them: `ligerzoo fuse {adapter} {model} OUTPUT`, or for other commands {remedy}."
    return LigerzooError("the base model and the adapter are swapped", where=model, got=got, remedy=remedy)


def _base_of(directory: Path, choice: ModelChoice) -> tuple[str, str | None]:
    """Returns the base model that an adapter names, and its revision."""
    from ligerzoo.files.layout import ADAPTER_CONFIG_FILE
    from ligerzoo.files.untrusted import read_json

    raw = read_json(directory / ADAPTER_CONFIG_FILE)
    base, problem = raw.get("base_model_name_or_path"), None
    if not is_text(base) or not base:
        problem = "the adapter does not say which base model it has"
    elif (directory / base).is_dir():
        base = str(directory / base)
    elif not Path(base).is_dir() and (base.startswith((".", "/", "~")) or base.count("/") != 1):
        problem = "the base model of the adapter is not here"
    if problem:
        where, got, name = f"{choice.model}, base_model_name_or_path", repr(base)[:200], choice.model
        remedy = f"Name the base: `BASE --adapter {name}`. Or merge them: `ligerzoo fuse BASE {name} OUTPUT`."
        raise LigerzooError(problem, where=where, got=got, remedy=remedy)
    revision = choice.revision if Path(choice.model).is_dir() else None
    return str(base), str(raw["revision"]) if revision is None and is_text(raw.get("revision")) else revision


def _with_adapter(choice: ModelChoice, directory: Path) -> ModelChoice:
    """Returns the choice with an adapter, whose tokenizer is used if it has one.

    Raises:
        CheckpointError: adapter_config.json is missing, or describes what cannot be loaded.
    """
    from ligerzoo.adapters.peft_config import read_adapter_config

    read_adapter_config(directory)  # before a large base model is loaded
    tokenizer = choice.tokenizer
    if tokenizer is None and (directory / "tokenizer.json").exists():
        tokenizer = str(directory)
    return replace(choice, tokenizer=tokenizer, adapter=str(directory))


def _download_adapter(repository: str, commit: str) -> Path:
    """Returns the directory of an adapter's files and tokenizer, of the commit that its config was read from."""
    from ligerzoo.adapters.peft_config import CONFIG_FILE, WEIGHT_FILE
    from ligerzoo.files.layout import TOKENIZER_FILES
    from ligerzoo.files.locate import locate_files

    return locate_files(repository, [CONFIG_FILE, WEIGHT_FILE, *TOKENIZER_FILES], revision=commit)


def model_name(name_or_path: str) -> str:
    """Returns the name of a directory, or the id of a repository on the hub."""
    return Path(name_or_path).resolve().name if Path(name_or_path).is_dir() else name_or_path


def load_model(choice: ModelChoice) -> CausalLM:
    """Loads the model and its adapter, and says if the dtype is not the stored one."""
    model = load_weights(choice)
    _add_adapter(model, choice)
    return model


def load_embedding_model(choice: ModelChoice, **options: object) -> EmbeddingModel:
    """Loads an embedding model and its adapter, and says if the dtype is not the stored one.

    Args:
        choice: the model.
        options: settings that take precedence over the files of the checkpoint; None for those of the files.
    """
    from ligerzoo.hub import AutoModelForEmbedding

    load: Callable[..., EmbeddingModel] = AutoModelForEmbedding.from_pretrained
    load = partial(load, **options)
    dtype, device = _dtype_of(choice, load), find_device(choice.device)
    model = load(choice.model, revision=choice.revision, dtype=dtype, device=device)
    _add_adapter(model, choice)
    if choice.tokenizer is not None:
        model.tokenizer = load_tokenizer(choice)
    return model


def load_weights(choice: ModelChoice) -> CausalLM:
    """Loads the model without its adapter, and says if the dtype is not the stored one."""
    from ligerzoo.convert import OTHER_ARCHITECTURE
    from ligerzoo.hub import AutoModel

    try:
        dtype, device = _dtype_of(choice, AutoModel.from_pretrained), find_device(choice.device)
        return AutoModel.from_pretrained(choice.model, revision=choice.revision, dtype=dtype, device=device)
    except ConfigError as error:
        if error.what != OTHER_ARCHITECTURE:
            raise
        remedy = "Encoders have embeddings and fill in masked tokens: `ligerzoo embed`, AutoModelForMaskedLM."
        raise error.replaced(remedy=remedy) from error


def _dtype_of(choice: ModelChoice, load: Callable[..., LanguageModel]) -> str:
    """Returns the dtype of the weights: float32 if none is chosen and the device would emulate the stored one.

    Args:
        choice: the model.
        load: the function that loads it.
    """
    from ligerzoo.device import emulated_dtypes, loads_as_float32

    if choice.dtype == "auto" and (emulated := emulated_dtypes(find_device(choice.device))):
        stored = load(choice.model, revision=choice.revision, device="meta").dtype
        if stored in emulated:
            print(loads_as_float32(stored), file=sys.stderr)
            return "float32"
    return choice.dtype


def _add_adapter(model: LanguageModel, choice: ModelChoice) -> None:
    """Loads the adapter, if there is one."""
    if choice.adapter is not None:
        from ligerzoo.adapters import load_adapter
        from ligerzoo.adapters.loading import resize_for_adapter

        resize_for_adapter(model, choice.adapter)
        load_adapter(model, choice.adapter)


def embedding_rows(model: CausalLM) -> int:
    """Returns the number of tokens that the model's embedding has."""
    return len(model.get_parameter("model.embed_tokens.weight"))


def load_tokenizer(choice: ModelChoice, chat_template: Path | None = None) -> Tokenizer:
    """Loads the tokenizer of the checkpoint or adapter, with the chat template of a file, if there is one."""
    from ligerzoo.text.tokenizer import Tokenizer

    return with_template(Tokenizer.from_pretrained(choice.text_source, revision=choice.revision), chat_template)


def with_template(tokenizer: Tokenizer, file: Path | None) -> Tokenizer:
    """Returns the tokenizer, with the chat template of a file, if there is one."""
    from ligerzoo.text.chat_template import read_template

    if file is not None:
        tokenizer.set_chat_template(read_template(file), str(file))
    return tokenizer


def find_preprocessor(model: str, revision: str | None) -> Processor | Tokenizer | None:
    """Returns the processor or tokenizer of a checkpoint; None if it has none."""
    from ligerzoo.files.locate import locate_files
    from ligerzoo.vision.processor import load_processor_or_tokenizer

    if not (locate_files(model, ["tokenizer.json"], revision=revision) / "tokenizer.json").exists():
        return None
    return load_processor_or_tokenizer(model, revision=revision)


def find_device(name: str | None) -> torch.device:
    """Returns the device with this name. None returns the first GPU or, without one, the CPU.

    Raises:
        LigerzooError: the device does not exist, or is the meta device.
    """
    import torch

    from ligerzoo.device import available_device

    device = available_device(name or ("cuda" if torch.cuda.is_available() else "cpu"), where="--device")
    if device.type == "meta":
        what = "the meta device has no memory for weights"
        raise LigerzooError(what, where="--device", got=name, expected="cpu or cuda")
    return device


def find_cache_dtype(name: str) -> torch.dtype | None:
    """Returns the dtype of KV caches with this name. None, the model's own choice, for "auto"."""
    import torch

    return None if name == "auto" else getattr(torch, name)


@contextmanager
def new_directory(target: Path, command: str) -> Iterator[Path]:
    """Gives the target of a command, a new or empty directory, to the block that writes it, and prints its size.

    Raises:
        LigerzooError: the target has files.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        remedy = f"Choose another directory; {command} never overwrites files."
        raise LigerzooError("already exists", where=target, expected="a new or empty directory", remedy=remedy)
    yield target
    sizes = [path.stat().st_size for path in target.iterdir()]
    print(f"{target}: {len(sizes)} files, {sum(sizes):,} bytes")


@contextmanager
def package_of(extra: str, *packages: str, what: str, where: str | None = None) -> Iterator[None]:
    """Names the extra of ligerzoo to install if an import in the block lacks one of its packages."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in packages:
            raise
        what = f"{what} the package {package}, which is not installed"
        raise LigerzooError(what, where=where, remedy=f"Run `pip install ligerzoo[{extra}]`.") from error
