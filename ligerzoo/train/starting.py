"""What a run begins with: a model in one or several processes, batches, the number of steps, and what is printed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ligerzoo.device import hint_of_dtype
from ligerzoo.files.layout import INDEX_FILE, SINGLE_FILE
from ligerzoo.hub import AutoModel, read_config
from ligerzoo.models import CausalLM
from ligerzoo.parallel import initialize_sharded, load_sharded, shard_model
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train import processes
from ligerzoo.train.data import PackedBatches, PaddedBatches, SampleStream
from ligerzoo.train.data.stream import no_samples
from ligerzoo.train.run_options import BatchOptions
from ligerzoo.vision.processor import Processor


def checkpoint_directory(model: str | Path) -> str:
    """Returns the directory of a config.json; other names of a checkpoint unchanged."""
    path = Path(model)
    return str(path.parent if path.suffix == ".json" and path.is_file() else model)


def open_model(
    model: str | Path,
    *,
    dtype: str,
    device: torch.device,
    new: bool = False,
    adapt: Callable[[CausalLM], object] | None = None,
    param_dtype: torch.dtype | None = None,
) -> CausalLM:
    """Loads a checkpoint, or builds a model with random weights, in training mode. Several processes shard it (FSDP2).

    Args:
        model: hub id or directory; if `new`, also the path of a config.json, whose directory is not searched for
            weights.
        dtype: dtype of the weights; "auto" for that of the checkpoint, and float32 for random weights.
        device: device of the weights; meta for shapes alone, which are not sharded.
        new: whether a config without weights gets random weights; otherwise it is an error.
        adapt: called with the model before it is sharded, to add adapters or to freeze parameters. Several processes
            then read the whole model from memory-mapped files, which they share.
        param_dtype: dtype in which several processes compute, see `shard_model`.
    """
    directory, is_config = checkpoint_directory(model), lacks_weights(model)
    is_alone = processes.world_size() == 1 or device.type == "meta"
    build: Callable[[torch.device], CausalLM]
    if new and is_config:
        dtype = "float32" if dtype == "auto" else dtype
        config = read_config(directory)

        def build(device: torch.device) -> CausalLM:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                built = AutoModel.from_config(config, dtype=dtype, device=device)
            if device.type != "meta":
                built.init_weights()  # from the seed, as `initialize_sharded` does; constructors have another order
            return built
    else:

        def build(device: torch.device) -> CausalLM:
            return AutoModel.from_pretrained(model, dtype=dtype, device=device)

    if is_alone or adapt is not None:
        built = build(device if is_alone else torch.device("cpu"))
        if adapt is not None:
            adapt(built)
        return built.train() if is_alone else shard_model(built, param_dtype=param_dtype).train()
    if new and is_config:
        built = shard_model(build(torch.device("meta")), param_dtype=param_dtype)
        initialize_sharded(built)
        return built.train()
    return load_sharded(model, dtype=dtype, param_dtype=param_dtype).train()


def tokenizer_of(processor: Processor | Tokenizer) -> Tokenizer:
    """Returns the tokenizer of a processor; a tokenizer unchanged."""
    return processor.tokenizer if isinstance(processor, Processor) else processor


def has_weights(directory: Path) -> bool:
    """Returns whether a directory has weights in safetensors files."""
    return any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))


def lacks_weights(model: str | Path) -> bool:
    """Returns whether MODEL is a config.json, or a directory without weights."""
    directory = checkpoint_directory(model)
    return directory != str(model) or (os.path.isdir(directory) and not has_weights(Path(directory)))


def padding_token(tokenizer: Tokenizer, embedding_rows: int) -> int:
    """Returns the token that fills rows and is not trained: for padding, or else the end of a sequence, or 0."""
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in tokens if token is not None and token < embedding_rows), 0)


def make_batches(
    stream: SampleStream, tokenizer: Tokenizer, *, packing: str, batch_size: int, seq_length: int, pin_memory: bool,
    embedding_rows: int, read_images: bool = True,
) -> PackedBatches | PaddedBatches:  # fmt: skip
    """Returns batches of this process.

    Args:
        stream: samples; the same in all processes.
        tokenizer: see `padding_token`.
        embedding_rows: rows of the model's embedding.
        packing: "none" for a sample in each row; "separate" or "whole" see `PackedBatches`; "auto" for its default.
        batch_size: rows of this process.
        seq_length: tokens of a row.
        pin_memory: whether the tensors are in pinned memory, to copy them to a GPU.
        read_images: whether batches have the pixels of images; False to count batches.
    """
    padding = padding_token(tokenizer, embedding_rows)
    rows: dict[str, Any] = {
        "batch_size": batch_size, "pad_token_id": padding, "rank": processes.rank(),
        "world_size": processes.world_size(), "pin_memory": pin_memory, "read_images": read_images,
    }  # fmt: skip
    if packing == "none":
        return PaddedBatches(stream, **rows)
    documents: Any = "concatenate" if packing == "auto" else packing
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id} if packing == "separate" else {}
    return PackedBatches(stream, seq_length=seq_length, documents=documents, **ends, **rows)


def count_steps(batches: Iterable[object], accumulate: int) -> int:
    """Returns the number of steps in all batches, which this reads.

    Raises:
        DataError: There are no batches.
    """
    count = sum(1 for _ in batches)
    if not count:
        raise no_samples("option data")
    return -(-count // accumulate)


def describe_model(model: CausalLM, device: torch.device) -> str:
    """Returns a line with the size of a model, which may be on the meta device, and where it is trained.

    A second line says if its dtype is slow there.
    """
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    world = processes.world_size()
    dtypes = " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
    where = f"{device}" if world == 1 else f"{world} processes ({device.type})"
    line = f"{type(model).__name__}: {count:,} parameters in {dtypes}, {trained:,} of them trained, on {where}"
    hint = hint_of_dtype(model.dtype, device)
    return line if hint is None else f"{line}\n{hint}"


def describe_run(
    model: CausalLM, options: BatchOptions, device: torch.device, *, first_step: int, steps: int,
    more: Iterable[object] = (),
) -> str:  # fmt: skip
    """Returns the plan of a run: sizes of the model and of a step, the number of steps, and `more` that is not None."""
    world, rows = processes.world_size(), f"{options.accumulate} x {options.batch_size} x {options.seq_length}"
    positions = world * options.accumulate * options.batch_size * options.seq_length
    done = f"; {first_step:,} steps are done" if first_step else ""
    shape = rows + (f" x {world} processes" if world > 1 else "")
    tokens = f"{steps:,} steps of {shape} = {positions:,} tokens with padding; {steps * positions:,} in all{done}"
    return "\n".join([describe_model(model, device), tokens, *(str(one) for one in more if one is not None)])
