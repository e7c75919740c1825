"""Opens training data: finds the files, detects what the records are, and returns a stream of samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from ligerzoo.errors import DataError, TokenizerError, did_you_mean
from ligerzoo.text.special_text import SpecialTokens
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.chat import ChatEncoder, TrainAnswers
from ligerzoo.train.data.encoding import RecordTextEncoder
from ligerzoo.train.data.fields import KINDS, Fields, Kind, record_kind
from ligerzoo.train.data.files import FORMATS, Paths, dataset_rows, find_files, is_saved_dataset
from ligerzoo.train.data.images import ImageEncoder, SampleImages
from ligerzoo.train.data.order import Order, Position
from ligerzoo.train.data.parsing import parse_json_line, parse_row, parse_text
from ligerzoo.train.data.records import LineReader, Record, RecordReader, RowReader
from ligerzoo.train.data.sample_encoder import Result, SampleEncoder, TooLong, encode_tokens
from ligerzoo.train.data.samples import PromptSample, Source
from ligerzoo.train.data.stream import Encode, SampleStream
from ligerzoo.train.data.token_files import TokenReader
from ligerzoo.vision.processor import Processor

TextUnit = Literal["file", "line"]

_TEXT_BLOCK = 2**16  # bytes of a part of a long text file


def open_data(
    data: Paths | Sequence[Mapping[str, Any]],
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
    template_variables: Mapping[str, Any] | None = None,
    eos_token_id: int | None = None,
    embedding_rows: int | None = None,
) -> SampleStream:
    """Opens training data as a stream of samples.

    The order of the samples depends on the data, the seed and `shuffle` only. Records are read and encoded while the
    stream is used, so the first samples of a file of any size are there at once.

    Args:
        data: a file, a directory, a glob pattern, or several: JSON Lines (.jsonl, .ndjson), text (.txt) or tokens
            (.bin, .npy); or the directory of a saved Hugging Face dataset; or a dataset or another sequence of
            dictionaries.
        kind: what a record is: "text", "completion" (a prompt and its completion), "chat", "preference", "labelled"
            (for KTO) or "prompt" (for GRPO). "auto" decides by the fields of the first record.
        tokenizer: encodes the texts. A processor also encodes images in messages, which a tokenizer refuses.
        seq_length: the most tokens of a sample, both sequences of a pair together; documents of kind "text" may be
            longer. Token files are read in samples of this many tokens.
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

    Raises:
        DataError: the data is missing, empty, of an unknown format or of another kind, or an option has an unsupported
            value. While the stream is used: a record is malformed or too long; the error names its file and line.
        TokenizerError: the tokenizer has no end-of-sequence token.
    """
    for name, value, accepted in (
        ("kind", kind, ("auto", *KINDS)), ("too_long", too_long, get_args(TooLong)),
        ("train_answers", train_answers, get_args(TrainAnswers)),
        ("special_tokens", special_tokens, get_args(SpecialTokens)),
        ("text_unit", text_unit, get_args(TextUnit)),
    ):  # fmt: skip
        _check_choice(name, value, accepted)
    for name, number, least in (
        ("seq_length", seq_length, 2), ("workers", workers, 1), ("epochs", 1 if epochs is None else epochs, 1),
    ):  # fmt: skip
        if not isinstance(number, int) or number < least:
            raise DataError(
                "not a valid number", where=name, got=repr(number), expected=f"an integer of {least} or more"
            )
    processor, tokenizer = (tokenizer, tokenizer.tokenizer) if isinstance(tokenizer, Processor) else (None, tokenizer)
    ids = len(tokenizer) if embedding_rows is None else min(len(tokenizer), embedding_rows)
    reader, parse = open_records(data, seq_length, ids, text_unit)
    kind = _check_kind(reader, parse, kind)
    identity: dict[str, Any] = {"seq_length": seq_length}
    encode: Encode
    images: SampleImages | None = None
    if parse is None:
        encode = encode_tokens
    else:
        text_encoder = RecordTextEncoder(tokenizer, special_tokens, eos_token_id)
        image_encoder = None if processor is None else ImageEncoder(processor)
        chat = ChatEncoder(
            text_encoder, train_answers=train_answers, end_of_answer=end_of_answer, chat_template=chat_template,
            template_variables=template_variables, images=image_encoder,
        )  # fmt: skip
        if kind != "prompt":
            _ = text_encoder.eos  # raises before the training begins
        samples = SampleEncoder(
            kind, text_encoder, chat, seq_length=seq_length, train_on_prompt=train_on_prompt, too_long=too_long,
            images=image_encoder,
        )  # fmt: skip
        fields = parse
        identity |= {
            "too_long": too_long, "train_on_prompt": train_on_prompt, "train_answers": train_answers,
            "end_of_answer": end_of_answer, "special_tokens": special_tokens, "chat_template": chat_template,
            "template_variables": dict(template_variables or {}), "eos_token_id": eos_token_id,
        }  # fmt: skip

        def encode(records: Sequence[Record]) -> list[Any]:
            encoded = samples.encode(records, fields)
            if embedding_rows is None:
                return encoded
            return [_check_tokens(result, tokenizer, embedding_rows) for result in encoded]

        def images_of_record(source: Source) -> list[Any]:
            found = fields(reader.read_again(source))
            return [] if found is None else samples.images_of(found, source)

        images = None if processor is None else SampleImages(processor, images_of_record)

    return SampleStream(
        reader, encode, kind=kind, identity=identity, seed=seed, shuffle=shuffle, epochs=epochs, workers=workers,
        images=images,
    )  # fmt: skip


def _check_tokens(result: Result, tokenizer: Tokenizer, embedding_rows: int) -> Result:
    """Returns what a record gave, or the error of a token without a row in the model's embedding."""
    for sample in () if isinstance(result, DataError) else result:
        for segment in (sample,) if isinstance(sample, PromptSample) else sample.segments:
            try:
                tokenizer.check_ids(segment.input_ids, embedding_rows)
            except TokenizerError as error:
                return DataError(str(error), where=sample.source)
    return result


Parse = Callable[[Record], Fields | None]


def open_records(
    data: Any, seq_length: int, vocab_size: int, text_unit: TextUnit = "file"
) -> tuple[RecordReader, Parse | None]:
    """Returns the reader of the data and the function that parses its records; None for token files.

    Args:
        data: see `open_data`.
        seq_length: tokens of a record of a token file.
        vocab_size: the ids of token files must be smaller.
        text_unit: see `open_data`.
    """
    if is_saved_dataset(data) or not _are_paths(data):
        rows, name, identity = dataset_rows(data)
        return RowReader(rows, name, identity), parse_row
    files = find_files(data)
    match FORMATS[files[0].suffix]:
        case "tokens":
            return TokenReader(files, seq_length, vocab_size), None
        case "JSON Lines":
            return LineReader(files), parse_json_line
        case _ if text_unit == "line":
            return LineReader(files), parse_text
        case _:
            return LineReader(files, block_size=_TEXT_BLOCK, joined=True), parse_text


def _are_paths(data: object) -> bool:
    if isinstance(data, str | os.PathLike):
        return True
    return isinstance(data, list | tuple) and all(isinstance(path, str | Path) for path in data)


def _check_kind(reader: RecordReader, parse: Parse | None, kind: Kind | Literal["auto"]) -> Kind:
    """Returns the kind of the first record if `kind` is "auto"."""
    if parse is None or parse is parse_text:
        if kind not in ("auto", "text"):
            raise DataError("text and token files are of another kind", where="kind", got=repr(kind), expected='"text"')
        return "text"
    if kind != "auto":
        return kind
    for _, record in Order(reader, seed=0, shuffle=False, epochs=1).records(Position()):
        if isinstance(record, DataError):
            raise record
        if (fields := parse(record)) is not None:
            return record_kind(fields, record.source)
    raise DataError("the data has no records", where="data")


def _check_choice(name: str, value: str, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise DataError(
            "unsupported value", where=name, got=repr(value), expected=", ".join(accepted),
            remedy=did_you_mean(str(value), accepted),
        )  # fmt: skip
