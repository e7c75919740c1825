"""Reads directories of safetensors files in Hugging Face's layout, without knowledge of models.

Other weight files are never read. Checkpoints are untrusted input: all headers are checked before the first weight is
read. `checkpoint_writer` writes them.
"""

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ligerzoo.entries import STRING, is_object
from ligerzoo.errors import CheckpointError, first_names, quote
from ligerzoo.files.layout import DTYPES, INDEX_FILE, SINGLE_FILE, SUPPORTED, is_plain_name
from ligerzoo.files.untrusted import (
    files_in,
    malformed,
    open_regular,
    read_json,
    reading_directory,
    remedy_for,
    reporting_errors,
)


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
        if self.stored_dtype not in DTYPES:
            where = f"{self.file}, tensor {quote(self.name)}"
            raise CheckpointError("dtype is not supported", where=where, got=self.stored_dtype, expected=SUPPORTED)
        return DTYPES[self.stored_dtype]

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file, equal to that in memory. Raises as `dtype` does."""
        return math.prod(self.shape) * self.dtype.itemsize

    def locate(self, directory: Path) -> str:
        """Returns the file and name of the tensor, for error messages."""
        return f"{directory / self.file}, tensor {quote(self.name)}"


class Checkpoint:
    """The tensors of a directory. Opening it reads all headers, and no weights.

    As a context manager it closes the files on exit. Tensors that were read stay valid.

    The index decides which tensors the checkpoint has, and in which file each is. Copies in other files are ignored.

    Args:
        directory: directory with `model.safetensors`, or with an index and its shards. These may be symbolic links, as
            in the hub's cache.
        strict: refuse a checkpoint with `absent` or `unlisted` tensors.
        folders: directories in it with a further `model.safetensors` each. A tensor there is named "<folder>/<name>".

    Attributes:
        directory: the directory.
        tensors: entries of the headers by tensor name, in the order of the files.
        absent: tensors that the index lists, but that the file which it names lacks; with the name of this file.
        unlisted: tensors in the files that the index does not list.

    Raises:
        CheckpointError: A file is missing, damaged or not a safetensors file; or the index and its shards disagree; or
            the directory was replaced while the files were opened.
    """

    tensors: Mapping[str, TensorInfo]

    def __init__(self, directory: str | Path, *, strict: bool = True, folders: Sequence[str] = ()) -> None:
        self.directory = Path(directory)
        with contextlib.ExitStack() as opened:
            with reading_directory(directory):
                index = self.directory / INDEX_FILE
                weight_map = read_weight_map(index) if os.path.lexists(index) else None
                files = sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]
                _refuse_missing_files(self.directory, files)
                self._files = {file: opened.enter_context(SafetensorsFile(self.directory / file)) for file in files}
                infos = [info for file in self._files.values() for info in file.tensors.values()]
                weight_map = dict(weight_map or {info.name: info.file for info in infos})
                for folder in folders:
                    file = opened.enter_context(SafetensorsFile(self.directory / folder / SINGLE_FILE, folder))
                    self._files[f"{folder}/{SINGLE_FILE}"] = file
                    infos += file.tensors.values()
                    weight_map |= {info.name: info.file for info in file.tensors.values()}
            self.tensors = {info.name: info for info in infos if weight_map.get(info.name) == info.file}
            self.absent = {name: file for name, file in weight_map.items() if name not in self.tensors}
            self.unlisted = {info.name: info for info in infos if info.name not in weight_map}
            if strict:
                for name in (*self.absent, *self.unlisted):
                    raise self.disagreement(name)
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
        return self.tensors[name].locate(self.directory)

    def disagreement(self, name: str) -> CheckpointError:
        """Returns the error for an absent or unlisted tensor."""
        if name in self.absent:
            what, file = "the index lists this tensor, but the file lacks it", self.absent[name]
        else:
            what, file = "the index does not list this tensor", self.unlisted[name].file
        return CheckpointError(
            what,
            where=f"{self.directory / file}, tensor {quote(name)}",
            remedy="The files may be damaged or of several checkpoints: download all of them again.",
        )

    def _read_stored(self, info: TensorInfo) -> Tensor:
        return self._files[info.file].read(info.name)

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
        folder: its directory in that of the checkpoint, with which the names of the entries begin; "" for none.

    Attributes:
        path: the file.
        tensors: entries of the header by tensor name.

    Raises:
        CheckpointError: The file is missing, damaged or not a safetensors file.
    """

    tensors: dict[str, TensorInfo]

    def __init__(self, path: Path, folder: str = "") -> None:
        _refuse_missing_files(path.parent, [path.name])
        self.path, self._file = path, _open_safetensors(path)
        self._prefix, self.tensors = f"{folder}/" if folder else "", {}
        for stored in self._file.offset_keys():
            header, name = self._file.get_slice(stored), self._prefix + stored
            file, shape = self._prefix + path.name, tuple(header.get_shape())
            self.tensors[name] = TensorInfo(name, file, shape, header.get_dtype())

    def read(self, name: str) -> Tensor:
        """Reads a tensor, as `Checkpoint.read`."""
        info = self.tensors[name]
        dtype = info.dtype
        try:
            tensor: Tensor = self._file.get_tensor(name.removeprefix(self._prefix))
        except (SafetensorError, TypeError) as error:  # TypeError: a shape such as [2**63, 0]
            raise CheckpointError("cannot be read", where=info.locate(self.path.parent), got=quote(error)) from error
        assert (tensor.shape, tensor.dtype) == (info.shape, dtype)
        return tensor

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.__exit__(*exception)


def weight_files(directory: Path) -> set[str]:
    """Returns the names of a checkpoint's weight files, as its index says. Raises as `read_weight_map`."""
    index = directory / INDEX_FILE
    return set(read_weight_map(index).values()) if index.exists() else {SINGLE_FILE}


def read_weight_map(index: str | Path) -> Mapping[str, str]:
    """Reads the file name of each tensor from a `model.safetensors.index.json`.

    Raises:
        CheckpointError: As `read_json`; or the map is missing or empty, or a file name is not that of a safetensors
            file in the same directory.
    """
    weight_map = read_json(index).get("weight_map")
    if not is_object(weight_map) or not weight_map:
        raise CheckpointError("no weight_map", where=index, expected="an object of tensor names and file names")
    for name, file in weight_map.items():
        if not STRING.accepts(file) or not is_plain_name(file) or not file.endswith(".safetensors"):
            where, expected = f"{index}, tensor {quote(name)}", "the name of a .safetensors file in the same directory"
            raise CheckpointError("invalid file name", where=where, got=quote(file), expected=expected)
    return weight_map


def _open_safetensors(path: Path) -> Any:  # a safe_open, whose methods have no types
    try:
        with reporting_errors(path):
            open_regular(path).close()  # raises clearer errors than safetensors
            return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise malformed(path, "safetensors", error) from error
    except RuntimeError as error:  # from torch, which opens the file again
        raise CheckpointError("cannot be read", where=path, got=quote(error)) from error


def _refuse_missing_files(directory: Path, files: list[str]) -> None:
    if missing := [file for file in files if not (directory / file).exists()]:
        what = f"{len(missing)} of {len(files)} weight files missing"
        remedy = remedy_for(sorted(os.listdir(directory))) or "Download the whole checkpoint."
        got, expected = files_in(directory), first_names(missing)
        raise CheckpointError(what, where=directory, got=got, expected=expected, remedy=remedy)
