"""Samples: what a record of a data file becomes, ready to be packed into batches; and how they are printed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from ligerzoo.errors import DataError, LigerzooError
from ligerzoo.terminal import DIM, GREEN, styled, uses_color
from ligerzoo.text.tokenizer import Tokenizer

UNTRAINED = -100
"""The label of a token that is not trained; `ignore_index` of the losses."""

_CHUNK = 2**24
_MAX_COUNTED = 64  # files


class Source(NamedTuple):
    """Where a record is. `str` gives `file:line`, `file:line:column` after others in the line, or `dataset[row]`.

    The line number is computed when it is asked for, by counting the lines before the record.

    Attributes:
        name: the file, or the name of the dataset.
        start: the byte, row or token where the record begins, counted from 0.
        unit: what `start` counts.
    """

    name: str
    start: int
    unit: Literal["byte", "row", "token"]

    def __str__(self) -> str:
        match self.unit:
            case "byte":
                return f"{self.name}:{_line_and_column(self.name, self.start)}"
            case "row":
                return f"{self.name}[{self.start}]"
            case "token":
                return f"{self.name}, token {self.start}"


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Adds a record, or a part of it, to the errors of the block, which become DataErrors."""
    try:
        yield
    except LigerzooError as error:
        raise DataError(str(error), where=where) from error


_counted: dict[tuple[str, int, int], tuple[int, int, int]] = {}
"""By file, size and time of its last change: a byte, its line, and where that begins. Counts each byte once."""


def _line_and_column(file: str, offset: int) -> str:
    status = os.stat(file)
    key = file, status.st_size, status.st_mtime_ns
    start, line, begin = _counted.get(key, (0, 1, 0))
    if start > offset:
        start, line, begin = 0, 1, 0
    with open(file, "rb") as stream:
        stream.seek(start)
        while start < offset and (data := stream.read(min(offset - start, _CHUNK))):
            begin = start + data.rindex(b"\n") + 1 if b"\n" in data else begin
            start, line = start + len(data), line + data.count(b"\n")
        stream.seek(begin)
        others = stream.read(min(offset - begin, _CHUNK)).strip(b" \t\r[\xef\xbb\xbf")
    if len(_counted) > _MAX_COUNTED:
        _counted.clear()
    _counted[key] = start, line, begin
    return f"{line}:{offset - begin + 1}" if others else str(line)


class ImageTokens(NamedTuple):
    """The tokens of an image in a sample.

    Attributes:
        first: index of the first one.
        last: index after the last one.
        height: pixels of the image, before it is resized.
        width: likewise.
    """

    first: int
    last: int
    height: int
    width: int

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.height, self.width

    def __str__(self) -> str:
        return f"[image {self.width} x {self.height}, {self.last - self.first} tokens]"


@dataclass(frozen=True)
class Sample:
    """A sequence of tokens.

    Attributes:
        input_ids: token ids.
        labels: for each token its id, or -100 if it is not trained. Unshifted, as `model(labels=...)` takes them.
        source: the record it comes from.
        images: the images in it, in order.
    """

    input_ids: list[int]
    labels: list[int]
    source: Source
    images: tuple[ImageTokens, ...] = ()

    @property
    def segments(self) -> tuple[Sample, ...]:
        """The sequences of the sample, which do not attend to each other."""
        return (self,)

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that the loss counts. The first token has no prediction."""
        return len(self.labels) - self.labels.count(UNTRAINED) - (self.labels[:1] not in ([], [UNTRAINED]))

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first one with a label."""
        return next((index for index, label in enumerate(self.labels) if label != UNTRAINED), len(self.labels))

    def cut(self, length: int) -> Sample:
        """Returns the first `length` tokens, or fewer: an image is kept as a whole or removed."""
        kept = tuple(image for image in self.images if image.last <= length)
        if len(kept) < len(self.images):
            length = min(length, self.images[len(kept)].first)
        return Sample(self.input_ids[:length], self.labels[:length], self.source, kept)


@dataclass(frozen=True)
class PreferenceSample:
    """A prompt with a chosen and a rejected completion; only the completions have labels.

    Attributes:
        margin: by how much a reward model should prefer the chosen one.
    """

    chosen: Sample
    rejected: Sample
    margin: float = 0.0

    @property
    def source(self) -> Source:
        """The record of the pair."""
        return self.chosen.source

    @property
    def segments(self) -> tuple[Sample, ...]:
        """The chosen, then the rejected sequence."""
        return self.chosen, self.rejected


@dataclass(frozen=True)
class LabelledSample:
    """A prompt with a completion that is desirable or not, as KTO takes it; only the completion has labels."""

    sample: Sample
    is_desirable: bool

    @property
    def source(self) -> Source:
        """The record of the sample."""
        return self.sample.source

    @property
    def segments(self) -> tuple[Sample, ...]:
        """The sequence."""
        return (self.sample,)


@dataclass(frozen=True)
class PromptSample:
    """A prompt to sample completions of, as GRPO does.

    Attributes:
        input_ids: token ids of the prompt.
        record: all fields of the record, for the reward function.
        source: the record.
        images: the images in it, in order.
    """

    input_ids: list[int]
    record: Mapping[str, Any]
    source: Source
    images: tuple[ImageTokens, ...] = ()

    @property
    def segments(self) -> tuple[Sample, ...]:
        """The prompt, without labels."""
        return (Sample(self.input_ids, [UNTRAINED] * len(self.input_ids), self.source, self.images),)


@dataclass(frozen=True)
class PairSample:
    """A query and its document, for contrastive learning; without labels.

    Attributes:
        query: the query.
        positive: its document.
        negatives: documents that are similar, but not an answer.
    """

    query: Sample
    positive: Sample
    negatives: tuple[Sample, ...] = ()

    @property
    def source(self) -> Source:
        """The record of the pair."""
        return self.query.source

    @property
    def segments(self) -> tuple[Sample, ...]:
        """The query, its document, and the negatives."""
        return self.query, self.positive, *self.negatives


TrainedSample = Sample | PreferenceSample | LabelledSample
"""A sample with labels, which can be packed."""

AnySample = TrainedSample | PromptSample | PairSample


def row_length(sample: AnySample) -> int:
    """Returns the tokens of all sequences of a sample."""
    return sum(len(segment.input_ids) for segment in sample.segments)


def as_state(sample: TrainedSample) -> list[Any]:
    """Returns a sample as JSON values; see `from_state`."""
    match sample:
        case Sample():
            images = list(map(list, sample.images))
            return ["sample", sample.input_ids, sample.labels, list(sample.source), *images]
        case PreferenceSample():
            margin = [sample.margin] if sample.margin else []
            return ["preference", as_state(sample.chosen), as_state(sample.rejected), *margin]
        case LabelledSample():
            return ["labelled", as_state(sample.sample), sample.is_desirable]


def from_state(state: list[Any]) -> TrainedSample:
    """Returns the sample of `as_state`."""
    match state:
        case ["sample", *_]:
            return _sequence(state)
        case ["preference", chosen, rejected, *margin]:
            return PreferenceSample(_sequence(chosen), _sequence(rejected), *margin)
        case ["labelled", sample, is_desirable]:
            return LabelledSample(_sequence(sample), is_desirable)
        case _:
            raise ValueError(f"not the state of a sample: {str(state)[:200]}")


def _sequence(state: list[Any]) -> Sample:
    _, input_ids, labels, source, *images = state
    return Sample(list(input_ids), list(labels), Source(*source), tuple(ImageTokens(*image) for image in images))


def format_sample(
    sample: AnySample, tokenizer: Tokenizer, *, color: bool | None = None, max_tokens: int | None = None
) -> str:
    """Returns the text of a sample with its trained tokens marked.

    Args:
        sample: the sample.
        tokenizer: decodes the tokens.
        color: whether trained tokens are green and the others dim; otherwise trained text is between [[ and ]]. None
            uses colours if stdout is a terminal and the environment variable NO_COLOR is empty.
        max_tokens: shows the first tokens only. None for all.
    """
    if color is None:
        color = uses_color()
    match sample:
        case Sample():
            count = f"{len(sample.input_ids)} tokens, {sample.trained_tokens} trained"
            return f"{sample.source}: {count}\n{_text(sample, tokenizer, color, max_tokens)}"
        case PreferenceSample():
            text_of = partial(format_sample, tokenizer=tokenizer, color=color, max_tokens=max_tokens)
            return f"chosen: {text_of(sample.chosen)}\nrejected: {text_of(sample.rejected)}"
        case LabelledSample():
            name = "desirable" if sample.is_desirable else "undesirable"
            return f"{name}: {format_sample(sample.sample, tokenizer, color=color, max_tokens=max_tokens)}"
        case PromptSample():
            text = _text(sample.segments[0], tokenizer, color, max_tokens)
            return f"{sample.source}: {len(sample.input_ids)} tokens\n{text}"
        case PairSample():
            names = ("query", "positive", *("negative" for _ in sample.negatives))
            return f"{sample.source}:\n" + "\n".join(
                f"{name}, {len(one.input_ids)} tokens: {_text(one, tokenizer, color, max_tokens)}"
                for name, one in zip(names, sample.segments, strict=True)
            )


def _text(sample: Sample, tokenizer: Tokenizer, color: bool, max_tokens: int | None) -> str:
    decoder = tokenizer.stream()
    trained = (label != UNTRAINED for label in sample.labels)
    tokens: list[tuple[int | ImageTokens, bool]] = list(zip(sample.input_ids, trained, strict=True))
    for image in reversed(sample.images):  # an image counts as one token
        tokens[image.first : image.last] = [(image, False)]
    shown, parts = tokens[:max_tokens], []
    for is_trained, group in itertools.groupby(shown, key=lambda token: token[1]):
        text = "".join(str(one) if isinstance(one, ImageTokens) else _printable(decoder.push(one)) for one, _ in group)
        if color:
            parts.append(styled(text, GREEN if is_trained else DIM))
        else:
            parts.append(f"[[{text}]]" if is_trained else text)
    more = f" ... and {len(tokens) - len(shown)} more tokens" if len(tokens) > len(shown) else ""
    return "".join(parts) + _printable(decoder.flush()) + more


def _printable(text: str) -> str:
    """Escapes control characters: data must not control the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)
