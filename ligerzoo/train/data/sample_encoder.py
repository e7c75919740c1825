"""Records of each kind as samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ligerzoo.errors import DataError, LigerzooError, quote
from ligerzoo.train.data.chat import ChatEncoder
from ligerzoo.train.data.encoding import RecordTextEncoder
from ligerzoo.train.data.fields import (
    Fields,
    Kind,
    Messages,
    check_record,
    flag_field,
    is_messages,
    messages_field,
    refused_images,
    template_fields,
    text_field,
)
from ligerzoo.train.data.images import ImageEncoder, has_images, images_of
from ligerzoo.train.data.packing import row_length
from ligerzoo.train.data.records import Record
from ligerzoo.train.data.samples import (
    UNTRAINED,
    AnySample,
    LabelledSample,
    PreferenceSample,
    PromptSample,
    Sample,
    Source,
    TrainedSample,
)

TooLong = Literal["error", "truncate", "drop"]


class SampleEncoder:
    """Encodes records of one kind.

    Args:
        kind: the kind of the records.
        encoder: encodes texts.
        chat: encodes conversations.
        seq_length: the most tokens of a sequence. Documents of kind "text" may be longer.
        train_on_prompt: whether the prompts of kind "completion" are trained, too.
        too_long: what happens to longer samples: "error", "truncate" (removes the last tokens) or "drop".
        images: encodes images; None for text only.
    """

    def __init__(
        self,
        kind: Kind,
        encoder: RecordTextEncoder,
        chat: ChatEncoder,
        *,
        seq_length: int,
        train_on_prompt: bool = False,
        too_long: TooLong = "error",
        images: ImageEncoder | None = None,
    ) -> None:
        self._images = images
        self._kind, self._encoder, self._chat = kind, encoder, chat
        self._seq_length, self._train_on_prompt, self._too_long = seq_length, train_on_prompt, too_long

    def encode(self, records: Sequence[Record], parse: Callable[[Record], Fields | None]) -> list[Result]:
        """Encodes records; a record that cannot be encoded gives its error.

        Args:
            records: the records.
            parse: returns the fields of a record, None for a blank line.
        """
        results: list[Result] = []
        for record in records:
            try:
                fields = parse(record)
                results.append([] if fields is None else self._fit(self._sample(fields, record)))
            except DataError as error:
                results.append(error)
            except LigerzooError as error:  # of the tokenizer, which does not know the record
                results.append(DataError(str(error), where=record.source))
        return results

    def _sample(self, fields: Fields, record: Record) -> AnySample:
        source, kind = record.source, self._kind
        fields = check_record(fields, kind, source)
        match kind:
            case "text":
                return self._text(text_field(fields, "text", source), record)
            case "completion":
                return self._completion(fields, "completion", source, self._train_on_prompt)
            case "chat":
                messages = messages_field(fields, "messages", source)
                return self._conversation(messages, _names("messages", messages), fields, source)
            case "preference":
                return self._preference(fields, source)
            case "labelled":
                label = flag_field(fields, "label", source)
                return LabelledSample(self._completion(fields, "completion", source), label)
            case "prompt":
                return PromptSample(self._prompt(fields, source), fields, source)

    def _text(self, text: str, record: Record) -> Sample:
        ids = self._encoder.bos + self._encoder.plain(self._encoder.encode_ids([text])[0], text, record.source)
        ids += [self._encoder.eos] if record.ends_document else []
        return Sample(ids, ids, record.source)

    def _completion(self, fields: Fields, name: str, source: Source, train_on_prompt: bool = False) -> Sample:
        """Encodes the prompt and a completion, both texts or both messages."""
        if is_messages(fields["prompt"]) or is_messages(fields[name]):
            prompt = messages_field(fields, "prompt", source)
            completion = messages_field(fields, name, source)
            names = _names("prompt", prompt) + _names(name, completion)
            return self._conversation(prompt + completion, names, fields, source, 0 if train_on_prompt else len(prompt))
        if fields.get("images"):
            raise DataError(
                "images need messages, not texts", where=source, got=quote(fields["prompt"]),
                expected='{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ...}]}',
            )  # fmt: skip
        prompt_text = text_field(fields, "prompt", source, may_be_blank=True)
        text = text_field(fields, name, source)
        first, both = self._encoder.encode_ids([prompt_text, prompt_text + text])
        rest = self._encoder.continuation(first, both, text)
        first = self._encoder.bos + self._encoder.plain(first, prompt_text, source)
        rest = [*self._encoder.plain(rest, text, source), self._encoder.eos]
        return Sample(first + rest, (first if train_on_prompt else [UNTRAINED] * len(first)) + rest, source)

    def _conversation(
        self, messages: Messages, names: list[str], fields: Fields, source: Source, prompt_length: int = 0
    ) -> Sample:
        tools, variables = template_fields(fields, source)
        self._check_images(messages, fields, source)
        sizes = [] if self._images is None else self._images.sizes(images_of(messages, fields, source), source)
        return self._chat.encode(
            messages, source, names, prompt_length=prompt_length, tools=tools, variables=variables, sizes=sizes
        )

    def _check_images(self, messages: Messages, fields: Fields, source: Source) -> None:
        """Refuses images where they are not supported."""
        if not has_images(messages, fields):
            return
        if self._kind not in ("chat", "completion"):
            raise refused_images(self._kind, source)
        if self._images is None:
            raise DataError(
                "the record has images, which this run cannot train", where=source, expected="text only",
                remedy="Images need --method sft, no --tokenizer, and a vision-language model whose directory has "
                "its preprocessor_config.json.",
            )  # fmt: skip

    def images_of(self, fields: Fields, source: Source) -> list[Any]:
        """Returns the images of a record in order."""
        fields = check_record(fields, self._kind, source)
        names = ("messages",) if self._kind == "chat" else ("prompt", "completion")
        return images_of([one for name in names for one in messages_field(fields, name, source)], fields, source)

    def _preference(self, fields: Fields, source: Source) -> PreferenceSample:
        chosen, rejected = fields["chosen"], fields["rejected"]
        if chosen == rejected:
            raise DataError("chosen and rejected are equal", where=source, got=quote(chosen))
        prompt = fields.get("prompt")
        if is_messages(chosen) and not is_messages(prompt):
            return self._whole_conversations(fields, source)
        if prompt is None:
            raise DataError("the field 'prompt' is missing", where=source, expected="prompt, chosen and rejected")
        return PreferenceSample(
            self._completion(fields, "chosen", source), self._completion(fields, "rejected", source)
        )

    def _whole_conversations(self, fields: Fields, source: Source) -> PreferenceSample:
        """Encodes a pair of conversations that begin with the same messages, the prompt."""
        chosen, rejected = (messages_field(fields, name, source) for name in ("chosen", "rejected"))
        pairs = enumerate(zip(chosen, rejected, strict=False))
        shared = next((index for index, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
        prompt = fields.get("prompt")
        if shared == 0 or (prompt is not None and all(one.get("content") != prompt for one in chosen[:shared])):
            raise DataError(
                "chosen and rejected do not begin with the prompt", where=source, got=quote(chosen[0]),
                expected="the messages of the prompt first, or in the field 'prompt'",
            )  # fmt: skip
        return PreferenceSample(
            self._conversation(chosen, _names("chosen", chosen), fields, source, shared),
            self._conversation(rejected, _names("rejected", rejected), fields, source, shared),
        )

    def _prompt(self, fields: Fields, source: Source) -> list[int]:
        if is_messages(fields["prompt"]):
            tools, variables = template_fields(fields, source)
            messages = messages_field(fields, "prompt", source)
            self._check_images(messages, fields, source)
            return self._chat.encode_prompt(messages, source, tools=tools, variables=variables)
        text = text_field(fields, "prompt", source)
        return self._encoder.bos + self._encoder.plain(self._encoder.encode_ids([text])[0], text, source)

    def _fit(self, sample: AnySample) -> list[AnySample]:
        """Returns the sample if it is short enough, possibly truncated, or nothing."""
        if self._kind == "text":
            return [sample]
        if self._tokens(sample) <= self._seq_length:
            return [self._checked(sample)]
        if self._too_long == "drop":
            return []
        if self._too_long == "truncate" and not isinstance(sample, PromptSample):
            truncated = self._truncated(sample)
            is_trained = all(segment.trained_tokens for segment in truncated.segments)
            return [truncated] if is_trained else []
        expected = f"at most {self._seq_length}"
        if isinstance(sample, PromptSample):
            remedy = "Shorten it, or leave more tokens for prompts: a larger seq_length, or a smaller max_new_tokens."
        else:
            together = ", chosen and rejected sequence together" if isinstance(sample, PreferenceSample) else ""
            expected += f" (seq_length){together}"
            remedy = 'Pass a larger seq_length, or too_long="truncate" or "drop".'
        raise DataError(
            "the sample is too long", where=sample.source, got=f"{self._tokens(sample)} tokens", expected=expected,
            remedy=remedy,
        )  # fmt: skip

    @staticmethod
    def _tokens(sample: AnySample) -> int:
        return len(sample.input_ids) if isinstance(sample, PromptSample) else row_length(sample)

    def _truncated(self, sample: TrainedSample) -> TrainedSample:
        match sample:
            case Sample():
                return sample.cut(self._seq_length)
            case PreferenceSample():
                shorter = min(len(segment.input_ids) for segment in sample.segments)
                longest = max(self._seq_length - shorter, self._seq_length // 2)
                return PreferenceSample(sample.chosen.cut(longest), sample.rejected.cut(longest))
            case LabelledSample():
                return LabelledSample(sample.sample.cut(self._seq_length), sample.is_desirable)

    @staticmethod
    def _checked(sample: AnySample) -> AnySample:
        if not isinstance(sample, PromptSample) and not all(one.trained_tokens for one in sample.segments):
            raise DataError("nothing in the sample would be trained", where=sample.source)
        return sample


def _names(field: str, messages: Messages) -> list[str]:
    """Returns the names of messages, for errors."""
    return [f"{field}[{index}]" for index in range(len(messages))]


def encode_tokens(records: Sequence[Record]) -> list[Result]:
    """Returns records of token files as samples."""
    return [[Sample(record.data, record.data, record.source)] for record in records]


Result = list[AnySample] | DataError
"""The samples of a record, or its error."""
