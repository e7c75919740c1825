"""Opens training data: finds the files, detects what the records are, and returns a stream of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from ligerzoo.checks import AT_LEAST_1, is_list, one_of
from ligerzoo.errors import DataError
from ligerzoo.text.special_text import SpecialTokens
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.fields import KINDS, Fields, Kind, parse_json_line, parse_row, parse_text, record_kind
from ligerzoo.train.data.images import ImageEncoder, SampleImages
from ligerzoo.train.data.records import (
    LineReader,
    Paths,
    RecordReader,
    RowReader,
    dataset_rows,
    find_files,
    is_path,
    is_saved_dataset,
)
from ligerzoo.train.data.sample_encoder import SampleEncoder, encode_tokens
from ligerzoo.train.data.samples import Source, naming
from ligerzoo.train.data.stream import Order, Position, SampleStream
from ligerzoo.train.data.token_files import TokenReader
from ligerzoo.train.data_options import ONCE, EncodingOptions, ReadOrder, TooLong, TrainAnswers, check_data_option
from ligerzoo.vision.processor import Processor

TextUnit = Literal["file", "line"]

_TEXT_BLOCK = 2**16  # bytes of a part of a long text file


def open_data(
    data: Paths | Sequence[Mapping[str, object]],
    kind: Kind | Literal["auto"],
    tokenizer: Tokenizer | Processor,
    *,
    seq_length: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    workers: int = 1,
    too_long: TooLong = "error",
    train_on_prompt: bool = False,
    train_answers: TrainAnswers = "all",
    end_of_answer: str | None = None,
    special_tokens: SpecialTokens = "text",
    text_unit: TextUnit = "file",
    chat_template: str | None = None,
    template_variables: Mapping[str, object] | None = None,
    eos_token_id: int | None = None,
    embedding_rows: int | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
) -> SampleStream:
    """Opens training data as a stream of samples.

    The order of the samples depends on the data, the seed and `shuffle` only. Records are read and encoded while the
    stream is used, so the first samples of a file of any size are there at once.

    Args:
        data: a file, a directory, a glob pattern, or several: JSON Lines (.jsonl, .ndjson), text (.txt) or tokens
            (.bin, .npy); or the directory of a saved Hugging Face dataset; or a dataset or another sequence of
            dictionaries.
        kind: what a record is: "text", "completion" (a prompt and its completion), "chat", "preference", "labelled"
            (for KTO), "prompt" (for GRPO) or "pair" (for embedding models). "auto" decides by the fields of the first
            record.
        tokenizer: encodes the texts. A processor also encodes images in messages, which a tokenizer refuses.
        seq_length: the most tokens of a sample, both sequences of a preference together, and of each text of kind
            "pair"; documents of kind "text" may be longer. Token files are read in samples of this many tokens.
        seed: selects the order.
        shuffle: whether the order is random; otherwise it is that of the files.
        epochs: how often the data is read, each time in another order. None for no end.
        workers: threads that encode records. They do not change the samples or their order.
        too_long: what happens to samples of more than `seq_length` tokens: "error" raises DataError, "truncate" removes
            their last tokens (and drops a sample in which nothing remains to be trained), "drop" drops them.
        train_on_prompt: whether prompts of kind "completion" are trained, too.
        train_answers: "all" trains all answers of a conversation, "last" the last one.
        end_of_answer: the token that ends an answer, for chat templates that end an answer with no special token.
        special_tokens: what a special token means that is written in a text or a message: "text" for its characters,
            "control" for the special token.
        text_unit: what a document is in a .txt file: the whole "file", read in parts of 64 KiB, or a "line".
        chat_template: name or source of the chat template; None for the tokenizer's.
        template_variables: further variables of the chat template, such as `{"enable_thinking": False}`.
        eos_token_id: ends documents and completions. None for the tokenizer's end-of-sequence token.
        embedding_rows: rows of the model's embedding. A tokenizer may have more tokens; samples with such tokens are
            errors. None for no limit.
        query_prompt: begins the queries of kind "pair", as a prompt of `EmbeddingModel.encode` does.
        document_prompt: begins their documents.

    Raises:
        DataError: the data is missing, empty, of an unknown format or of another kind, or an option has an unsupported
            value. While the stream is used: a record is malformed or too long; the error names its file and line.
        TokenizerError: the tokenizer has no end-of-sequence token.
    """
    encoding = EncodingOptions(
        seq_length=seq_length,
        too_long=too_long,
        train_on_prompt=train_on_prompt,
        train_answers=train_answers,
        end_of_answer=end_of_answer,
        special_tokens=special_tokens,
        chat_template=chat_template,
        template_variables=template_variables or {},
        eos_token_id=eos_token_id,
        embedding_rows=embedding_rows,
        query_prompt=query_prompt,
        document_prompt=document_prompt,
    )
    order = ReadOrder(seed=seed, shuffle=shuffle, epochs=epochs)
    return open_samples(data, kind, tokenizer, encoding, order, workers=workers, text_unit=text_unit)


def open_samples(
    data: object,
    kind: Kind | Literal["auto"],
    tokenizer: Tokenizer | Processor,
    encoding: EncodingOptions,
    order: ReadOrder,
    *,
    workers: int = 1,
    text_unit: TextUnit = "file",
) -> SampleStream:
    """Opens training data as a stream of samples, see `open_data`."""
    check_data_option("kind", kind, one_of(("auto", *KINDS)))
    check_data_option("text_unit", text_unit, one_of(get_args(TextUnit)))
    check_data_option("workers", workers, AT_LEAST_1)
    processor, tokenizer = (tokenizer, tokenizer.tokenizer) if isinstance(tokenizer, Processor) else (None, tokenizer)
    ids = len(tokenizer) if encoding.embedding_rows is None else min(len(tokenizer), encoding.embedding_rows)
    reader, parse = open_records(data, ReadOptions(encoding.seq_length, ids, text_unit))
    records = Order(reader, _check_kind(reader, parse, kind), order)
    if parse is None:
        return SampleStream(records, encode_tokens, identity={"seq_length": encoding.seq_length}, workers=workers)
    fields, image_encoder = parse, None if processor is None else ImageEncoder(processor)
    encoder = SampleEncoder(records.kind, tokenizer, encoding, image_encoder)

    def images_of_record(source: Source) -> list[object]:
        record = reader.read_again(source)
        with naming(source):
            found = fields(record.data)
            return [] if found is None else encoder.images_of(found)

    return SampleStream(
        records,
        partial(encoder.encode, parse=fields),
        identity=encoding.identity,
        workers=workers,
        images=None if processor is None else SampleImages(processor, images_of_record),
    )


Parse = Callable[[Any], Fields | None]


class ReadOptions(NamedTuple):
    """How files are cut into records.

    Attributes:
        seq_length: tokens of a record of a token file.
        vocab_size: the ids of token files must be smaller.
        text_unit: see `open_data`.
    """

    seq_length: int = 2
    vocab_size: int = 2**32
    text_unit: TextUnit = "file"


class OpenedRecords(NamedTuple):
    """The reader of the data and the function that parses its records; None for token files."""

    reader: RecordReader
    parse: Parse | None


def _open_json_lines(files: list[Path], options: ReadOptions) -> OpenedRecords:
    return OpenedRecords(LineReader(files), parse_json_line)


def _open_text(files: list[Path], options: ReadOptions) -> OpenedRecords:
    in_lines = options.text_unit == "line"
    return OpenedRecords(LineReader(files) if in_lines else LineReader(files, _TEXT_BLOCK, joined=True), parse_text)


def _open_tokens(files: list[Path], options: ReadOptions) -> OpenedRecords:
    return OpenedRecords(TokenReader(files, options.seq_length, options.vocab_size), None)


FORMATS = {
    ".jsonl": _open_json_lines,
    ".ndjson": _open_json_lines,
    ".txt": _open_text,
    ".bin": _open_tokens,
    ".npy": _open_tokens,
}
"""What opens files, by their suffix. A format is a function here, and its reader or its parser."""


def open_records(data: object, options: ReadOptions) -> OpenedRecords:
    """Opens the records of `data`, see `open_data`."""
    if is_saved_dataset(data) or not _are_paths(data):
        return OpenedRecords(RowReader(*dataset_rows(data)), parse_row)
    files = find_files(data, FORMATS)
    return FORMATS[files[0].suffix](files, options)


def _are_paths(data: object) -> TypeGuard[Paths]:
    return is_path(data) or (is_list(data) and all(map(is_path, data)))


def _check_kind(reader: RecordReader, parse: Parse | None, kind: Kind | Literal["auto"]) -> Kind:
    """Returns the kind of the first record if `kind` is "auto"."""
    if parse is None or parse is parse_text:
        if kind not in ("auto", "text"):
            raise DataError("text and token files are of another kind", where="kind", got=repr(kind), expected='"text"')
        return "text"
    if kind != "auto":
        return kind
    for source, fields in read_fields(reader, parse):
        with naming(source):
            return record_kind(fields)
    raise DataError("the data has no records", where="data")


def read_fields(reader: RecordReader, parse: Parse) -> Iterator[tuple[Source, Fields]]:
    """Yields the source and the fields of each record in the order of the files, blank lines left out.

    Raises:
        DataError: a record cannot be read.
    """
    for _, record in Order(reader, "text", ONCE).records(Position()):
        if isinstance(record, DataError):
            raise record
        with naming(record.source):
            fields = parse(record.data)
        if fields is not None:
            yield record.source, fields
