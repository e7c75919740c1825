"""The texts of data files, without a tokenizer: what a new tokenizer is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ligerzoo.errors import DataError
from ligerzoo.train.data.fields import (
    FIELDS,
    Fields,
    Kind,
    check_record,
    is_messages,
    messages_field,
    record_kind,
    text_field,
)
from ligerzoo.train.data.open import open_records
from ligerzoo.train.data.order import Order, Position
from ligerzoo.train.data.samples import Source

_NOT_TEXT = "label"


def read_texts(data: Any) -> Iterator[str]:
    """Yields the texts of all records in the order of the files: documents, prompts, completions and messages.

    Reads while it yields. Long .txt files are read in parts of 64 KiB, which end at a line end.

    Args:
        data: see `ligerzoo.train.data.open_data`. All records must be of the kind of the first one.

    Raises:
        DataError: the data is missing, empty, of an unknown format or consists of tokens, or a record is malformed; the
            error names file and line.
    """
    reader, parse = open_records(data, seq_length=2, vocab_size=2**32)
    if parse is None:
        raise DataError("token files have no text", where="data", expected=".jsonl, .ndjson or .txt")
    kind: Kind | None = None
    for _, record in Order(reader, seed=0, shuffle=False, epochs=1).records(Position()):
        if isinstance(record, DataError):
            raise record
        if (fields := parse(record)) is not None:
            kind = kind or record_kind(fields, record.source)
            yield from _texts(check_record(fields, kind, record.source), kind, record.source)
    if kind is None:
        raise DataError("the data has no text", where="data")


def _texts(fields: Fields, kind: Kind, source: Source) -> Iterator[str]:
    names = FIELDS[kind]
    for name in dict.fromkeys((*names.required, "prompt")):
        if name not in fields or name == _NOT_TEXT:
            continue
        if name == "messages" or is_messages(fields[name]):
            for message in messages_field(fields, name, source):
                content = message.get("content", "")
                yield content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        else:
            yield text_field(fields, name, source, may_be_blank=name == "prompt")
