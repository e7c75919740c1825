"""Writes directories of safetensors files in Hugging Face's layout, without knowledge of models."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ligerzoo.checks import is_integer
from ligerzoo.dtensors import is_dtensor
from ligerzoo.errors import CheckpointError, quote
from ligerzoo.files.atomic import replacing_directory
from ligerzoo.files.layout import DTYPE_NAMES, INDEX_FILE, SINGLE_FILE, SUPPORTED, WEIGHT_FILE, is_plain_name


def write_checkpoint(
    directory: str | Path,
    tensors: Mapping[str, torch.Tensor],
    files: Mapping[str, str | bytes],
    *,
    max_shard_size: int | str = "5GB",
    meta: Mapping[str, torch.Tensor] | None = None,
    folders: Sequence[str] = (),
) -> None:
    """Writes tensors and small files such as `config.json` to a checkpoint directory, in one step.

    The directory is replaced as a whole, see `replacing_directory`. The weights of an earlier save are deleted; all
    other files are kept. Each tensor is written under each of its names, with at most one copy on the host at a time.
    The tensors may come from a `Checkpoint` of the same directory.

    Args:
        directory: created if it does not exist.
        tensors: dense tensors by name, on any device, with any strides; they may share memory. The files are filled in
            this order. Each tensor is accessed twice and not kept, so a mapping may create it at each access.
        files: contents by file name; text is written as UTF-8.
        max_shard_size: maximum bytes of tensors in a file, as a number or a string such as "500MB" (500 * 10**6) or
            "2GiB" (2 * 2**30). A larger tensor gets its own file.
        meta: meta tensors with the shapes and dtypes of `tensors`, by the same names. Each tensor is then accessed once
            only, in the order of `writing_order(meta, max_shard_size, folders)`.
        folders: directories in it with further weights, as of `Checkpoint`. `files` may be in any directory of it.

    Raises:
        CheckpointError: A name, a dtype or the size is invalid. Nothing has been written then.
    """
    blueprints = dict(meta or {})
    if meta is None:
        for name, tensor in tensors.items():
            _refuse_unwritable(name, tensor)
            blueprints[name] = tensor.detach().to("meta")
    for name, tensor in blueprints.items():
        _refuse_unnamable(name, tensor.dtype)
    for name in files:
        *parents, own_name = name.split("/")
        if not all(map(is_plain_name, [own_name, *parents[:1]])) or len(parents) > 1 or WEIGHT_FILE.fullmatch(own_name):
            expected = "the name of a file in the directory that does not hold weights"
            raise CheckpointError("invalid file name", where=directory, got=quote(name), expected=expected)
    shards = _plan_shards(blueprints, max_shard_size, folders)
    total_size = sum(tensor.nbytes for tensor in blueprints.values())
    from tqdm import tqdm

    with (
        replacing_directory(directory, keep=lambda name: not WEIGHT_FILE.fullmatch(name)) as temporary,
        tqdm(desc="Saving", total=total_size, unit="B", unit_scale=True, disable=None) as progress,
    ):
        for name, content in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(content.encode() if isinstance(content, str) else content)
        for file, names in shards.items():
            (temporary / file).parent.mkdir(exist_ok=True)
            folder, parts = None if is_plain_name(file) else Path(file).parent.name, (blueprints[n] for n in names)
            contents = dict(zip(names, parts, strict=True))
            _write_safetensors(temporary / file, contents, tensors, progress.update, folder)
        if SINGLE_FILE not in shards:
            weight_map = {name: file for file, names in shards.items() for name in names if is_plain_name(file)}
            total_parameters = sum(blueprints[name].numel() for name in weight_map)
            total_size = sum(blueprints[name].nbytes for name in weight_map)
            metadata = {"total_parameters": total_parameters, "total_size": total_size}
            index = {"metadata": metadata, "weight_map": weight_map}
            (temporary / INDEX_FILE).write_bytes(json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes dense tensors to one file, with at most one copy on the host at a time.

    Raises:
        CheckpointError: A name or dtype is invalid, or a tensor is not dense. Nothing has been written then.
    """
    for name, tensor in tensors.items():
        _refuse_unwritable(name, tensor)
        _refuse_unnamable(name, tensor.dtype)
    _write_safetensors(path, {name: t.detach().to("meta") for name, t in tensors.items()}, tensors, lambda _: None)


def writing_order(
    meta: Mapping[str, torch.Tensor], max_shard_size: int | str, folders: Sequence[str] = ()
) -> list[str]:
    """Returns the names of tensors in the order in which `write_checkpoint` accesses them. The arguments are its."""
    return [name for names in _plan_shards(meta, max_shard_size, folders).values() for name in names]


def _refuse_unnamable(name: str, dtype: torch.dtype) -> None:
    """Raises CheckpointError if the header of a safetensors file cannot represent the name or the dtype."""
    where = f"tensor {quote(name)}"
    if name == "__metadata__" or name.encode(errors="ignore").decode() != name:
        raise CheckpointError("not a valid tensor name in a safetensors file", where=where)
    if dtype not in DTYPE_NAMES:
        raise CheckpointError("dtype is not supported", where=where, got=dtype, expected=SUPPORTED)


def _refuse_unwritable(name: str, tensor: torch.Tensor) -> None:
    where = f"tensor {quote(name)}"
    if tensor.layout != torch.strided or tensor.is_meta:
        got = f"{tensor.layout} on {tensor.device}"
        remedy = "Materialize meta tensors and convert sparse ones before saving."
        raise CheckpointError("not a dense tensor with data", where=where, got=got, remedy=remedy)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        remedy = "Save the model before you quantize it, or save the quantized model's state_dict() with torch.save."
        if is_dtensor(tensor):
            remedy = "Gather the shards of a distributed model into plain tensors before saving."
        raise CheckpointError("not a plain tensor", where=where, got=type(tensor).__name__, remedy=remedy)


def _number_of_bytes(size: int | str) -> int:
    """Parses a size: "5GB" is 5 * 10**9."""
    number, factor = size, 1
    if match := re.fullmatch(r"(\d+) ?([KMGT])(i?)B", str(size)):
        number, factor = int(match[1]), (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2]))
    if not is_integer(number) or number < 1:
        expected = 'a number of bytes, or a string such as "500MB", "5GB" or "2GiB"'
        raise CheckpointError("invalid size", where="max_shard_size", got=repr(size), expected=expected)
    return number * factor


def _plan_shards(
    tensors: Mapping[str, torch.Tensor], max_shard_size: int | str, folders: Sequence[str]
) -> dict[str, list[str]]:
    """Returns the names of the tensors in each file, in the order of their data.

    A file is full when the next tensor would exceed the limit.
    """
    limit = _number_of_bytes(max_shard_size)
    shards: list[list[str]] = [[]]
    by_folder: dict[str, list[str]] = {}
    size = 0
    for name, tensor in tensors.items():
        if (folder := name.partition("/")[0]) in folders:
            by_folder.setdefault(f"{folder}/{SINGLE_FILE}", []).append(name)
            continue
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    for names in by_folder.values():
        names.sort()
    for names in (*shards, *by_folder.values()):
        names.sort(key=lambda name: tensors[name].itemsize, reverse=True)  # aligns the data
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0], **by_folder}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(shards, start=1)} | by_folder


def _write_safetensors(
    path: Path,
    blueprints: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    advance: Callable[[int], object],
    folder: str | None = None,
) -> None:
    """Writes one file: eight bytes with the length of the header, the header as JSON, the data.

    `save_file` of safetensors rejects tied and strided tensors, and needs all tensors on the host at once.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if folder is None else {}
    end = 0
    for name, tensor in blueprints.items():
        begin, end = end, end + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        stored_name = name if folder is None else name.removeprefix(f"{folder}/")
        header[stored_name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the data to the size of any element
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, blueprint in blueprints.items():
            file.write(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            advance(blueprint.nbytes)
