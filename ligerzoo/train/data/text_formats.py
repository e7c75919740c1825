"""Formats of text files: where their records begin and end, and what the fields of a record are."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ligerzoo.errors import DataError, first_names, quote
from ligerzoo.train.data.fields import decoded, parse_fields, parse_text
from ligerzoo.train.data.records import Fields, Parse
from ligerzoo.train.data.samples import naming
from ligerzoo.train.data.separators import ArrayItems, CsvRows, LineEnds, Separators

MAX_RECORD = 2**26
"""Bytes of the longest record of a text file."""

_HEADER, _TAIL = 2**16, 2**16
_QUOTED = "CSV whose quotes all end"
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zX": "xz",
    b"PK\x03\x04": "zip",
}

ReadBytes = Callable[[int, int], bytes]
"""Returns bytes of a file, given the first one and how many; fewer at its end."""


class TextFormat(NamedTuple):
    """How a text file is cut into records, and what they are.

    Attributes:
        separators: what ends records.
        parse: returns the fields of a record.
        first: the byte where the first record begins.
        expected: what the file should be, for errors.
        last: the byte after the last record; None for the end of the file.
        blank: bytes at the beginning of a record that are not part of it.
    """

    separators: Separators
    parse: Parse
    first: int
    expected: str
    last: int | None = None
    blank: bytes = b""


OpenFormat = Callable[[ReadBytes, int, str], TextFormat]
"""Returns the format of a file, given how its bytes are read, its size and its name."""


def first_byte(read: ReadBytes, name: str) -> int:
    """Returns where the text of a file begins: after the byte order mark that some editors write.

    Raises:
        DataError: the file is compressed or UTF-16.
    """
    start = read(0, 4)
    for mark, kind in _COMPRESSED.items():
        if start.startswith(mark):
            raise DataError(f"the file is compressed ({kind})", where=f"{name}:1", remedy="Decompress it.")
    if start.startswith(_UTF16):
        raise DataError("the file is UTF-16", where=f"{name}:1", expected="UTF-8", remedy="Convert it.")
    return len(_BOM) if start.startswith(_BOM) else 0


def open_json_lines(read: ReadBytes, size: int, name: str) -> TextFormat:
    """A JSON object in each line."""
    return TextFormat(LineEnds(), parse_fields, first_byte(read, name), "a file with one object per line")


def open_text(read: ReadBytes, size: int, name: str) -> TextFormat:
    """Text."""
    return TextFormat(LineEnds(), parse_text, first_byte(read, name), "text")


def open_json(read: ReadBytes, size: int, name: str) -> TextFormat:
    """A JSON array of objects; or a JSON object in each line, which other programs write to .json files too.

    Raises:
        DataError: the array does not end.
    """
    first = first_byte(read, name)
    start = read(first, _HEADER)
    first += len(start) - len(start.lstrip())
    if not start.lstrip().startswith(b"["):
        return TextFormat(
            LineEnds(), _parse_line_or_whole, first, "a list of objects, or a file with one object per line"
        )
    tail = read(max(0, size - _TAIL), _TAIL)
    if not tail.rstrip().endswith(b"]"):
        got, remedy = quote(tail.decode(errors="replace")[-40:]), "The file may be truncated."
        raise DataError("the list does not end", where=name, got=f"{got} at the end", expected="]", remedy=remedy)
    last = size - (len(tail) - len(tail.rstrip())) - 1
    return TextFormat(ArrayItems(), parse_fields, first + 1, "a list of objects", last, b" \t\r\n")


def _parse_line_or_whole(data: bytes) -> Fields | None:
    try:
        return parse_fields(data)
    except DataError as error:
        if data.strip() not in (b"{", b"}"):
            raise
        remedy = "Put the objects into a list, [{...}, {...}], or each into one line."
        raise DataError("an object that several lines share", got=quote(data.decode()), remedy=remedy) from error


def open_csv(read: ReadBytes, size: int, name: str, delimiter: str | None = None) -> TextFormat:
    """CSV, whose first row has the names of the columns.

    Args:
        delimiter: between fields. None for a comma, or a semicolon or tab if the first row has one and no comma.

    Raises:
        DataError: the names of the columns are malformed, missing or not unique.
    """
    csv.field_size_limit(2 * MAX_RECORD)  # the limit of the module is 128 KiB
    first = first_byte(read, name)
    header = read(first, _HEADER)
    if delimiter is None:
        line = header.partition(b"\n")[0].decode(errors="replace")
        delimiter = next((one for one in ",;\t" if one in line), ",")
    rows = CsvRows(delimiter)
    ends, _ = rows.scan(np.frombuffer(header, np.uint8), 0)
    end = int(ends[0]) if len(ends) else len(header)
    with naming(f"{name}:1"):
        columns = [name.strip() for name in _cells(header[:end], delimiter)]
        if len(ends) == 0 and len(header) == _HEADER:
            raise DataError("the first row is too long", got=f"more than {_HEADER} bytes", expected="names of columns")
        if columns == [""] or not all(columns[1:]) or len({*columns}) < len(columns):  # pandas names no index
            expected = "a name for each column in the first row, each another one"
            raise DataError("not the names of columns", got=first_names(columns), expected=expected)
    return TextFormat(rows, partial(_parse_row, columns, delimiter), min(first + end + 1, size), _QUOTED)


def open_tsv(read: ReadBytes, size: int, name: str) -> TextFormat:
    """CSV with tabs."""
    return open_csv(read, size, name, "\t")


class TextCells(dict[str, str | None]):
    """The cells of a row of CSV: texts, or None for empty ones."""


def _parse_row(columns: Sequence[str], delimiter: str, data: bytes) -> Fields | None:
    """Returns the cells of a row; None for a blank line."""
    if not data.strip():
        return None
    cells = _cells(data, delimiter)
    if len(cells) != len(columns):
        got, expected = f"{len(cells)}: {first_names(cells)}", f"{len(columns)}: {first_names(columns)}"
        remedy = f"Within quotes, a cell may contain {delimiter!r} and line ends."
        raise DataError("a row with another number of cells", got=got, expected=expected, remedy=remedy)
    return TextCells((name, cell or None) for name, cell in zip(columns, cells, strict=True))


def _cells(data: bytes, delimiter: str) -> list[str]:
    text = decoded(data).removesuffix("\r")
    try:
        return next(csv.reader([text], delimiter=delimiter, strict=True))
    except csv.Error as error:
        what = "a carriage return outside of quotes" if str(error).startswith("new-line character") else error
        remedy = "A cell that contains quotes, delimiters or line ends is within quotes, and its quotes are doubled."
        raise DataError(f"malformed CSV: {what}", got=quote(text), remedy=remedy) from error
