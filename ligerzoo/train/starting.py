"""What a run begins with: the model, the number of steps, and the plan that is printed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from ligerzoo.errors import LigerzooError
from ligerzoo.files.checkpoint import INDEX_FILE, SINGLE_FILE
from ligerzoo.hub import AutoModel, read_config
from ligerzoo.models import CausalLM


def checkpoint_directory(model: str | Path) -> str:
    """Returns the directory of a config.json; other names of a checkpoint unchanged."""
    path = Path(model)
    return str(path.parent if path.suffix == ".json" and path.is_file() else model)


def load_or_build(model: str | Path, *, dtype: str, device: torch.device) -> CausalLM:
    """Loads a checkpoint, or builds a model with random weights from a config without weights.

    Args:
        model: hub id, directory, or the path of a config.json, whose directory is not searched for weights.
        dtype: dtype of the weights; "auto" for that of the checkpoint, and float32 for random weights.
        device: device of the weights.
    """
    directory = checkpoint_directory(model)
    is_config = directory != str(model)
    if is_config or (os.path.isdir(directory) and not has_weights(Path(directory))):
        dtype = "float32" if dtype == "auto" else dtype
        return AutoModel.from_config(read_config(directory), dtype=dtype, device=device)
    return AutoModel.from_pretrained(model, dtype=dtype, device=device)


def has_weights(directory: Path) -> bool:
    """Returns whether a directory has weights in safetensors files."""
    return any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))


def count_steps(batches: Iterable[object], accumulate: int) -> int:
    """Returns the number of steps in all batches, which this reads.

    Raises:
        LigerzooError: There are no batches.
    """
    count = sum(1 for _ in batches)
    if not count:
        raise LigerzooError("the data has no samples", where="option data")
    return -(-count // accumulate)


def describe_run(
    model: CausalLM, *, first_step: int, steps: int, micro_batches: int, batch_size: int, seq_length: int
) -> str:  # fmt: skip
    """Returns the plan of a run: sizes of the model and of a step, and the number of steps."""
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    positions = micro_batches * batch_size * seq_length
    dtypes = " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
    done = f"; {first_step:,} steps are done" if first_step else ""
    return (
        f"{type(model).__name__}: {count:,} parameters in {dtypes}, {trained:,} of them trained, on {model.device}\n"
        f"{steps:,} steps of {micro_batches} x {batch_size} x {seq_length} = {positions:,} tokens with padding; "
        f"{steps * positions:,} in all{done}"
    )
