"""Reads all data once: to check it before anything is trained, to write its tokens, or for its texts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from ligerzoo.checks import is_text
from ligerzoo.entries import is_array
from ligerzoo.errors import DataError, RecordProblems
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.fields import (
    FIELDS,
    Kind,
    check_record,
    messages_field,
    pair_texts,
    text_field,
)
from ligerzoo.train.data.open import open_data
from ligerzoo.train.data.records import Fields
from ligerzoo.train.data.samples import AnySample, Sample, naming
from ligerzoo.train.data.sources import ReadOptions, open_sources
from ligerzoo.train.data.stream import SampleStream
from ligerzoo.train.data.token_files import TokenWriter
from ligerzoo.vision.processor import Processor


@dataclass
class DataReport:
    """What a data set contains. `str` gives a summary with one line for each problem.

    Attributes:
        kind: the kind of the records.
        samples: number of samples.
        dropped: number of records without a sample: blank lines, and samples dropped as too long.
        tokens: number of tokens of all samples.
        trained_tokens: number of tokens that the loss counts; 0 for prompts.
        longest: tokens of the longest sequence.
        images: number of images.
        problems: what is wrong with the records, by file and line.
        first_samples: the first three samples.
        notes: lines to print about the data, such as whose fields it has.
    """

    kind: str
    samples: int = 0
    dropped: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    images: int = 0
    problems: RecordProblems = field(default_factory=RecordProblems)
    first_samples: list[AnySample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def raise_if_bad(self) -> None:
        """Raises DataError with all reported problems if there is any."""
        if self.problems.count:
            only = str(self.problems.first[0]) if self.problems.count == 1 else None
            raise DataError(only or "\n".join(self._lines_of_problems()))

    @property
    def summary(self) -> str:
        """A line with the numbers of samples and tokens."""
        trained = "" if self.kind in ("prompt", "pair") else f", {self.trained_tokens:,} of them trained"
        return (
            f"{self.samples:,} samples of kind {self.kind!r}, {self.tokens:,} tokens{trained}; "
            f"{f'{self.images:,} images; ' if self.images else ''}longest sequence {self.longest:,} tokens; "
            f"{self.dropped:,} records without a sample"
        )

    def __str__(self) -> str:
        return "\n".join([self.summary, *(self._lines_of_problems() if self.problems.count else [])])

    def _lines_of_problems(self) -> list[str]:
        count = self.problems.count
        return [f"{count:,} problem{'s' * (count > 1)}:", *(f"  {error}" for error in self.problems.errors)]

    def _count(self, sample: AnySample) -> None:
        self.samples += 1
        if len(self.first_samples) < 3:
            self.first_samples.append(sample)
        lengths = [len(segment.input_ids) for segment in sample.segments]
        self.trained_tokens += sum(segment.trained_tokens for segment in sample.segments)
        self.images += sum(len(segment.images) for segment in sample.segments)
        self.tokens += sum(lengths)
        self.longest = max(self.longest, *lengths)


def check_data(
    data: Any, kind: Any, tokenizer: Tokenizer | Processor, *, progress: bool | None = None, **options: Any
) -> DataReport:
    """Reads and encodes all records once, images included, and reports what is wrong with them.

    Args:
        data: see `open_data`.
        kind: see `open_data`.
        tokenizer: see `open_data`.
        progress: whether to show a progress bar on stderr; None if stderr is a terminal.
        options: further options of `open_data`.

    Raises:
        DataError: the data cannot be opened at all; see `open_data`.
    """
    stream = open_data(data, kind, tokenizer, **{**options, "shuffle": False, "epochs": 1})
    return check_samples(stream, progress=progress)


def check_samples(stream: SampleStream, *, progress: bool | None = None) -> DataReport:
    """Reads all samples of a stream that ends, see `check_data`."""
    report = DataReport(stream.kind, notes=stream.notes)
    is_hidden = None if progress is None else not progress
    with tqdm(stream.results(), "checking data", unit=" records", disable=is_hidden) as results:
        for _, result in results:
            try:
                if isinstance(result, DataError):
                    raise result
                for sample in result:
                    if stream.images is not None:
                        stream.images.read(sample.segments[:1])  # all pixels: files may be truncated
            except DataError as error:
                report.problems.add(error, error.__cause__)
                continue
            report.dropped += not result
            for sample in result:
                report._count(sample)
    return report


_NOT_TEXT = "label"


def read_texts(data: Any, columns: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields the texts of all records in the order of the files: documents, prompts, completions and messages.

    Reads while it yields. Long .txt files are read in parts of 64 KiB, which end at a line end.

    Args:
        data: see `ligerzoo.train.data.open_data`. All records must be of the kind of the first one.
        columns: see `open_data`.

    Raises:
        DataError: the data is missing, empty, of an unknown format or consists of tokens, or a record is malformed; the
            error names file and line.
    """
    is_empty = True
    for part in open_sources(data, "auto", ReadOptions(columns=columns or {})):
        if part.holds == "tokens":
            raise DataError("token files have no text", where=part.name, expected="files with fields, or .txt")
        for source, fields in part.fields():
            is_empty = False
            with naming(source):
                texts = list(_texts(check_record(fields, part.kind), part.kind))
            yield from texts
    if is_empty:
        raise DataError("the data has no text", where="data")


def _texts(fields: Fields, kind: Kind) -> Iterator[str]:
    if kind == "pair":
        query, positive, negatives = pair_texts(fields)
        yield from (query, positive, *negatives)
        return
    for name in dict.fromkeys((*FIELDS[kind].required, "prompt")):
        if name not in fields or name == _NOT_TEXT:
            continue
        if name == "messages" or is_array(fields[name]):
            for message in messages_field(fields, name):
                content = message.get("content", "")
                yield content if is_text(content) else "".join(part.get("text", "") for part in content)
        else:
            yield text_field(fields, name, may_be_blank=name == "prompt")


def write_tokens(
    data: Any,
    output: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    workers: int = 1,
    progress: bool | None = None,
    **options: Any,
) -> int:
    """Writes the tokens of all documents of kind "text" to a token file, each with the end-of-sequence token.

    Args:
        data: see `open_data`.
        output: the file, `NAME.bin`. `NAME.bin.json` describes it.
        tokenizer: see `open_data`.
        workers: see `open_data`.
        progress: whether to show a progress bar on stderr; None if stderr is a terminal.
        options: `special_tokens`, `text_unit`, `columns` and `eos_token_id` of `open_data`.

    Returns:
        The number of tokens.

    Raises:
        DataError: as `open_data`. No file is written.
    """
    stream = open_data(data, "text", tokenizer, seq_length=2**20, shuffle=False, epochs=1, workers=workers, **options)
    is_hidden = None if progress is None else not progress
    with (
        TokenWriter(output, len(tokenizer)) as writer,
        tqdm(desc="tokenizing", unit=" tokens", unit_scale=True, disable=is_hidden) as bar,
    ):
        for sample in stream:
            assert isinstance(sample, Sample)
            writer.write(sample.input_ids)
            bar.update(len(sample.input_ids))
    return writer.tokens
