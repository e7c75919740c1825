"""Conversations as tokens, with labels for the assistant's answers.

The chat template decides which text is the assistant's. A template with `{% generation %}` blocks marks it. For others,
the prompt of each answer and the conversation up to its end are rendered. If both are prefixes of the whole
conversation, the text between them is the answer. A template for which they are not is refused, see `find_answers`.

An answer includes the token that ends it, or else the model would not learn to stop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ligerzoo.errors import DataError, TokenizerError, quote
from ligerzoo.text.messages import trying_text_arguments
from ligerzoo.text.rendered import Edit, Rendered, Span
from ligerzoo.text.special_text import token_mask
from ligerzoo.train.data.encoding import RecordTextEncoder
from ligerzoo.train.data.fields import TRAINED, Messages
from ligerzoo.train.data.images import ImageEncoder, Size
from ligerzoo.train.data.samples import UNTRAINED, ImageTokens, Sample, Source

TrainAnswers = Literal["all", "last"]


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
        encoder: RecordTextEncoder,
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
        names: Sequence[str],
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
            names: the name of each message in the record, such as "messages[0]", for errors.
            prompt_length: number of messages whose answers are not trained.
            tools: see `Tokenizer.apply_chat_template`.
            variables: further variables of the template for this conversation.
            sizes: sizes of its images, in the order of their placeholders.

        Raises:
            DataError: the template refuses the conversation, or no answer is found; see `find_answers`. Or the images
                cannot be encoded; see `ImageEncoder`.
        """
        template = self._bind(tools, variables)
        trained = [
            index for index, message in enumerate(messages) if message["role"] == "assistant" and index >= prompt_length
        ]
        trained = trained[-1:] if self._train_answers == "last" else trained
        trained = [index for index in trained if messages[index].get(TRAINED, True)]
        if not trained:
            field = names[-1].partition("[")[0]
            raise DataError(f"{field}: no message of the assistant that is trained", where=source)
        try:
            whole = trying_text_arguments(
                lambda messages: find_answers(template, messages, trained, names), _for_template(messages)
            )
        except TokenizerError as error:
            raise DataError(str(error), where=source) from error
        self._warn_of_text(whole, source)
        rendered = self._with_ends(whole, source)
        edits: list[Edit] = []
        if self._images is not None:
            edits = self._images.edits(rendered, sizes, source)
            rendered = rendered.edited(edits)
        tokens = self._encoder.encode_conversation(rendered)
        labels = [
            token_id if is_answer else UNTRAINED
            for token_id, is_answer in zip(tokens.ids, token_mask(tokens.offsets, rendered.spans or []), strict=True)
        ]
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
        template = self._bind(tools, variables)
        try:
            rendered = trying_text_arguments(lambda messages: template(messages, True), _for_template(messages))
        except TokenizerError as error:
            raise DataError(str(error), where=source) from error
        self._warn_of_text(rendered, source)
        return self._encoder.encode_conversation(rendered).ids

    def _bind(self, tools: list[dict[str, Any]] | None, variables: Mapping[str, Any] | None) -> Render:
        tokenizer = self._encoder.tokenizer
        options: dict[str, Any] = {
            "tools": tools, "chat_template": self._chat_template, "special_tokens": self._encoder.special_tokens,
            "variables": {**self._variables, **(variables or {})},
        }  # fmt: skip

        def render(messages: Messages, is_prompt: bool) -> Rendered:
            return tokenizer.render_chat(
                messages, add_generation_prompt=is_prompt, finds_spans=not is_prompt, **options
            )

        return render

    def _warn_of_text(self, rendered: Rendered, source: Source) -> None:
        """Warns of the first special token that is text."""
        for first, last in rendered.literal or []:
            if first < last:
                self._encoder.warn_special(rendered.text[first:last], source)
                break

    def _with_ends(self, rendered: Rendered, source: Source) -> Rendered:
        """Ends each answer after its last special token, which ends the index; appends a missing one to the text."""
        text, answers = rendered.text, []
        literal = {first for first, _ in rendered.literal or []}
        specials = {
            found.end(): found.start()
            for found in self._encoder.special_pattern.finditer(text)
            if found.start() not in literal
        }
        starts = set(specials.values())
        for start, end in rendered.spans or []:
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
                    remedy="Let the template write eos_token there, or pass end_of_answer to open_data.",
                )  # fmt: skip
            answers.append((start, end))
        return rendered._replace(text=text, spans=answers)


Render = Callable[[Messages, bool], Rendered]
"""Renders messages, as the prompt of an answer or as a whole with its `{% generation %}` blocks."""


def find_answers(render: Render, messages: Messages, trained: Sequence[int], names: Sequence[str]) -> Rendered:
    """Renders a conversation, with the assistant's answers that are trained as its spans.

    Args:
        render: renders messages.
        messages: the conversation.
        trained: indices of the messages that are trained, in order.
        names: the name of each message, for errors.

    Raises:
        TokenizerError: the template does not reveal which text the answers are.
    """
    whole = render(messages, False)
    if whole.spans is not None:
        return whole._replace(spans=_blocks_of(render, messages, whole, whole.spans, trained, names))
    text = whole.text
    answers = []
    for index in trained:
        start = _prefix(render(messages[:index], True).text, text, f"the prompt of {names[index]}")
        end = len(text)
        if index < len(messages) - 1:
            end = _prefix(render(messages[: index + 1], False).text, text, f"the messages up to {names[index]}")
        if end <= start:
            raise TokenizerError("the template renders no text", where=names[index])
        answers.append((start, end))
    return whole._replace(spans=answers)


def _blocks_of(
    render: Render, messages: Messages, whole: Rendered, blocks: list[Span], trained: Sequence[int],
    names: Sequence[str],
) -> list[Span]:  # fmt: skip
    """Returns the `{% generation %}` blocks of the messages that are trained.

    The blocks of an answer end after the messages before it, and before those of the next answer.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not blocks:
        raise TokenizerError("the template renders no generation block", where=names[answers[0]])
    if len(answers) == len(trained):
        return blocks

    def beginning(index: int) -> int:
        if index == answers[0]:
            return 0
        return _prefix(render(messages[:index], False).text, whole.text, f"the messages before {names[index]}")

    found = []
    for index, following in zip(answers, [*answers[1:], None], strict=True):
        if index in trained:
            first = beginning(index)
            last = len(whole.text) if following is None else beginning(following)
            own = [block for block in blocks if first < block[1] <= last]
            if not own:
                raise TokenizerError("the template renders no generation block", where=names[index])
            found += own
    return found


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


def _for_template(messages: Messages) -> Messages:
    """Returns messages without markers, and with placeholders instead of images."""
    return [
        {
            name: _without_images(value) if name == "content" else value
            for name, value in message.items()
            if name != TRAINED
        }
        for message in messages
    ]


def _without_images(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [part if part["type"] == "text" else {"type": part["type"]} for part in content]


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
