"""Reads quantized checkpoints as if they stored bfloat16: `quantization_config`, pairs of tensors, and their values."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligerzoo.entries import NAME, OBJECT, check_one_of, is_one_of, list_of
from ligerzoo.errors import CheckpointError, ConfigError, quote, unknown_names
from ligerzoo.files.checkpoint import Checkpoint, TensorInfo
from ligerzoo.files.quantized_formats import FORMATS, Index, QuantizedFormat

ENTRY = "quantization_config"

_REMEDY = "Load the repository's unquantized original."
_MODULES = list_of(NAME, 'a list of names such as "lm_head"', "not a list of modules")
_LIST_NAMES = ("modules_to_not_convert", "ignored_layers")
_CACHED_BYTES = 2**18  # of values that are dequantized at once on a CPU: intermediate results stay in its cache
_COPIED_BYTES = 2**25  # the same on other devices, which bounds the memory of intermediate results


@dataclass(frozen=True)
class Quantization:
    """Format of the quantized tensors of a checkpoint, from config.json.

    Attributes:
        method: `quant_method` in config.json.
        excluded: dotted paths of modules that are not quantized; "*" is any one name.
    """

    method: str
    excluded: tuple[str, ...] = ()

    @property
    def format(self) -> QuantizedFormat:
        """How the tensors are stored."""
        return FORMATS[self.method]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A tensor that is stored as two.

    Attributes:
        info: the tensor as it is read, in bfloat16.
        values: its stored values.
        scales: their scales.
    """

    info: TensorInfo
    values: TensorInfo
    scales: TensorInfo


def read_quantization(raw: Mapping[str, Any], accepted: Collection[str]) -> Quantization | None:
    """Returns what the entry `quantization_config` of config.json says; None if it is absent or null.

    Args:
        raw: config.json.
        accepted: the architecture's formats, by `quant_method`.

    Raises:
        ConfigError: The format is not accepted, or an entry is missing, unknown or has an unsupported value.
    """
    entry = raw.get(ENTRY)
    if entry is None:
        return None
    is_object = OBJECT.accepts(entry)
    method = entry.get("quant_method") if is_object else ""
    if not is_one_of(method, accepted):
        expected = " or ".join(["no entry", *(f"quant_method {name!r}" for name in sorted(accepted))])
        got = f"quant_method {method!r}" if is_object else repr(entry)
        raise ConfigError("not supported", where=ENTRY, got=got, expected=expected, remedy=_REMEDY)
    stored_as = FORMATS[method]
    for name, values in stored_as.entries.items():
        where = f"{ENTRY}, {name}"
        if entry.get(name) is not None:
            check_one_of(entry[name], values, where, _REMEDY)
        elif name in stored_as.required:
            raise ConfigError("missing", where=where, expected=" or ".join(map(repr, values)), remedy=_REMEDY)
    for name, nearest in unknown_names(entry, ["quant_method", *_LIST_NAMES, *stored_as.entries]):
        where, got, remedy = f"{ENTRY}, {name}", repr(entry[name]), nearest or _REMEDY
        raise ConfigError("unknown entry", where=where, got=got, remedy=remedy)
    given = {name: entry[name] for name in _LIST_NAMES if entry.get(name) is not None}
    lists = [_MODULES.read(names, f"{ENTRY}, {name}") for name, names in given.items()]
    if len(lists) == 2 and set(lists[0]) != set(lists[1]):
        raise ConfigError(f"contradicts {_LIST_NAMES[0]}", where=f"{ENTRY}, {_LIST_NAMES[1]}")
    return Quantization(method, tuple(lists[0] if lists else ()))


def dequantized_infos(tensors: Mapping[str, TensorInfo], pairs: Mapping[str, QuantizedTensor]) -> dict[str, TensorInfo]:
    """Returns the entries of a checkpoint's tensors as they are read, quantized ones in bfloat16."""
    by_values = {pair.values.name: pair.info for pair in pairs.values()}
    scales = {pair.scales.name for pair in pairs.values()}
    infos = (by_values.get(name, info) for name, info in tensors.items() if name not in scales)
    return {info.name: info for info in infos}


def find_quantized(
    tensors: Mapping[str, TensorInfo], quantization: Quantization | None, directory: Path
) -> dict[str, QuantizedTensor]:
    """Returns the quantized tensors of a checkpoint by name, from the headers of its files.

    Args:
        tensors: entries of the headers, by name.
        quantization: what config.json says.
        directory: the checkpoint's directory, for error messages.

    Raises:
        CheckpointError: Values or scales lack their partner, or have a wrong shape or dtype; or there are quantized
            tensors without an entry in config.json, or in modules that the entry excludes, or none although there is
            an entry.
    """
    if quantization is None:
        for stored_as in FORMATS.values():
            for scales, values, _ in _scales(tensors, stored_as):
                if values is not None and scales.stored_dtype in stored_as.scales_dtypes:
                    what = "quantized tensor, but config.json has no quantization_config"
                    raise CheckpointError(what, where=values.locate(directory), remedy="Download config.json again.")
        return {}
    stored_as = quantization.format
    for scales, values, name in _scales(tensors, stored_as):
        if values is None:
            got = tensors[name].stored_dtype if name in tensors else "no such tensor"
            where, expected = scales.locate(directory), f"{stored_as.values_dtype} values in {name!r}"
            raise CheckpointError("scales without quantized values", where=where, got=got, expected=expected)
    found = {}
    for info in tensors.values():
        if info.stored_dtype == stored_as.values_dtype and not info.name.endswith(stored_as.scales_suffix):
            pair = _pair(info, tensors, stored_as, directory)
            _refuse_excluded(pair, quantization, directory)
            found[pair.info.name] = pair
    if not found:
        what = "no quantized tensor, but config.json has a quantization_config"
        got, expected = f"quant_method {quantization.method!r}", f"tensors of dtype {stored_as.values_dtype}"
        remedy = "If the weights are not quantized, remove the entry from config.json."
        raise CheckpointError(what, where=directory, got=got, expected=expected, remedy=remedy)
    return found


def _scales(
    tensors: Mapping[str, TensorInfo], stored_as: QuantizedFormat
) -> Iterator[tuple[TensorInfo, TensorInfo | None, str]]:
    """Yields each tensor named as scales of a format, its values or None, and the name that they should have."""
    for info in tensors.values():
        if info.name.endswith(stored_as.scales_suffix):
            name = info.name.removesuffix(stored_as.scales_suffix) + stored_as.values_suffix
            values = tensors.get(name)
            yield info, values if values and values.stored_dtype == stored_as.values_dtype else None, name


def _pair(
    values: TensorInfo,
    tensors: Mapping[str, TensorInfo],
    stored_as: QuantizedFormat,
    directory: Path,
) -> QuantizedTensor:
    """Returns the quantized tensor with these values. Raises CheckpointError unless its scales fit."""
    where = values.locate(directory)
    if not values.name.endswith(stored_as.values_suffix):
        what = f"not a tensor of weights: {values.stored_dtype}"
        expected = f"a name that ends with {stored_as.values_suffix!r}"
        raise CheckpointError(what, where=where, expected=expected)
    name = values.name.removesuffix(stored_as.values_suffix)
    shapes = stored_as.shapes(values.shape)
    if shapes is None or 0 in values.shape:
        raise CheckpointError("wrong shape of quantized values", where=where, got=values.shape)
    scales_shape, shape = shapes
    scales = tensors.get(name + stored_as.scales_suffix)
    if scales is None:
        expected = f"a tensor {name + stored_as.scales_suffix!r} of shape {scales_shape}"
        raise CheckpointError("quantized values without scales", where=where, expected=expected)
    where = scales.locate(directory)
    if scales.stored_dtype not in stored_as.scales_dtypes:
        expected = " or ".join(stored_as.scales_dtypes)
        raise CheckpointError("wrong dtype of scales", where=where, got=scales.stored_dtype, expected=expected)
    if scales.shape != scales_shape:
        expected = f"{scales_shape}, for values of shape {values.shape}"
        raise CheckpointError("wrong shape of scales", where=where, got=scales.shape, expected=expected)
    if name != values.name and name in tensors:
        raise CheckpointError("stored twice", where=tensors[name].locate(directory), got=f"also {values.name!r}")
    return QuantizedTensor(TensorInfo(name, values.file, shape, "BF16"), values, scales)


def _refuse_excluded(pair: QuantizedTensor, quantization: Quantization, directory: Path) -> None:
    names = pair.info.name.split(".")
    for module in quantization.excluded:
        path = module.split(".")
        starts = range(len(names) - len(path) + 1)
        if any(all(a in ("*", b) for a, b in zip(path, names[start:], strict=False)) for start in starts):
            what, where = "quantized tensor of a module that config.json excludes", pair.values.locate(directory)
            got, remedy = f"{module!r} in modules_to_not_convert", "The files may be of several checkpoints."
            raise CheckpointError(what, where=where, got=got, remedy=remedy)


class QuantizedCheckpoint(Checkpoint):
    """A checkpoint whose quantized tensors are read as bfloat16, under the names that unquantized ones have.

    Args:
        directory: as in `Checkpoint`.
        quantization: what config.json says; None if it has no entry.
        folders: as in `Checkpoint`.

    Attributes:
        tensors: as in `Checkpoint`, but with the names, shapes and dtype of the dequantized tensors.
        quantized: the tensors that are dequantized, by name.

    Raises:
        CheckpointError: As `Checkpoint` and `find_quantized`.
    """

    def __init__(self, directory: str | Path, quantization: Quantization | None, folders: Sequence[str] = ()) -> None:
        super().__init__(directory, strict=False, folders=folders)
        self._format = quantization.format if quantization else None
        try:
            self.quantized = find_quantized(self.tensors, quantization, self.directory)
        except CheckpointError:
            self.close()
            raise
        self.tensors = dequantized_infos(self.tensors, self.quantized)

    def locate(self, name: str) -> str:
        if name not in self.quantized:
            return super().locate(name)
        pair = self.quantized[name]
        return f"{self.directory / pair.values.file}, tensors {quote(pair.values.name)} and {quote(pair.scales.name)}"

    def read_slice(
        self, name: str, index: tuple[slice, ...] = (), copy: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Tensor:
        """Reads a slice, as `Checkpoint.read_slice`. Dequantizes it in pieces, on the device of the copies.

        Raises:
            CheckpointError: As `Checkpoint.read_slice`; or a scale is invalid.
        """
        pair = self.quantized.get(name)
        if pair is None:
            return super().read_slice(name, index, copy)
        assert self._format is not None
        values_index, scales_index, chosen = self._format.cover(_complete(index, pair.info.shape))
        values, scales = self._read_stored(pair.values)[values_index], self._read_stored(pair.scales)[scales_index]
        if scales.numel() and not self._format.is_valid(scales):
            where = pair.scales.locate(self.directory)
            remedy = "The file may be damaged: download it again."
            raise CheckpointError("invalid scale", where=where, expected=self._format.valid_scales, remedy=remedy)
        matrices = _dequantize(self._format, values, copy(scales), copy)
        return self._format.arrange(matrices[..., chosen[0], chosen[1]].contiguous())


def _complete(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """Returns an index with a slice per dimension, each with start, stop and step."""
    slices = (index[i] if i < len(index) else slice(None) for i in range(len(shape)))
    return tuple(slice(*chosen.indices(size)) for chosen, size in zip(slices, shape, strict=True))


def _dequantize(stored_as: QuantizedFormat, values: Tensor, scales: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns dequantized matrices on the device of the scales, to which it copies a few rows of values at a time."""
    stack = scales.shape[:-2]
    rows, *rest = values.shape[len(stack) :]
    columns = math.prod(rest)
    matrices = torch.empty(
        (*stack, rows, columns * stored_as.values_per_element), dtype=torch.bfloat16, device=scales.device
    )
    piece_bytes = _CACHED_BYTES if scales.device.type == "cpu" else _COPIED_BYTES
    block_rows = stored_as.block_rows
    blocks = max(1, piece_bytes // max(1, block_rows * columns))
    indices: Iterable[tuple[int, ...]] = product(*(range(size) for size in stack))
    for index in indices:
        pieces, outs = (torch.split(matrix[index], blocks * block_rows) for matrix in (values, matrices))
        for piece, its_scales, out in zip(pieces, torch.split(scales[index], blocks), outs, strict=True):
            stored_as.dequantize(copy(piece), its_scales, out)
    return matrices
