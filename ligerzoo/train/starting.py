"""What a run begins with: the model, its memory plan, the number of steps, and what is printed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.files.checkpoint import INDEX_FILE, SINGLE_FILE
from ligerzoo.hub import AutoModel, read_config
from ligerzoo.memory import ActivationPlan, plan_activations
from ligerzoo.models import CausalLM
from ligerzoo.parallel import initialize_sharded, load_sharded, shard_model
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train import processes
from ligerzoo.train.data import PackedBatches, PaddedBatches, SampleStream
from ligerzoo.vision.processor import Processor, load_processor_or_tokenizer


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
    directory = checkpoint_directory(model)
    is_config = directory != str(model) or (os.path.isdir(directory) and not has_weights(Path(directory)))
    is_alone = processes.world_size() == 1 or device.type == "meta"
    build: Callable[[torch.device], CausalLM]
    if new and is_config:
        dtype = "float32" if dtype == "auto" else dtype
        config = read_config(directory)

        def build(device: torch.device) -> CausalLM:
            return AutoModel.from_config(config, dtype=dtype, device=device)
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


def open_processor(name_or_path: str | Path, model: CausalLM) -> Processor | Tokenizer:
    """Loads the processor of a model that reads images, or the tokenizer of another one.

    Args:
        name_or_path: hub id or directory.
        model: the model, also on the meta device.
    """
    found = load_processor_or_tokenizer(name_or_path)
    if isinstance(found, Processor) and found.image_token_id not in model.placeholders:
        return found.tokenizer
    return found


def plan_memory(
    model: CausalLM, budget: str, *, device: torch.device, optimizer: str, batch_size: int, seq_length: int,
    accumulate: int, ema: bool, images: bool = False,
) -> ActivationPlan | None:  # fmt: skip
    """Plans what backward recomputes, see `plan_activations`.

    Args:
        model: the model as it will be trained, on the meta device.
        budget: "auto", a number of GiB, or "none" for no plan.
        device: where the model will be trained.
        optimizer: name of the optimizer.
        batch_size: rows of a micro-batch of a process.
        seq_length: tokens of a row.
        accumulate: micro-batches in a step.
        ema: whether trained weights are averaged, in fp32.
        images: whether the data has images. The plan does not count the vision tower.

    Raises:
        ConfigError: a number of GiB with images.
    """
    if budget == "none":
        return None
    if images and budget != "auto":
        raise ConfigError(
            "the memory of a vision tower is not predicted, so images have no budget", where="option activation_budget",
            got=budget, expected="auto or none", remedy="Use --activation-checkpointing to save memory.",
        )  # fmt: skip
    count = processes.world_size()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return plan_activations(
        model, batch_size=batch_size, seq_length=seq_length, budget="auto" if budget == "auto" else float(budget),
        optimizer=optimizer, accumulate=accumulate > 1, gpus=count, device=device,
        reserved=4 * trained // count if ema else 0,
    )  # fmt: skip


def describe_images(samples: Iterable[Any]) -> str | None:
    """Returns what a run with images says of them before it begins; None if the samples have none."""
    if not any(segment.images for sample in samples for segment in sample.segments):
        return None
    return (
        "images: the memory and FLOPs of the vision tower are not predicted; --activation-checkpointing recomputes it\n"
        "images: conversations share rows without seeing the images of others"
    )


def has_weights(directory: Path) -> bool:
    """Returns whether a directory has weights in safetensors files."""
    return any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))


def make_batches(
    stream: SampleStream, tokenizer: Tokenizer, *, packing: str, batch_size: int, seq_length: int, pin_memory: bool,
    read_images: bool = True,
) -> PackedBatches | PaddedBatches:  # fmt: skip
    """Returns batches of this process.

    Args:
        stream: samples; the same in all processes.
        tokenizer: its padding token fills rows, or else its end-of-sequence token; they are not trained.
        packing: "none" for a sample in each row; "separate" or "whole" see `PackedBatches`; "auto" for its default.
        batch_size: rows of this process.
        seq_length: tokens of a row.
        pin_memory: whether the tensors are in pinned memory, to copy them to a GPU.
        read_images: whether batches have the pixels of images; False to count batches.
    """
    padding = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
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
        LigerzooError: There are no batches.
    """
    count = sum(1 for _ in batches)
    if not count:
        raise LigerzooError("the data has no samples", where="option data")
    return -(-count // accumulate)


def describe_run(
    model: CausalLM, *, first_step: int, steps: int, micro_batches: int, batch_size: int, seq_length: int,
    device: torch.device | None = None, more: Iterable[object] = (),
) -> str:  # fmt: skip
    """Returns the plan of a run: sizes of the model and of a step, the number of steps, and `more` that is not None.

    `device` is that of the run, if the model is on the meta device.
    """
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    world = processes.world_size()
    positions = world * micro_batches * batch_size * seq_length
    dtypes = " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
    done = f"; {first_step:,} steps are done" if first_step else ""
    device = model.device if device is None else device
    where = f"{device}" if world == 1 else f"{world} processes ({device.type})"
    shape = f"{micro_batches} x {batch_size} x {seq_length}" + (f" x {world} processes" if world > 1 else "")
    lines = (
        f"{type(model).__name__}: {count:,} parameters in {dtypes}, {trained:,} of them trained, on {where}\n"
        f"{steps:,} steps of {shape} = {positions:,} tokens with padding; {steps * positions:,} in all{done}"
    )
    return "\n".join([lines, *(str(one) for one in more if one is not None)])
