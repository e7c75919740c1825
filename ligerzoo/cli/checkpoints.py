"""What commands do with checkpoints: load what the options name, and check and describe a new directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligerzoo.errors import LigerzooError

if TYPE_CHECKING:
    import torch

    from ligerzoo.models import CausalLM
    from ligerzoo.text.tokenizer import Tokenizer
    from ligerzoo.vision.processor import Processor


def load_model(options: argparse.Namespace) -> CausalLM:
    """Loads the model in the dtype and on the device of the options."""
    from ligerzoo.hub import AutoModel

    return AutoModel.from_pretrained(
        options.model, revision=options.revision, dtype=options.dtype, device=find_device(options.device)
    )


def load_drafts(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of speculative decoding, with the model of --draft."""
    from ligerzoo.hub import AutoModel

    if options.draft is None:
        return {"prompt_lookup_num_tokens": options.prompt_lookup}
    device = find_device(options.device)
    return {"assistant_model": AutoModel.from_pretrained(options.draft, dtype=options.dtype, device=device)}


def load_tokenizer(options: argparse.Namespace) -> Tokenizer:
    """Loads the tokenizer of the checkpoint."""
    from ligerzoo.text.tokenizer import Tokenizer

    return Tokenizer.from_pretrained(options.model, revision=options.revision)


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
        raise LigerzooError(
            "the meta device has no memory for weights", where="--device", got=name, expected="cpu or cuda"
        )
    return device


def find_cache_dtype(name: str) -> torch.dtype | None:
    """Returns the dtype of KV caches with this name. None, the model's own choice, for "auto"."""
    import torch

    return None if name == "auto" else getattr(torch, name)


def refuse_existing_files(target: Path, command: str) -> None:
    """Raises LigerzooError unless the target of a command is a new or empty directory."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        remedy = f"Choose another directory; {command} never overwrites files."
        raise LigerzooError("already exists", where=target, expected="a new or empty directory", remedy=remedy)


def print_size(directory: Path) -> None:
    """Prints the number and size of the files in a new checkpoint."""
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory}: {len(list(directory.iterdir()))} files, {size:,} bytes")
