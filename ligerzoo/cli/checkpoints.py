"""What commands do with checkpoints: load what the options name, and check and describe a new directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligerzoo.errors import LigerzooError

if TYPE_CHECKING:
    import torch

    from ligerzoo.models import CausalLM
    from ligerzoo.text.tokenizer import Tokenizer
    from ligerzoo.vision.processor import Processor


def find_base_model(options: argparse.Namespace) -> None:
    """Replaces an adapter in `options.model` by its base model, and sets `options.adapter` to the adapter's directory.

    The tokenizer is the adapter's if it has one, such as after adding tokens.

    Raises:
        CheckpointError: there is no such directory, or no such repository on the hub.
        LigerzooError: adapter_config.json names no base model, or one that is not found here.
    """
    from ligerzoo.files.locate import ADAPTER_CONFIG_FILE, CONFIG_FILE, CONFIG_FILES, locate_files
    from ligerzoo.files.untrusted import read_json

    directory = locate_files(options.model, CONFIG_FILES, revision=options.revision)
    if not (directory / ADAPTER_CONFIG_FILE).is_file() or (directory / CONFIG_FILE).exists():
        return
    raw = read_json(directory / ADAPTER_CONFIG_FILE)
    base, problem = raw.get("base_model_name_or_path"), None
    if getattr(options, "adapter", None) is not None:
        problem = "MODEL is an adapter too"
    elif not isinstance(base, str) or not base:
        problem = "the adapter does not say which base model it has"
    elif (directory / base).is_dir():
        base = str(directory / base)
    elif not Path(base).is_dir() and (base.startswith((".", "/", "~")) or base.count("/") != 1):
        problem = "the base model of the adapter is not here"
    if problem:
        where, got = f"{options.model}, base_model_name_or_path", repr(base)[:200]
        remedy = f"Merge them and use the result: `ligerzoo fuse BASE {options.model} OUTPUT`."
        raise LigerzooError(problem, where=where, got=got, remedy=remedy)
    if not Path(options.model).is_dir():
        directory, options.revision = _download_adapter(options.model, directory.name), None
    if options.revision is None and isinstance(raw.get("revision"), str):
        options.revision = raw["revision"]
    if getattr(options, "tokenizer", None) is None and (directory / "tokenizer.json").exists():
        options.tokenizer = str(directory)
    if getattr(options, "name", "") is None:  # of the server
        options.name = model_name(options.model)
    options.model, options.adapter = base, str(directory)


def _download_adapter(repository: str, commit: str) -> Path:
    """Returns the directory of an adapter's files and tokenizer, of the commit that its config was read from."""
    from ligerzoo.adapters.peft_config import CONFIG_FILE, WEIGHT_FILE
    from ligerzoo.files.locate import locate_files
    from ligerzoo.text.tokenizer_files import FILE_PATTERNS

    return locate_files(repository, [CONFIG_FILE, WEIGHT_FILE, *FILE_PATTERNS], revision=commit)


def model_name(name_or_path: str) -> str:
    """Returns the name of a directory, or the id of a repository on the hub."""
    return Path(name_or_path).resolve().name if Path(name_or_path).is_dir() else name_or_path


def load_model(options: argparse.Namespace) -> CausalLM:
    """Loads the model of the options, with their adapter, dtype and device; says if the stored dtype is slow there."""
    from ligerzoo.device import hint_of_dtype
    from ligerzoo.hub import AutoModel

    device = find_device(options.device)
    model = AutoModel.from_pretrained(options.model, revision=options.revision, dtype=options.dtype, device=device)
    if options.dtype == "auto" and (hint := hint_of_dtype(model.dtype, device)) is not None:
        print(hint, file=sys.stderr)
    if (adapter := getattr(options, "adapter", None)) is not None:
        from ligerzoo.adapters import load_adapter
        from ligerzoo.adapters.loading import resize_for_adapter

        resize_for_adapter(model, adapter)
        load_adapter(model, adapter)
    return model


def load_drafts(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of speculative decoding, with the model of --draft."""
    from ligerzoo.hub import AutoModel

    if options.draft is None:
        return {"prompt_lookup_num_tokens": options.prompt_lookup}
    device = find_device(options.device)
    return {"assistant_model": AutoModel.from_pretrained(options.draft, dtype=options.dtype, device=device)}


def load_tokenizer(options: argparse.Namespace) -> Tokenizer:
    """Loads the tokenizer of the checkpoint or adapter."""
    from ligerzoo.text.tokenizer import Tokenizer

    return Tokenizer.from_pretrained(text_source(options), revision=options.revision)


def text_source(options: argparse.Namespace) -> str:
    """Returns the directory or hub id of the tokenizer."""
    source: str = getattr(options, "tokenizer", None) or options.model
    return source


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
