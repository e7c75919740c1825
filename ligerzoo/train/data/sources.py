"""Sources of training data, which `--data` names: each has a reader of its format, a weight, and records of a kind."""

from __future__ import annotations

import codecs
import glob
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard, get_args

from ligerzoo.checks import is_list
from ligerzoo.errors import DataError, first_names
from ligerzoo.train.data.fields import FIELDS, Kind, record_kind, refuse_two_kinds, unread_fields
from ligerzoo.train.data.hub_data import (
    data_identity,
    hub_data,
    is_path,
    is_saved_dataset,
    open_hub_data,
    open_rows,
    saved_datasets,
)
from ligerzoo.train.data.layouts import (
    FIELD_NAMES,
    RecordLayout,
    check_column_names,
    layout_of,
    typed_cells,
    with_our_names,
)
from ligerzoo.train.data.parquet import ParquetReader
from ligerzoo.train.data.records import Fields, Parse, Record, RecordReader, file_hash, suffix_of
from ligerzoo.train.data.samples import Source, naming
from ligerzoo.train.data.text_files import TextReader
from ligerzoo.train.data.text_formats import (
    OpenFormat,
    TextCells,
    open_csv,
    open_json,
    open_json_lines,
    open_text,
    open_tsv,
)
from ligerzoo.train.data.token_files import TokenReader

TextUnit = Literal["file", "line"]
TEXT_UNITS = get_args(TextUnit)

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_TEXT_BLOCK = 2**16  # bytes of a part of a long text file


class ReadOptions(NamedTuple):
    """How data is cut into records, and what they are.

    Attributes:
        seq_length: tokens of a record of a token file.
        vocab_size: the ids of token files must be smaller.
        text_unit: see `open_data`.
        columns: columns of the data by our names, see `parse_columns`.
        has_template: whether there is a chat template, for Alpaca fields.
    """

    seq_length: int = 2
    vocab_size: int = 2**32
    text_unit: TextUnit = "file"
    columns: Mapping[str, str] = {}
    has_template: bool = True


# Formats


_WITH_FIELDS: dict[str, OpenFormat] = {
    ".jsonl": open_json_lines,
    ".ndjson": open_json_lines,
    ".json": open_json,
    ".csv": open_csv,
    ".tsv": open_tsv,
}


def _open_fields(files: list[Path], options: ReadOptions) -> RecordReader:
    return TextReader(files, _WITH_FIELDS)


def _open_text(files: list[Path], options: ReadOptions) -> RecordReader:
    if options.text_unit == "line":
        return TextReader(files, {".txt": open_text}, holds="text")
    return TextReader(files, {".txt": open_text}, _TEXT_BLOCK, joined=True, holds="text")


def _open_tokens(files: list[Path], options: ReadOptions) -> RecordReader:
    return TokenReader(files, options.seq_length, options.vocab_size)


def _open_parquet(files: list[Path], options: ReadOptions) -> RecordReader:
    def identity(name: str) -> list[object]:
        return [Path(name).name, Path(name).stat().st_size, file_hash(name)]

    return ParquetReader(list(map(str, files)), identity)


FORMATS: dict[str, Callable[[list[Path], ReadOptions], RecordReader]] = {
    **dict.fromkeys(_WITH_FIELDS, _open_fields),
    ".parquet": _open_parquet,
    ".txt": _open_text,
    ".bin": _open_tokens,
    ".npy": _open_tokens,
}
"""What opens files, by their suffix: those with the same function can be one data set. A format is a function here."""

_REMEDIES = {
    **dict.fromkeys((".gz", ".zst"), "Decompress the file: training reads it in random order."),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "Save the table as CSV."),
    ".arrow": "Give the directory that `save_to_disk` wrote.",
}


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Returns the data files that `paths` name, sorted within each directory and pattern.

    Args:
        paths: files, directories (searched recursively) and glob patterns (`**` matches directories).

    Raises:
        DataError: a path does not exist, is empty or matches nothing, a file has another format or occurs twice, or
            the files have different formats.
    """
    files: list[Path] = []
    for path in paths:
        if "://" in str(path):
            raise DataError("data is not downloaded", where=path, expected="a file", remedy="Download it first.")
        files += _expand(Path(path))
    if not files:
        raise DataError("no data files", where="option data", got=repr(paths), expected="at least one file")
    for file in files:
        if suffix_of(file) not in FORMATS:
            expected, remedy = ", ".join(FORMATS), _REMEDIES.get(suffix_of(file))
            what = "not a format of data files"
            raise DataError(what, where=file, got=repr(file.suffix), expected=expected, remedy=remedy)
        if file.stat().st_size == 0:
            raise DataError("the file is empty", where=file)
    if len({FORMATS[suffix_of(file)] for file in files}) > 1:
        got, remedy = first_names(list(map(str, files))), _WEIGHTS
        raise DataError(
            "files of different formats", where="option data", got=got, expected="one format", remedy=remedy
        )
    _refuse_repeated([(str(file), str(file)) for file in files], "Use epochs to repeat data.")
    return files


def _refuse_repeated(names: Iterable[tuple[str, str]], remedy: str) -> None:
    """Raises DataError if two names, each with what the user gave, are of one file or dataset."""
    found: dict[object, str] = {}
    for name, given in names:
        one = data_identity(name)
        if one in found:
            got = f"{found[one]} and {given}"
            raise DataError("the data is listed twice", where=name, got=got, remedy=remedy)
        found[one] = given


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        inner = (file for file in path.rglob("*") if suffix_of(file) in FORMATS and file.is_file())
        files = sorted(file for file in inner if not file.name.startswith("."))
        data = [file for file in files if suffix_of(file) != ".json" or _is_list(file)]  # objects describe other data
        if not data and (saved := saved_datasets(path)):
            got, remedy = first_names(saved), f"Give one of them, such as {saved[0]}."
            raise DataError("a directory of saved datasets", where=path, got=got, remedy=remedy)
        if not files:
            raise DataError("the directory has no data files", where=path, expected=", ".join(FORMATS))
        return data or files
    if path.is_file():
        return [path]
    if glob.has_magic(str(path)):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not files:
            raise DataError("no file matches the pattern", where=path)
        return files
    if os.path.lexists(path):
        remedy = "Write pipes and other streams to a file: training reads it in random order."
        raise DataError("not a regular file", where=path, expected="a file or a directory", remedy=remedy)
    raise DataError("no such file or directory", where=path)


def _is_list(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


# Names and weights


_WEIGHTS = "Give each a weight, such as a.jsonl:0.7 b.csv:0.3."
_WEIGHT = re.compile(r"(.+):([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf))")


class _Named(NamedTuple):
    """Data that is named, and its weight; None without one."""

    data: str | os.PathLike[str]
    weight: float | None


def _named(data: str | os.PathLike[str]) -> _Named:
    found = None if os.path.lexists(data) else _WEIGHT.fullmatch(os.fspath(data))
    if found is None:
        return _Named(data, None)
    weight = float(found[2])
    if not 0 < weight < math.inf:
        raise DataError("not a weight", where=data, got=found[2], expected="a positive number")
    return _Named(found[1], weight)


def _open_named(data: Sequence[str | os.PathLike[str]], options: ReadOptions) -> RecordReader:
    """Opens a dataset, or files of one format."""
    on_hub = [hub_data(os.fspath(one)) for one in data]
    if not any(on_hub) and not any(map(is_saved_dataset, data)):
        files = find_files(data)
        return FORMATS[suffix_of(files[0])](files, options)
    if len(data) > 1:
        got = first_names(list(map(str, data)))
        raise DataError("several datasets", where="option data", got=got, expected="one, or files", remedy=_WEIGHTS)
    return open_rows(data[0]) if on_hub[0] is None else open_hub_data(on_hub[0])


def _are_paths(data: object) -> TypeGuard[Paths]:
    return is_path(data) or (is_list(data) and all(map(is_path, data)))


def as_paths(data: Paths) -> Sequence[str | os.PathLike[str]]:
    """Returns one or more paths as a sequence."""
    match data:
        case str() | os.PathLike():
            return [data]
    return data


def open_readers(data: object, options: ReadOptions) -> list[tuple[RecordReader, float | None]]:
    """Opens the readers of data, see `open_data`, each with its weight; a single one without weights.

    Raises:
        DataError: see `open_data`.
    """
    if not _are_paths(data):
        return [(open_rows(data), None)]
    named = [_named(one) for one in as_paths(data)]
    weighted = [one for one in named if one.weight is not None]
    if not weighted:
        return [(_open_named([one.data for one in named], options), None)]
    if len(weighted) < len(named):
        missing = next(one.data for one in named if one.weight is None)
        raise DataError("the weight is missing, which others have", where=missing, remedy=_WEIGHTS)
    readers = [_open_named([one.data], options) for one in named]
    names = [(name, str(one.data)) for reader, one in zip(readers, named, strict=True) for name in reader.names]
    _refuse_repeated(names, "Give it once, with a larger weight.")
    return [(reader, one.weight) for reader, one in zip(readers, named, strict=True)]


# Sources


class First(NamedTuple):
    """The first record of a source with fields."""

    source: Source
    fields: Fields


def first_record(reader: RecordReader, kind: Kind | Literal["auto"]) -> First | None:
    """Returns the first record with fields, or None.

    Raises:
        DataError: the first record is malformed, and `kind` is "auto". Otherwise its error comes when it is a sample.
    """
    for record in _records(reader) if reader.holds == "fields" else ():
        try:
            with naming(record.source):
                fields = record.fields()
        except DataError:
            if kind == "auto":
                raise
            continue
        if fields is not None:
            return First(record.source, fields)
    return None


class DataSource(RecordReader):
    """A part of the data: records of one kind, and how often they occur.

    Args:
        reader: reads the records.
        kind: what they are; "auto" for that of the first one.
        options: columns by our names, and whether there is a chat template.
        weight: how often they occur, relative to those of other sources; None for a single source.
        first: the first record with fields.

    Attributes:
        kind: the kind of the records.
        weight: as given.
        name: the names of the files, or "data".
        notes: lines to print about the data.
        unread: the fields of the first record that are not read, such as ids.

    Raises:
        DataError: the first record is of no known kind; or the data is empty, and `kind` is "auto".
    """

    def __init__(
        self,
        reader: RecordReader,
        kind: Kind | Literal["auto"],
        options: ReadOptions,
        weight: float | None = None,
        first: First | None = None,
    ) -> None:
        self._reader, self._options, self.weight, self.holds = reader, options, weight, reader.holds
        self.num_blocks, self.blocks_per_pool, self.names = reader.num_blocks, reader.blocks_per_pool, reader.names
        self.name = ", ".join(name for name, *_ in reader.identity.get("files", ())) or "data"
        self.notes, self.unread = list[str](), list[str]()
        self._wanted: Kind | Literal["auto"] = kind
        self._layout: RecordLayout | None = None
        columns = options.columns
        self._columns = columns if first and {*columns.values()} & first.fields.keys() else {}
        self.kind = self._text_kind() if self.holds != "fields" else self._kind_of_fields(first)
        layout = self._layout and [self._layout.name, options.has_template]
        changes = {"columns": dict(columns), "layout": layout}
        self.identity = {**reader.identity, **{name: value for name, value in changes.items() if value}}

    def _text_kind(self) -> Kind:
        if self._wanted not in ("auto", "text"):
            what, got = "text and token files are of another kind", repr(self._wanted)
            raise DataError(what, where="kind", got=got, expected='"text"')
        if self._options.columns:
            raise DataError("text and token files have no columns", where="option map", expected="files with fields")
        return "text"

    def _kind_of_fields(self, first: First | None) -> Kind:
        """Returns the kind of the records. Finds out what their fields are by the first one."""
        if first is None:
            if self._wanted == "auto":
                raise DataError("the data has no records", where=self.name)
            return self._wanted
        if not self._columns and (own := [*filter(first.fields.__contains__, self._options.columns)]):
            self.notes.append(f"{first.source.name}: has no column that --map names; read are {first_names(own)}")
        with naming(first.source):
            ours = self._ours(first.fields)
            self._layout = layout_of(ours, self._wanted)
            if self._layout is not None:
                self.notes.append(f"{first.source.name}: records with {self._layout.name}")
            kind = self._wanted
            if kind == "auto":
                kind = record_kind(self._converted(first.fields), self._options.columns)
            if self._layout is None:
                self._note_unread(first.source, ours, kind)
            return kind

    def _note_unread(self, source: Source, record: Fields, kind: Kind) -> None:
        """Notes fields that records of other kinds have, such as the text of a conversation; of a pair, all others."""
        self.unread = unread_fields(record, kind)
        unread = [name for name in self.unread if kind == "pair" or name in FIELD_NAMES]
        if unread and kind != "prompt":  # whose fields a reward function reads
            pair = "query or anchor, positive, negative, negatives and negative_1, ..."
            read = pair if kind == "pair" else " and ".join(FIELDS[kind].required)
            self.notes.append(f"{source.name}: not read: {first_names(unread)}; read are {read}")

    def _ours(self, fields: Fields) -> Fields:
        """Returns a record with our names of columns."""
        match fields:
            case TextCells():
                return typed_cells(with_our_names(fields, self._columns))
        return with_our_names(fields, self._columns) if self._columns else fields

    def _converted(self, fields: Fields) -> Fields:
        """Returns a record with our fields."""
        ours = self._ours(fields)
        return ours if self._layout is None else self._layout.convert(ours, self._wanted, self._options.has_template)

    def _parse(self, parse: Parse, data: object) -> Fields | None:
        fields = parse(data)
        if fields is None:
            return None
        converted = self._converted(fields)
        if self._wanted == "auto" and self.kind in ("chat", "completion"):
            refuse_two_kinds(converted, self._options.columns)
        return converted

    def _with_our_fields(self, record: Record) -> Record:
        return record if record.parse is None else record._replace(parse=partial(self._parse, record.parse))

    def locate(self, block: int) -> Iterable[object]:
        """Returns the locations of the records of a block."""
        return self._reader.locate(block)

    def read(self, location: object) -> Record:
        """Returns the record at a location."""
        return self._with_our_fields(self._reader.read(location))

    def read_again(self, source: Source) -> Record:
        """Returns a record that was read before."""
        return self._with_our_fields(self._reader.read_again(source))

    def fields(self) -> Iterator[tuple[Source, Fields]]:
        """Yields the fields of each record in order, those of blank ones left out.

        Raises:
            DataError: a record cannot be read.
        """
        for record in _records(self):
            with naming(record.source):
                fields = record.fields()
            if fields is not None:
                yield record.source, fields


def _records(reader: RecordReader) -> Iterator[Record]:
    for block in range(reader.num_blocks):
        yield from map(reader.read, reader.locate(block))


def open_sources(data: object, kind: Kind | Literal["auto"], options: ReadOptions) -> list[DataSource]:
    """Opens the sources of data, see `open_data`.

    Raises:
        DataError: see `open_data`; or the sources are of different kinds.
    """
    readers = open_readers(data, options)
    firsts = [first_record(reader, kind) for reader, _ in readers]
    check_column_names(options.columns, [(first.source, first.fields) for first in firsts if first is not None])
    sources = [
        DataSource(reader, kind, options, weight, first)
        for (reader, weight), first in zip(readers, firsts, strict=True)
    ]
    kinds = {source.kind for source in sources}
    if len(kinds) > 1:
        got = ", ".join(f"{source.name} of kind {source.kind!r}" for source in sources)
        raise DataError("the data has several kinds", where="option data", got=got, expected="one")
    return sources
