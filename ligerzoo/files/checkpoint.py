"""A directory of safetensors files in Hugging Face's layout, read and written. Knows nothing of models.

The weights are `model.safetensors`, or the shards that `model.safetensors.index.json` names; any other file is never
read, whatever it is called. Checkpoints are hostile input: everything is checked before the first weight is touched.
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
_SUPPORTED = "a real dtype of 8 bits or more"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header of a file tells of a tensor.

    Attributes:
        name: of the tensor.
        file: name of the file within the checkpoint's directory.
        shape: of the tensor.
        stored_dtype: safetensors' name of the dtype, such as "BF16".
    """

    name: str
    file: str
    shape: tuple[int, ...]
    stored_dtype: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `Checkpoint.read` gives.

        Raises:
            CheckpointError: the stored dtype is complex, or torch has none that holds it one element per value (4 and 6
                bits).
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
        """Bytes of data, in the file as in memory. Raises as `dtype` does."""
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """The tensors of a directory, all known by name, shape and dtype before any is read.

    As a context manager it closes its files in the end; tensors that were read stay valid.

    Args:
        directory: holds `model.safetensors`, or an index and its shards. These may be symbolic links, as in the hub's
            cache.

    Attributes:
        directory: the same.
        tensors: by name, in the order in which the files hold them.

    Raises:
        CheckpointError: a file is missing or damaged or no safetensors file, or the index and its shards disagree; or
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
                _refuse_absence(self.directory, files)
                self._files = {file: opened.enter_context(_open_safetensors(self.directory / file)) for file in files}
                infos = [info for file in files for info in _read_header(self._files[file], file)]
                self.tensors = {info.name: info for info in infos}
                if weight_map:
                    _refuse_disagreement(self.directory, weight_map, infos)
            self._opened = opened.pop_all()

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read the tensor whose shape and dtype `tensors[name]` tells.

        On a CPU it is a view of the memory-mapped file: its pages stay the system's to take back, and writing to the
        tensor does not reach the file. For another device it is copied from there, with no other copy on the host.

        Raises:
            CheckpointError: there is no such tensor, its dtype is not supported, or the checkpoint has been closed.
        """
        if name not in self.tensors:
            raise CheckpointError(f"no tensor {quote(name)}", where=self.directory)
        info = self.tensors[name]
        dtype = info.dtype
        try:
            tensor: torch.Tensor = self._files[info.file].get_tensor(name)
        except (SafetensorError, TypeError) as error:  # TypeError: a shape such as [2**63, 0]
            where = f"{self.directory / info.file}, tensor {quote(name)}"
            raise CheckpointError("cannot be read", where=where, got=quote(error)) from error
        assert (tensor.shape, tensor.dtype) == (info.shape, dtype)
        return tensor.to(device)

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a UTF-8 file of at most 32 MiB.

    Raises:
        CheckpointError: there is no such file, it is too large, it is not JSON or too deeply nested, a key stands twice
            in an object, or the whole is not an object.
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
    """Read a file that is to be JSON: at most 32 MiB.

    Raises:
        CheckpointError: there is no such file, it is not a regular one, it cannot be read, or it is too large.
    """
    with _reporting_errors(path), _open_regular(path) as file:
        content = file.read(_MAX_JSON_BYTES + 1) or b""  # None from a file in /proc that has nothing to say yet
    if len(content) > _MAX_JSON_BYTES:
        raise CheckpointError("is too large", where=path, expected=f"at most {_MAX_JSON_BYTES} bytes of JSON")
    return content


def read_weight_map(index: str | Path) -> dict[str, str]:
    """Read from a `model.safetensors.index.json` which file beside it holds which tensor.

    Raises:
        CheckpointError: as `read_json` does; or the map is missing or empty, or a name in it cannot be that of a
            safetensors file in the same directory.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("no weight_map", where=index, expected="an object of tensor names and file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file) or not file.endswith(".safetensors"):
            raise CheckpointError(
                "bad file name",
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
) -> None:
    """Make `directory` the checkpoint of these tensors, and of the small files that go with them (`config.json`, ...).

    It is replaced as a set (see `replacing_directory`): the weights of an earlier save go, everything else in it stays.
    Every tensor is written byte for byte under every name that it has, through one copy on the host at a time. They may
    be those of a `Checkpoint` of this very directory.

    Args:
        directory: made where it does not exist.
        tensors: dense, on any devices, of any strides; they may share memory. They fill the files in this order. Each
            is asked for twice and not kept, so that a mapping may make it at each access.
        files: contents by file name; text is written as UTF-8.
        max_shard_size: bytes of tensors in a file, as a number or like "500MB" (500 * 10**6) and "2GiB" (2 * 2**30).
            A larger tensor gets a file of its own.

    Raises:
        CheckpointError: a name, a dtype or the size cannot be written; nothing has been, then.
    """
    limit = _number_of_bytes(max_shard_size)
    blueprints = {}  # the same without data
    for name, tensor in tensors.items():
        _refuse_unwritable(name, tensor)
        blueprints[name] = tensor.detach().to("meta")
    for name in files:
        if not _is_plain_name(name) or _WEIGHT_FILE.fullmatch(name):
            raise CheckpointError("bad name for a file beside the weights", where=directory, got=quote(name))
    shards = _plan_shards(blueprints, limit)
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


def _open_safetensors(path: Path) -> Any:  # a safe_open, whose methods have no types
    try:
        with _reporting_errors(path):
            _open_regular(path).close()  # whose errors are better than safetensors' own
            return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise _malformed(path, "safetensors", error) from error
    except RuntimeError as error:  # torch opens the file once more
        raise CheckpointError("cannot be read", where=path, got=quote(error)) from error


def _open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, if it is a regular one: opening anything else can wait for ever, or do something, and
    reading it may never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError("is not a file with data", where=path, got=kind, expected="a regular file")
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


@contextlib.contextmanager
def _reporting_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError("no such file", where=path) from error
    except OSError as error:
        raise CheckpointError("cannot be read", where=path, got=error.strerror or error) from error


def _read_header(file: Any, file_name: str) -> list[TensorInfo]:
    infos = []
    for name in file.offset_keys():
        header = file.get_slice(name)
        infos.append(TensorInfo(name, file_name, tuple(header.get_shape()), header.get_dtype()))
    return infos


def _refuse_absence(directory: Path, files: list[str]) -> None:
    absent = [file for file in files if not (directory / file).exists()]
    if not absent:
        return
    found = sorted(os.listdir(directory))
    remedy = "Download the whole checkpoint."
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in found):
        remedy = (
            "Only safetensors is read, because a pickle runs code when it is loaded. Where you trust it, convert it: "
            "load it with transformers and call save_pretrained."
        )
    raise CheckpointError(
        f"{len(absent)} of {len(files)} weight files missing",
        where=directory,
        got=first_names(found) if found else "an empty directory",
        expected=first_names(absent),
        remedy=remedy,
    )


def _refuse_disagreement(directory: Path, weight_map: Mapping[str, str], infos: list[TensorInfo]) -> None:
    """Every tensor stands in the file that the index tells, and only there."""
    for info in infos:
        listed = weight_map.get(info.name)
        if listed != info.file:
            raise CheckpointError(
                "tensor stands in a file where the index does not put it",
                where=f"{directory / info.file}, tensor {quote(info.name)}",
                expected="it to be listed in the index" if listed is None else f"it in {quote(listed)} alone",
            )
    found = {info.name for info in infos}
    for name, file in weight_map.items():
        if name not in found:
            where = f"{directory / file}, tensor {quote(name)}"
            raise CheckpointError("tensor is missing, though the index puts it here", where=where)


def _malformed(path: Path, kind: str, error: Exception) -> CheckpointError:
    """Say what stands in the file, where it is not what its name promises."""
    with _reporting_errors(path), path.open("rb") as file:
        beginning = file.read(64).lstrip()
    got, remedy = quote(error), "The file may be damaged or cut off: download it again."
    if beginning.startswith(b"version https://git-lfs"):
        got, remedy = "a git-lfs pointer to it", "Run `git lfs pull` in the repository that it came from."
    elif beginning.startswith(b"<"):
        got, remedy = "a web page", "Download the file again, logged in if its repository asks for that."
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


def _refuse_unwritable(name: str, tensor: torch.Tensor) -> None:
    where = f"tensor {quote(name)}"
    if name == "__metadata__" or name.encode(errors="ignore").decode() != name:
        raise CheckpointError("a safetensors file cannot hold a tensor of this name", where=where)
    if tensor.dtype not in _DTYPE_NAMES:
        raise CheckpointError("dtype is not supported", where=where, got=tensor.dtype, expected=_SUPPORTED)
    if tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError("has no dense data", where=where, got=f"{tensor.layout} on {tensor.device}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        remedy = "Gather a sharded model first, into a plain one, and save that."
        raise CheckpointError("is no plain tensor", where=where, got=type(tensor).__name__, remedy=remedy)


def _number_of_bytes(size: int | str) -> int:
    """5 * 10**9 for "5GB"."""
    number, factor = size, 1
    if isinstance(size, str) and (match := re.fullmatch(r"(\d+) ?([KMGT])(i?)B", size)):
        number, factor = int(match[1]), (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2]))
    if not isinstance(number, int) or number < 1:
        expected = 'a number of bytes, "500MB", "5GB", "2GiB" or so'
        raise CheckpointError("bad size", where="max_shard_size", got=repr(size), expected=expected)
    return number * factor


def _plan_shards(tensors: Mapping[str, torch.Tensor], limit: int) -> dict[str, list[str]]:
    """The names of the tensors that go into each file: a file is full when the next tensor would exceed the limit."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def _write_safetensors(
    path: Path,
    blueprints: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    advance: Callable[[int], object],
) -> None:
    """Write one file: eight bytes with the header's length, the header as JSON, the data.

    safetensors' own `save_file` refuses tied and strided tensors, and wants all of them on the host at once.
    """
    by_alignment = dict(sorted(blueprints.items(), key=lambda item: item[1].itemsize, reverse=True))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in by_alignment.items():
        begin, end = end, end + tensor.nbytes
        dtype = _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the data begin at a multiple of every element's size
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, blueprint in by_alignment.items():
            file.write(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            advance(blueprint.nbytes)
