"""Opens training data: finds the files, detects what the records are, and returns a stream of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from ligerzoo.checks import AT_LEAST_1, one_of
from ligerzoo.text.special_text import SpecialTokens
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.fields import KINDS, Kind
from ligerzoo.train.data.images import ImageEncoder, SampleImages
from ligerzoo.train.data.sample_encoder import SampleEncoder, encode_tokens
from ligerzoo.train.data.samples import Source, naming
from ligerzoo.train.data.sources import Paths, ReadOptions, TextUnit, open_readers, open_sources
from ligerzoo.train.data.stream import Order, SampleStream
from ligerzoo.train.data_options import EncodingOptions, ReadOrder, TooLong, TrainAnswers, check_data_option
from ligerzoo.vision.processor import Processor, tokenizer_of


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
    columns: Mapping[str, str] | None = None,
) -> SampleStream:
    """Opens training data as a stream of samples.

    The order of the samples depends on the data, the seed and `shuffle` only. Records are read and encoded while the
    stream is used, so the first samples of a file of any size are there at once.

    Args:
        data: a file, a directory, a glob pattern, or several: JSON Lines (.jsonl, .ndjson), JSON arrays (.json), CSV
            (.csv, .tsv), Parquet, text (.txt) or tokens (.bin, .npy); the directory of a saved Hugging Face dataset; a
            dataset of the hub, such as "org/name:train"; or a dataset or another sequence of dictionaries. Several may
            have weights, such as `["a.jsonl:0.7", "b.csv:0.3"]`: how often their records occur.
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
        columns: the columns of the data by our names, such as `{"prompt": "question", "completion": "answer"}`.

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
    opened = OpenedData(data, kind, tokenizer, encoding, columns=columns or {}, text_unit=text_unit)
    return opened.samples(order, workers)


class OpenedData:
    """Data that is opened once, for any number of streams of samples; see `open_data`.

    Args:
        encoding: how records become samples.
        data, kind, tokenizer, columns, text_unit: see `open_data`.
    """

    def __init__(
        self,
        data: object,
        kind: Kind | Literal["auto"],
        tokenizer: Tokenizer | Processor,
        encoding: EncodingOptions,
        *,
        columns: Mapping[str, str],
        text_unit: TextUnit = "file",
    ) -> None:
        check_data_option("kind", kind, one_of(("auto", *KINDS)))
        check_data_option("text_unit", text_unit, one_of(get_args(TextUnit)))
        self._processor = tokenizer if isinstance(tokenizer, Processor) else None
        self._tokenizer, self._encoding = tokenizer_of(tokenizer), encoding
        tokens = len(self._tokenizer)
        ids = tokens if encoding.embedding_rows is None else min(tokens, encoding.embedding_rows)
        has_template = bool(encoding.chat_template or self._tokenizer.chat_templates)
        options = ReadOptions(encoding.seq_length, ids, text_unit, columns, has_template)
        self._sources = open_sources(data, kind, options)

    def samples(self, order: ReadOrder, workers: int = 1) -> SampleStream:
        """Returns a stream of the samples, from the first one on."""
        check_data_option("workers", workers, AT_LEAST_1)
        records, processor, encoding = Order(self._sources, order), self._processor, self._encoding
        if all(source.holds == "tokens" for source in self._sources):
            return SampleStream(records, encode_tokens, identity={"seq_length": encoding.seq_length}, workers=workers)
        images = None if processor is None else ImageEncoder(processor)
        encoder = SampleEncoder(records.kind, self._tokenizer, encoding, images)

        def images_of_record(source: Source) -> list[object]:
            record = next(one for one in self._sources if source.name in one.names).read_again(source)
            with naming(source):
                found = record.fields()
                return [] if found is None else encoder.images_of(found)

        return SampleStream(
            records,
            encoder.encode,
            identity=encoding.identity,
            workers=workers,
            images=None if processor is None else SampleImages(processor, images_of_record),
        )


def check_files(data: object) -> None:
    """Raises DataError if the data is not here, or not of a format that can be read. No record is read."""
    open_readers(data, ReadOptions())
