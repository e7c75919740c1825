"""Reads and writes directories of safetensors files in Hugging Face's layout, without knowledge of models.

The weights are in `model.safetensors`, or in the shards that `model.safetensors.index.json` names. Other weight files
are never read. Checkpoints are untrusted input: all headers are checked before the first weight is read.
"""

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ligerzoo.errors import CheckpointError, first_names, quote
from ligerzoo.files.atomic import reading_directory, replacing_directory

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")

_MAX_JSON_BYTES = 32 * 2**20  # the index of a checkpoint with 100,000 tensors has 10 MB

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SUPPORTED = "a dtype of 8 bits or more that is not complex"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The entry of a tensor in a file's header.

    Attributes:
        name: name of the tensor.
        file: name of the file in the checkpoint's directory.
        shape: shape of the tensor.
        stored_dtype: name of the dtype in safetensors, such as "BF16".
    """

    name: str
    file: str
    shape: tuple[int, ...]
    stored_dtype: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that `Checkpoint.read` returns.

        Raises:
            CheckpointError: The stored dtype is complex, or has 4 or 6 bits, for which torch has no dtype.
        """
        if self.stored_dtype not in _DTYPES:
            raise CheckpointError(
                "dtype is not supported",
                where=f"{self.file}, tensor {quote(self.name)}",
                got=self.stored_dtype,
                expected=_SUPPORTED,
            )
        return _DTYPES[self.stored_dtype]

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file, equal to that in memory. Raises as `dtype` does."""
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """The tensors of a directory. Opening it reads all headers, and no weights.

    As a context manager it closes the files on exit. Tensors that were read stay valid.

    Args:
        directory: directory with `model.safetensors`, or with an index and its shards. These may be symbolic links, as
            in the hub's cache.

    Attributes:
        directory: the directory.
        tensors: entries of the headers by tensor name, in the order of the files.

    Raises:
        CheckpointError: A file is missing, damaged or not a safetensors file; or the index and its shards disagree; or
            the directory was replaced while the files were opened.
    """

    tensors: Mapping[str, TensorInfo]

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        with contextlib.ExitStack() as opened:
            with reading_directory(directory):
                index = self.directory / INDEX_FILE
                weight_map = read_weight_map(index) if os.path.lexists(index) else None
                files = sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]
                _refuse_missing_files(self.directory, files)
                self._files = {file: opened.enter_context(_open_safetensors(self.directory / file)) for file in files}
                infos = [info for file in files for info in _read_header(self._files[file], file)]
                self.tensors = {info.name: info for info in infos}
                if weight_map:
                    _check_weight_map(self.directory, weight_map, infos)
            self._opened = opened.pop_all()

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Reads a tensor.

        On a CPU the tensor is a private view of the memory-mapped file: the system can evict its pages, and writes to
        the tensor do not reach the file. For another device it is copied there without another copy on the host.

        Raises:
            CheckpointError: The tensor does not exist, its dtype is not supported, or the checkpoint is closed.
        """
        return self.read_slice(name).to(device)

    def read_slice(
        self, name: str, index: tuple[slice, ...] = (), copy: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Tensor:
        """Reads a slice of a tensor.

        Args:
            name: name of the tensor.
            index: index into the tensor; () selects all of it.
            copy: copies a tensor to the device of the result. Default: the result is a view of the memory-mapped file.

        Raises:
            CheckpointError: As `read`.
        """
        if name not in self.tensors:
            raise CheckpointError(f"no tensor {quote(name)}", where=self.directory)
        return copy(self._read_stored(self.tensors[name])[index])

    def locate(self, name: str) -> str:
        """Returns the file and name of a tensor for error messages."""
        return self._locate_stored(self.tensors[name])

    def _locate_stored(self, info: TensorInfo) -> str:
        return f"{self.directory / info.file}, tensor {quote(info.name)}"

    def _read_stored(self, info: TensorInfo) -> Tensor:
        return _read_tensor(self._files[info.file], self.directory / info.file, info)

    def close(self) -> None:
        """Closes the files. Tensors that were read stay valid."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SafetensorsFile:
    """One safetensors file. Opening it reads the header, and no tensors.

    Args:
        path: the file, which may be a symbolic link.

    Attributes:
        path: the file.
        tensors: entries of the header by tensor name.

    Raises:
        CheckpointError: The file is missing, damaged or not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        _refuse_missing_files(path.parent, [path.name])
        self.path, self._file = path, _open_safetensors(path)
        self.tensors = {info.name: info for info in _read_header(self._file, path.name)}

    def read(self, name: str) -> torch.Tensor:
        """Reads a tensor, as `Checkpoint.read`."""
        return _read_tensor(self._file, self.path, self.tensors[name])

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.__exit__(*exception)


def _read_tensor(file: Any, path: Path, info: TensorInfo) -> torch.Tensor:
    dtype = info.dtype
    try:
        tensor: torch.Tensor = file.get_tensor(info.name)
    except (SafetensorError, TypeError) as error:  # TypeError: a shape such as [2**63, 0]
        where = f"{path}, tensor {quote(info.name)}"
        raise CheckpointError("cannot be read", where=where, got=quote(error)) from error
    assert (tensor.shape, tensor.dtype) == (info.shape, dtype)
    return tensor


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads a JSON object from a UTF-8 file of at most 32 MiB.

    Raises:
        CheckpointError: The file does not exist, is too large, is not JSON or too deeply nested, has an object with a
            duplicate key, or is not an object.
    """
    path = Path(path)
    content = read_bytes(path)
    try:
        value = json.loads(content.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, "JSON", error) from error
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", where=path, got=type(value).__name__)
    return value


def read_bytes(path: Path) -> bytes:
    """Reads a JSON file of at most 32 MiB.

    Raises:
        CheckpointError: The file does not exist, is not a regular file, cannot be read, or is too large.
    """
    with _reporting_errors(path), _open_regular(path) as file:
        content = file.read(_MAX_JSON_BYTES + 1) or b""  # None from a file in /proc without data yet
    if len(content) > _MAX_JSON_BYTES:
        raise CheckpointError("file is too large", where=path, expected=f"at most {_MAX_JSON_BYTES} bytes of JSON")
    return content


def read_weight_map(index: str | Path) -> dict[str, str]:
    """Reads the file name of each tensor from a `model.safetensors.index.json`.

    Raises:
        CheckpointError: As `read_json`; or the map is missing or empty, or a file name is not that of a safetensors
            file in the same directory.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("no weight_map", where=index, expected="an object of tensor names and file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file) or not file.endswith(".safetensors"):
            raise CheckpointError(
                "invalid file name",
                where=f"{index}, tensor {quote(name)}",
                got=quote(file),
                expected="the name of a .safetensors file in the same directory",
            )
    return weight_map


def write_checkpoint(
    directory: str | Path,
    tensors: Mapping[str, torch.Tensor],
    files: Mapping[str, str | bytes],
    *,
    max_shard_size: int | str = "5GB",
    meta: Mapping[str, torch.Tensor] | None = None,
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
            only, in the order of `writing_order(meta, max_shard_size)`.

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
        if not _is_plain_name(name) or _WEIGHT_FILE.fullmatch(name):
            raise CheckpointError(
                "invalid file name", where=directory, got=quote(name),
                expected="the name of a file in the directory that does not hold weights",
            )  # fmt: skip
    shards = _plan_shards(blueprints, max_shard_size)
    total_size = sum(tensor.nbytes for tensor in blueprints.values())
    from tqdm import tqdm

    with (
        replacing_directory(directory, keep=lambda name: not _WEIGHT_FILE.fullmatch(name)) as temporary,
        tqdm(desc="Saving", total=total_size, unit="B", unit_scale=True, disable=None) as progress,
    ):
        for name, content in files.items():
            (temporary / name).write_bytes(content.encode() if isinstance(content, str) else content)
        for file, names in shards.items():
            _write_safetensors(temporary / file, {name: blueprints[name] for name in names}, tensors, progress.update)
        if len(shards) > 1:
            total_parameters = sum(tensor.numel() for tensor in blueprints.values())
            index = {
                "metadata": {"total_parameters": total_parameters, "total_size": total_size},
                "weight_map": {name: file for file, names in shards.items() for name in names},
            }
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


def writing_order(meta: Mapping[str, torch.Tensor], max_shard_size: int | str) -> list[str]:
    """Returns the names of tensors in the order in which `write_checkpoint` accesses them. The arguments are its."""
    return [name for names in _plan_shards(meta, max_shard_size).values() for name in names]


def _open_safetensors(path: Path) -> Any:  # a safe_open, whose methods have no types
    try:
        with _reporting_errors(path):
            _open_regular(path).close()  # raises clearer errors than safetensors
            return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise _malformed(path, "safetensors", error) from error
    except RuntimeError as error:  # from torch, which opens the file again
        raise CheckpointError("cannot be read", where=path, got=quote(error)) from error


def _open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Opening or reading other kinds, such as a named pipe, may block forever."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError("not a regular file", where=path, got=kind, expected="a regular file")
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


@contextlib.contextmanager
def _reporting_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            "no such file", where=path, got=_files_in(path.parent),
            remedy="Pass the directory of a whole checkpoint in Hugging Face format.",
        ) from error  # fmt: skip
    except OSError as error:
        raise CheckpointError("cannot be read", where=path, got=error.strerror or error) from error


def _read_header(file: Any, file_name: str) -> list[TensorInfo]:
    infos = []
    for name in file.offset_keys():
        header = file.get_slice(name)
        infos.append(TensorInfo(name, file_name, tuple(header.get_shape()), header.get_dtype()))
    return infos


def _files_in(directory: Path) -> str | None:
    """Returns the names of some files for a message; None if the directory cannot be read."""
    try:
        return first_names(sorted(os.listdir(directory))) or "an empty directory"
    except OSError:
        return None


def _refuse_missing_files(directory: Path, files: list[str]) -> None:
    missing = [file for file in files if not (directory / file).exists()]
    if not missing:
        return
    found = sorted(os.listdir(directory))
    remedy = "Download the whole checkpoint."
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in found):
        remedy = (
            "Only safetensors files are read, because loading a pickle runs code. If you trust the checkpoint, convert "
            "it: load it with transformers and call save_pretrained."
        )
    raise CheckpointError(
        f"{len(missing)} of {len(files)} weight files missing",
        where=directory,
        got=_files_in(directory),
        expected=first_names(missing),
        remedy=remedy,
    )


def _check_weight_map(directory: Path, weight_map: Mapping[str, str], infos: list[TensorInfo]) -> None:
    """Raises CheckpointError unless each tensor is in the file that the index names, and only there."""
    for info in infos:
        listed = weight_map.get(info.name)
        if listed != info.file:
            raise CheckpointError(
                "the tensor is in another file than the index says",
                where=f"{directory / info.file}, tensor {quote(info.name)}",
                expected="the tensor to be listed in the index" if listed is None else f"only {quote(listed)}",
                remedy="The files may be of several checkpoints: download all of them again.",
            )
    found = {info.name for info in infos}
    for name, file in weight_map.items():
        if name not in found:
            where = f"{directory / file}, tensor {quote(name)}"
            raise CheckpointError(
                "the index lists this tensor, but the file lacks it", where=where,
                remedy="The file may be damaged or of another checkpoint: download it again.",
            )  # fmt: skip


def _malformed(path: Path, kind: str, error: Exception) -> CheckpointError:
    """Returns an error that says what an invalid file contains instead."""
    with _reporting_errors(path), path.open("rb") as file:
        beginning = file.read(64).lstrip()
    got, remedy = quote(error), "The file may be damaged or incomplete: download it again."
    if beginning.startswith(b"version https://git-lfs"):
        got, remedy = "a git-lfs pointer", "Run `git lfs pull` in the repository."
    elif beginning.startswith(b"<"):
        got, remedy = "a web page", "Download the file again; log in first if the repository is gated."
    return CheckpointError(f"not a valid {kind} file", where=path, got=got, remedy=remedy)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"duplicate key {key!r}")
        value[key] = item
    return value


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _refuse_unnamable(name: str, dtype: torch.dtype) -> None:
    """Raises CheckpointError if the header of a safetensors file cannot represent the name or the dtype."""
    where = f"tensor {quote(name)}"
    if name == "__metadata__" or name.encode(errors="ignore").decode() != name:
        raise CheckpointError("not a valid tensor name in a safetensors file", where=where)
    if dtype not in _DTYPE_NAMES:
        raise CheckpointError("dtype is not supported", where=where, got=dtype, expected=_SUPPORTED)


def _refuse_unwritable(name: str, tensor: torch.Tensor) -> None:
    where = f"tensor {quote(name)}"
    if tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(
            "not a dense tensor with data", where=where, got=f"{tensor.layout} on {tensor.device}",
            remedy="Materialize meta tensors and convert sparse ones before saving.",
        )  # fmt: skip
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        remedy = "Save the model before you quantize it, or save the quantized model's state_dict() with torch.save."
        if hasattr(tensor, "full_tensor"):
            remedy = "Gather the shards of a distributed model into plain tensors before saving."
        raise CheckpointError("not a plain tensor", where=where, got=type(tensor).__name__, remedy=remedy)


def _number_of_bytes(size: int | str) -> int:
    """Parses a size: "5GB" is 5 * 10**9."""
    number, factor = size, 1
    if isinstance(size, str) and (match := re.fullmatch(r"(\d+) ?([KMGT])(i?)B", size)):
        number, factor = int(match[1]), (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2]))
    if not isinstance(number, int) or number < 1:
        expected = 'a number of bytes, or a string such as "500MB", "5GB" or "2GiB"'
        raise CheckpointError("invalid size", where="max_shard_size", got=repr(size), expected=expected)
    return number * factor


def _plan_shards(tensors: Mapping[str, torch.Tensor], max_shard_size: int | str) -> dict[str, list[str]]:
    """Returns the names of the tensors in each file, in the order of their data.

    A file is full when the next tensor would exceed the limit.
    """
    limit = _number_of_bytes(max_shard_size)
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    for names in shards:
        names.sort(key=lambda name: tensors[name].itemsize, reverse=True)  # aligns the data
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def _write_safetensors(
    path: Path,
    blueprints: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    advance: Callable[[int], object],
) -> None:
    """Writes one file: eight bytes with the length of the header, the header as JSON, the data.

    `save_file` of safetensors rejects tied and strided tensors, and needs all tensors on the host at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in blueprints.items():
        begin, end = end, end + tensor.nbytes
        dtype = _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the data to the size of any element
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, blueprint in blueprints.items():
            file.write(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            advance(blueprint.nbytes)
