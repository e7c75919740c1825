"""Conversations as tokens, with labels for the assistant's answers.

The chat template decides which text is the assistant's. A template with `{% generation %}` blocks marks it. For others,
the prompt of each answer and the conversation up to its end are rendered. If both are prefixes of the whole
conversation, the text between them is the answer. A template for which they are not is refused, see `find_answers`.

An answer includes the token that ends it, or else the model would not learn to stop.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ligerzoo.errors import DataError, TokenizerError, quote
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.encoding import TextEncoder
from ligerzoo.train.data.fields import Messages
from ligerzoo.train.data.images import Edit, ImageEncoder, Size
from ligerzoo.train.data.samples import UNTRAINED, ImageTokens, Sample, Source

TrainAnswers = Literal["all", "last"]

_MARK = "\ufdd0\ufdd1"  # noncharacters, which no text contains
"""Is before each special token that is written in a message."""

Span = tuple[int, int]


class _Rendered(NamedTuple):
    """A rendered conversation: its text, the answers in it, and the first characters of special tokens in messages."""

    text: str
    answers: list[Span]
    literal: frozenset[int]


class ChatEncoder:
    """Encodes conversations.

    Args:
        encoder: encodes texts.
        train_answers: "all" trains all answers, "last" the last one of a conversation.
        end_of_answer: the token that ends an answer, for templates that end an answer with no special token. It is
            appended after the last answer.
        chat_template: name or source of the template; None for the tokenizer's.
        template_variables: further variables of the template, such as `{"enable_thinking": False}`.
        images: encodes images; None for text only.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        *,
        train_answers: TrainAnswers = "all",
        end_of_answer: str | None = None,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        self._images = images
        self._encoder, self._train_answers, self._end_of_answer = encoder, train_answers, end_of_answer
        self._chat_template, self._variables = chat_template, dict(template_variables or {})
        if end_of_answer is not None and encoder.tokenizer.token_to_id(end_of_answer) is None:
            raise TokenizerError("not a token of the tokenizer", where="end_of_answer", got=repr(end_of_answer))

    def encode(
        self,
        messages: Messages,
        source: Source,
        *,
        prompt_length: int = 0,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        sizes: Sequence[Size] = (),
    ) -> Sample:
        """Encodes a conversation with labels for its answers. Tokens of images have none.

        Args:
            messages: the conversation.
            source: the record.
            prompt_length: number of messages whose answers are not trained.
            tools: see `Tokenizer.apply_chat_template`.
            variables: further variables of the template for this conversation.
            sizes: sizes of its images, in the order of their placeholders.

        Raises:
            DataError: the template refuses the conversation, or no answer is found; see `find_answers`. Or the images
                cannot be encoded; see `ImageEncoder`.
        """
        template = self._bind(tools, variables)
        messages = self._mark_special([_without_images(message) for message in messages], source)
        try:
            rendered = _without_marks(*find_answers(template, messages, prompt_length, self._train_answers))
        except TokenizerError as error:
            raise DataError(str(error), where=source) from error
        rendered = self._with_ends(rendered, source)
        edits: list[Edit] = []
        if self._images is not None:
            edits = self._images.edits(rendered.text, rendered.literal, sizes, source)
            rendered = _edited(rendered, edits)
        tokens = self._encoder.encode_conversation(
            rendered.text, [start for start, _ in rendered.answers], rendered.literal
        )
        labels = [UNTRAINED] * len(tokens.ids)
        answers = iter(rendered.answers)
        start, end = next(answers)
        for index, (first, last) in enumerate(tokens.offsets):
            while first >= end and (following := next(answers, None)):
                start, end = following
            if last > start and first < end:
                labels[index] = tokens.ids[index]
        if self._images is not None:
            self._images.check_tokens(tokens.ids, edits, source)
        images = tuple(
            ImageTokens(first, last, *size)
            for (first, last), size in zip(_tokens_of(edits, tokens.offsets), sizes, strict=True)
        )
        for image in images:
            labels[image.first : image.last] = [UNTRAINED] * (image.last - image.first)
        return Sample(tokens.ids, labels, source, images)

    def encode_prompt(
        self,
        messages: Messages,
        source: Source,
        *,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation that the model continues with an answer.

        Raises:
            DataError: the last message is an answer, or the template refuses the conversation.
        """
        if messages[-1]["role"] == "assistant":
            raise DataError("the prompt ends with an answer", where=source, expected="a message to answer")
        try:
            marked = self._bind(tools, variables)(self._mark_special(messages, source), True)[0]
        except TokenizerError as error:
            raise DataError(str(error), where=source) from error
        rendered = _without_marks(marked, [])
        return self._encoder.encode_conversation(rendered.text, [], rendered.literal).ids

    def _bind(self, tools: list[dict[str, Any]] | None, variables: Mapping[str, Any] | None) -> Render:
        tokenizer = self._encoder.tokenizer
        options: dict[str, Any] = {"tools": tools, "chat_template": self._chat_template, **self._variables}
        options |= variables or {}

        def render(messages: Messages, is_prompt: bool) -> tuple[str, list[Span] | None]:
            if is_prompt:
                return _prompt_text(tokenizer, messages, options), None
            return tokenizer.render_assistant_spans(messages, **options)

        return render

    def _mark_special(self, messages: Messages, source: Source) -> Messages:
        """Puts a mark before each special token in the messages, if it means text."""
        if self._encoder.special_tokens == "control":
            return messages

        def mark(value: Any) -> Any:
            match value:
                case str():
                    if _MARK in value:
                        raise DataError(f"a text contains the noncharacters {_MARK!a}", where=source)
                    if found := self._encoder.special_pattern.search(value):
                        self._encoder.warn_special(found[0], source)
                    return self._encoder.special_pattern.sub(lambda found: _MARK + found[0], value)
                case Mapping():
                    return {name: mark(item) for name, item in value.items()}
                case list():
                    return list(map(mark, value))
                case _:
                    return value

        return [{name: item if name == "role" else mark(item) for name, item in one.items()} for one in messages]

    def _with_ends(self, rendered: _Rendered, source: Source) -> _Rendered:
        """Ends each answer after its last special token, which ends the index; appends a missing one to the text."""
        text, answers = rendered.text, []
        specials = {
            found.end(): found.start()
            for found in self._encoder.special_pattern.finditer(text)
            if found.start() not in rendered.literal
        }
        starts = set(specials.values())
        for start, end in rendered.answers:
            trimmed = start + len(text[start:end].rstrip())
            if specials.get(trimmed, -1) >= start:
                end = trimmed
            elif self._end_of_answer is not None and text.startswith(self._end_of_answer, end):
                end += len(self._end_of_answer)
            elif self._end_of_answer is not None and end == len(text):
                text += self._end_of_answer
                end = len(text)
            elif self._end_of_answer is None and end in starts:
                end = next(after for after, before in specials.items() if before == end)
            else:
                raise DataError(
                    "the chat template does not end the answer with a special token, so the model would not learn to "
                    "stop",
                    where=source, got=quote(text[start:end][-40:]),
                    remedy="Pass end_of_answer, such as the tokenizer's eos_token.",
                )  # fmt: skip
            answers.append((start, end))
        return _Rendered(text, answers, rendered.literal)


Render = Callable[[Messages, bool], tuple[str, list[Span] | None]]
"""Renders messages, as the prompt of an answer or not: the text and its `{% generation %}` blocks, see
`Tokenizer.render_assistant_spans`."""


def _prompt_text(tokenizer: Tokenizer, messages: Messages, options: Mapping[str, Any]) -> str:
    text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    return text


def find_answers(
    render: Render, messages: Messages, prompt_length: int = 0, train_answers: TrainAnswers = "all"
) -> tuple[str, list[Span]]:
    """Renders a conversation and finds the assistant's answers that are trained.

    Args:
        render: renders messages.
        messages: the conversation.
        prompt_length: number of messages whose answers are not trained.
        train_answers: see `ChatEncoder`.

    Returns:
        The text, and the (first, last + 1) characters of each answer.

    Raises:
        TokenizerError: there is no answer, or the template does not reveal which text the answers are.
    """
    indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    indices = [index for index in indices if index >= prompt_length]
    if not indices:
        raise TokenizerError("no message of the assistant, so nothing would be trained", where="messages")
    if train_answers == "last":
        indices = indices[-1:]
    text, blocks = render(messages, False)
    if blocks is not None:
        if prompt_length:
            prompt = _prefix(render(messages[:prompt_length], True)[0], text, "the prompt")
            blocks = [block for block in blocks if block[1] > prompt]
        if not blocks:
            raise TokenizerError("the template renders no generation block", where="messages")
        return text, blocks[-1:] if train_answers == "last" else blocks
    answers = []
    for index in indices:
        start = _prefix(render(messages[:index], True)[0], text, f"the prompt of messages[{index}]")
        is_last = index == len(messages) - 1
        end = (
            len(text) if is_last else _prefix(render(messages[: index + 1], False)[0], text, f"messages[:{index + 1}]")
        )
        if end <= start:
            raise TokenizerError(f"the template renders no text for messages[{index}]", where="messages")
        answers.append((start, end))
    return text, answers


def _prefix(part: str, text: str, name: str) -> int:
    """Returns the length of a text that must be a prefix of another one."""
    if text.startswith(part):
        return len(part)
    same = next((index for index, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), len(text))
    raise TokenizerError(
        f"the chat template renders {name} differently when later messages follow (it may remove reasoning), so the "
        "answers cannot be found",
        where="chat_template", got=quote(part[same:][:40]), expected=quote(text[same:][:40]),
        remedy='Pass train_answers="last" to train the last answer only, or a template with {% generation %} blocks.',
    )  # fmt: skip


def _without_marks(text: str, spans: list[Span]) -> _Rendered:
    """Removes the marks of special tokens, and returns where they were."""
    if _MARK not in text:
        if "\\ufdd0" in text:
            raise TokenizerError("the template escapes text with a special token", where="chat_template")
        return _Rendered(text, spans, frozenset())
    marks = [found.start() for found in re.finditer(_MARK, text)]

    def moved(position: int) -> int:
        return position - len(_MARK) * sum(mark < position for mark in marks)

    return _Rendered(text.replace(_MARK, ""), [(moved(a), moved(b)) for a, b in spans], frozenset(map(moved, marks)))


def _without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with placeholders instead of images."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [part if part["type"] == "text" else {"type": part["type"]} for part in content]}


def _edited(rendered: _Rendered, edits: Sequence[Edit]) -> _Rendered:
    """Replaces ranges of the text, none of which a span begins or ends within."""
    ends, moves, text, position = [], [0], "", 0
    for edit in edits:
        text += rendered.text[position : edit.first] + edit.text
        position = edit.last
        ends.append(edit.last)
        moves.append(len(text) - edit.last)
    text += rendered.text[position:]

    def moved(character: int) -> int:
        return character + moves[bisect_right(ends, character)]

    return _Rendered(text, [(moved(a), moved(b)) for a, b in rendered.answers], frozenset(map(moved, rendered.literal)))


def _tokens_of(edits: Sequence[Edit], offsets: Sequence[Span]) -> list[Span]:
    """Returns the tokens (first, last + 1) of each replacement in the edited text."""
    starts, ends = [first for first, _ in offsets], [last for _, last in offsets]
    move, end, found = 0, 0, []
    for edit in edits:
        first = edit.first + move
        start = max(bisect_right(ends, first), end)  # neighbours may share a token
        end = max(bisect_left(starts, first + len(edit.text)), start)
        found.append((start, end))
        move += len(edit.text) - (edit.last - edit.first)
    return found
