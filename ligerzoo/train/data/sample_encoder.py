"""Records of each kind as samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ligerzoo.entries import is_array
from ligerzoo.errors import DataError, quote
from ligerzoo.text.messages import Messages
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.encoding import ChatEncoder, RecordConversation, RecordTextEncoder
from ligerzoo.train.data.fields import (
    Kind,
    check_record,
    flag_field,
    messages_field,
    number_field,
    template_fields,
    text_field,
)
from ligerzoo.train.data.images import ImageEncoder, image_parts, images_of
from ligerzoo.train.data.pairs import PairEncoder
from ligerzoo.train.data.records import Fields, Record
from ligerzoo.train.data.samples import (
    UNTRAINED,
    AnySample,
    LabelledSample,
    PreferenceSample,
    PromptSample,
    Sample,
    Source,
    TrainedSample,
    naming,
    row_length,
)
from ligerzoo.train.data_options import EncodingOptions

Result = list[AnySample] | DataError
"""The samples of a record, or its error."""


class SampleEncoder:
    """Encodes records of one kind.

    Args:
        kind: the kind of the records.
        images: encodes images; None for text only.

    Raises:
        TokenizerError: the samples need an end-of-sequence token, which the tokenizer lacks, or `end_of_answer` is not
            a token.
    """

    def __init__(
        self,
        kind: Kind,
        tokenizer: Tokenizer,
        options: EncodingOptions,
        images: ImageEncoder | None = None,
    ) -> None:
        self._kind, self._tokenizer, self._options, self._images = kind, tokenizer, options, images
        self._encoder = RecordTextEncoder(tokenizer, options)
        self._chat = ChatEncoder(self._encoder, options, images)
        self._pairs = PairEncoder(tokenizer, options)
        if kind not in ("prompt", "pair"):
            _ = self._encoder.eos  # raises before the training begins

    def encode(self, records: Sequence[Record]) -> list[Result]:
        """Encodes records; a record that cannot be encoded gives its error."""
        results: list[Result] = []
        for record in records:
            try:
                with naming(record.source):
                    samples = self._samples(record)
                    self._check_tokens(samples)
                    results.append(samples)
            except DataError as error:
                results.append(error)
        return results

    def _samples(self, record: Record) -> list[AnySample]:
        if record.parse is None:
            return [_of_tokens(record)]
        fields = record.fields()
        if fields is None:
            return []
        fields = check_record(fields, self._kind)
        if self._kind == "pair":
            return [*self._pairs.encode(fields, record.source)]
        return self._fit(self._sample(self._kind, fields, record))

    def _sample(self, kind: Kind, fields: Fields, record: Record) -> TrainedSample | PromptSample:
        source = record.source
        match kind:
            case "text":
                ids = self._text(text_field(fields, "text"), source)
                ids += [self._encoder.eos] if record.ends_document else []
                return Sample(ids, ids, source)
            case "completion":
                return self._completion(fields, "completion", source, self._options.train_on_prompt)
            case "chat":
                return self._conversation(fields, ("messages",), source)
            case "preference":
                return self._preference(fields, source)
            case "labelled":
                label = flag_field(fields, "label")
                return LabelledSample(self._completion(fields, "completion", source), label)
            case "prompt":
                return self._prompt(fields, source)
        raise AssertionError(kind)

    def _text(self, text: str, source: Source) -> list[int]:
        return self._encoder.bos + self._encoder.plain(self._encoder.encode_ids([text])[0], text, source)

    def _completion(self, fields: Fields, name: str, source: Source, train_on_prompt: bool = False) -> Sample:
        """Encodes the prompt and a completion, both texts or both messages."""
        if is_array(fields["prompt"]) or is_array(fields[name]):
            prompt_length = 0 if train_on_prompt else None
            return self._conversation(fields, ("prompt", name), source, prompt_length)
        if fields.get("images"):
            expected = '{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ...}]}'
            raise DataError("images need messages, not texts", got=quote(fields["prompt"]), expected=expected)
        prompt = text_field(fields, "prompt", may_be_blank=True)
        text = text_field(fields, name)
        first, both = self._encoder.encode_ids([prompt, prompt + text])
        rest = self._encoder.continuation(first, both, text)
        first = self._encoder.bos + self._encoder.plain(first, prompt, source)
        rest = [*self._encoder.plain(rest, text, source), self._encoder.eos]
        return Sample(first + rest, (first if train_on_prompt else [UNTRAINED] * len(first)) + rest, source)

    def _conversation(
        self, fields: Fields, names: tuple[str, ...], source: Source, prompt_length: int | None = None
    ) -> Sample:
        """Encodes the messages of fields. The first one of two is the prompt, unless its length is given."""
        parts = {name: messages_field(fields, name) for name in names}
        messages = [message for part in parts.values() for message in part]
        if prompt_length is None:
            prompt_length = len(parts[names[0]]) if len(names) > 1 else 0
        conversation = RecordConversation(
            messages=messages,
            names=[f"{name}[{index}]" for name, part in parts.items() for index in range(len(part))],
            template=template_fields(fields),
            prompt_length=prompt_length,
            images=self._images_of(messages, fields),
        )
        return self._chat.encode(conversation, source)

    def _images_of(self, messages: Messages, fields: Fields) -> list[object]:
        """Returns the images of a conversation. Raises DataError where they are not supported."""
        if self._images is None and (fields.get("images") or image_parts(messages)):
            remedy = (
                "Images need --method sft, preferences or GRPO, no --tokenizer, and a vision-language model whose "
                "directory has its preprocessor_config.json."
            )
            raise DataError("the record has images, which this run cannot train", expected="text only", remedy=remedy)
        return [] if self._images is None else images_of(messages, fields)

    def images_of(self, fields: Fields) -> list[object]:
        """Returns the images of a record in order; of a preference, those of each of its sequences."""
        fields = check_record(fields, self._kind)
        return self._images_in(fields, "chosen" if self._kind == "preference" else "completion")

    def _images_in(self, fields: Fields, answer: str) -> list[object]:
        names = {"chat": ("messages",), "prompt": ("prompt",)}.get(self._kind, ("prompt", answer))
        given = [name for name in names if is_array(fields.get(name))]
        return images_of([one for name in given for one in messages_field(fields, name)], fields)

    def _preference(self, fields: Fields, source: Source) -> PreferenceSample:
        chosen, rejected, prompt = fields["chosen"], fields["rejected"], fields.get("prompt")
        margin = number_field(fields, "margin", 0.0)
        if chosen == rejected:
            raise DataError("chosen and rejected are equal", got=quote(chosen))
        if self._images is not None and self._images_in(fields, "chosen") != self._images_in(fields, "rejected"):
            what = "chosen and rejected have different images"
            raise DataError(what, expected="the images of the prompt only")
        if is_array(chosen) and not is_array(prompt):
            shared = _shared_messages(fields)
            chosen, rejected = (self._conversation(fields, (name,), source, shared) for name in _PAIR)
            return PreferenceSample(chosen, rejected, margin)
        if prompt is None:
            raise DataError("the field 'prompt' is missing", expected="prompt, chosen and rejected")
        chosen, rejected = (self._completion(fields, name, source) for name in _PAIR)
        return PreferenceSample(chosen, rejected, margin)

    def _prompt(self, fields: Fields, source: Source) -> PromptSample:
        if not is_array(fields["prompt"]):
            self._images_of([], fields)
            return PromptSample(self._text(text_field(fields, "prompt"), source), fields, source)
        messages = messages_field(fields, "prompt")
        conversation = RecordConversation(
            messages=messages,
            names=[f"prompt[{index}]" for index in range(len(messages))],
            template=template_fields(fields),
            images=self._images_of(messages, fields),
        )
        sample = self._chat.encode_prompt(conversation, source)
        return PromptSample(sample.input_ids, fields, source, sample.images)

    def _fit(self, sample: TrainedSample | PromptSample) -> list[AnySample]:
        """Returns the sample if it is short enough, possibly truncated, or nothing."""
        length, most, is_prompt = row_length(sample), self._options.seq_length, isinstance(sample, PromptSample)
        if self._kind == "text":
            return [sample]
        if length <= most:
            if not (is_prompt or _is_trained(sample)):
                raise DataError("nothing in the sample would be trained")
            return [sample]
        if self._options.too_long == "drop":
            return []
        if self._options.too_long == "truncate" and not isinstance(sample, PromptSample):
            sample = _truncated(sample, most)
            return [sample] if _is_trained(sample) else []
        if is_prompt:
            expected = f"at most {most}"
            remedy = "Shorten it, or leave more tokens for prompts: a larger seq_length, or a smaller max_new_tokens."
        else:
            together = ", chosen and rejected sequence together" if self._kind == "preference" else ""
            expected = f"at most {most} (seq_length){together}"
            remedy = 'Pass a larger seq_length, or too_long="truncate" or too_long="drop".'
        raise DataError("the sample is too long", got=f"{length} tokens", expected=expected, remedy=remedy)

    def _check_tokens(self, samples: Sequence[AnySample]) -> None:
        """Raises TokenizerError for a token without a row in the model's embedding."""
        if (rows := self._options.embedding_rows) is not None:
            for segment in (segment for sample in samples for segment in sample.segments):
                self._tokenizer.check_ids(segment.input_ids, rows)


_PAIR = ("chosen", "rejected")


def _shared_messages(fields: Fields) -> int:
    """Returns the length of the prompt that a pair of conversations begins with."""
    chosen, rejected = (messages_field(fields, name) for name in _PAIR)
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((index for index, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    prompt = fields.get("prompt")
    if shared == 0 or (prompt is not None and all(one.get("content") != prompt for one in chosen[:shared])):
        expected = "the messages of the prompt first, or in the field 'prompt'"
        what = "chosen and rejected do not begin with the prompt"
        raise DataError(what, got=quote(chosen[0]), expected=expected)
    return shared


def _is_trained(sample: AnySample) -> bool:
    return all(segment.trained_tokens for segment in sample.segments)


def _truncated(sample: TrainedSample, length: int) -> TrainedSample:
    match sample:
        case Sample():
            return sample.cut(length)
        case PreferenceSample():
            shorter = min(len(segment.input_ids) for segment in sample.segments)
            longest = max(length - shorter, length // 2)
            return replace(sample, chosen=sample.chosen.cut(longest), rejected=sample.rejected.cut(longest))
        case LabelledSample():
            return LabelledSample(sample.sample.cut(length), sample.is_desirable)


def encode_tokens(records: Sequence[Record]) -> list[Result]:
    """Returns records of token files as samples."""
    return [[_of_tokens(record)] for record in records]


def _of_tokens(record: Record) -> Sample:
    return Sample(record.data, record.data, record.source)
