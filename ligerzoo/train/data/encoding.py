"""Encodes texts such that a prompt has the tokens that it has at inference.

Tokens may merge across the end of a prompt: "Answer: " + "yes" may become "Answer", ":", " yes", while the prompt
alone ends with the token " ". A model that continues the prompt never sees the merged token. So the prompt is encoded
alone, and the completion as its continuation, wherever the tokens of both together do not begin with the prompt's.

Of a conversation, the chat template decides which text is the assistant's. A template with `{% generation %}` blocks
marks it. For others, the prompt of each answer and the conversation up to its end are rendered. If both are prefixes of
the whole conversation, the text between them is the answer. A template for which they are not is refused, see
`find_answers`. An answer includes the token that ends it, or else the model would not learn to stop.
"""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ligerzoo.errors import DataError, TokenizerError, quote
from ligerzoo.text.messages import Messages, trying_text_arguments
from ligerzoo.text.rendered import Edit, Rendered, Span
from ligerzoo.text.special_text import encode_continuation, token_mask
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.fields import TRAINED, TemplateFields
from ligerzoo.train.data.images import ImageEncoder, Size
from ligerzoo.train.data.samples import UNTRAINED, ImageTokens, Sample, Source
from ligerzoo.train.data_options import EncodingOptions


@dataclass
class EncodedText:
    """Encoded text.

    Attributes:
        ids: token ids.
        offsets: the (first, last + 1) characters of each token.
    """

    ids: list[int]
    offsets: list[Span]


class RecordTextEncoder:
    """Encodes the texts of records.

    Args:
        options: with `special_tokens="text"`, a special token that is written in a text is encoded like other text, so
            that data cannot end a message or a document.

    Raises:
        TokenizerError: there is no end-of-sequence token.
    """

    def __init__(self, tokenizer: Tokenizer, options: EncodingOptions) -> None:
        self.tokenizer, self.special_tokens = tokenizer, options.special_tokens
        ends = options.eos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id  # BERT's texts end with [SEP]
        self._eos = next((token_id for token_id in ends if token_id is not None), None)
        self.special_ids = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        self.special_pattern = tokenizer.special_text.pattern
        self._has_warned, self._warning_lock = False, threading.Lock()
        marked, plain = self.tokenizer.encode("a"), self.encode("a").ids
        self.bos: list[int] = marked[: marked.index(plain[0])] if plain and plain[0] in marked else []

    @property
    def eos(self) -> int:
        """The end-of-sequence token.

        Raises:
            TokenizerError: the tokenizer has no end-of-sequence token.
        """
        if self._eos is None:
            what, remedy = "the tokenizer has no end-of-sequence token", "Pass eos_token_id."
            raise TokenizerError(what, where="eos_token_id", expected="a token id", remedy=remedy)
        return self._eos

    def encode(self, text: str) -> EncodedText:
        """Encodes a text, special tokens in it included; adds no others."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encodes texts in parallel, see `encode`."""
        columns = self.tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
        )
        return [EncodedText(*row) for row in zip(columns["input_ids"], columns["offset_mapping"], strict=True)]

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts in parallel without offsets, which takes less time; see `encode`."""
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)[
            "input_ids"
        ]
        return ids

    def plain(self, ids: list[int], text: str, source: Source) -> list[int]:
        """Replaces the special tokens that are written in a text by their characters, unless they mean control tokens.

        Args:
            ids: the tokens of the text.
        """
        if self.special_tokens == "control" or not (found := self.special_pattern.search(text)):
            return ids
        self.warn_special(found[0], source)
        return [
            one
            for token_id in ids
            for one in (self._spelling(token_id) if token_id in self.special_ids else (token_id,))
        ]

    def _spelling(self, token_id: int) -> list[int]:
        return self.tokenizer.special_text.spelling(self.tokenizer.id_to_token(token_id) or "")

    def warn_special(self, token: str, source: Source) -> None:
        """Warns once that a text contains a special token that is encoded as text."""
        with self._warning_lock:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            warnings.warn(
                f"{source}: the special token {token!r} in a text is encoded as text. If the data contains special "
                'tokens on purpose, pass special_tokens="control". Later records are not reported.',
                stacklevel=2,
            )

    def continuation(self, prompt: list[int], both: list[int], completion: str) -> list[int]:
        """Returns the tokens of a completion after the tokens of its prompt.

        Args:
            prompt: ids of the prompt.
            both: ids of prompt and completion together.
            completion: text of the completion.
        """
        if both[: len(prompt)] == prompt:
            return both[len(prompt) :]
        return encode_continuation(lambda text: self.encode_ids([text])[0], completion)

    def encode_conversation(self, rendered: Rendered) -> EncodedText:
        """Encodes a conversation such that the text before each answer, a span, has the tokens that it has alone.

        Returns:
            The tokens. Offsets never leave out characters and never overlap, except for characters of several tokens.
        """
        text = rendered.text
        tokens = self.encode(text)
        for start, _ in rendered.spans or []:
            tokens = self._split_at(text, tokens, start)
        if rendered.literal is not None:
            tokens = EncodedText(*self.tokenizer.special_text.spell(text, tokens.ids, tokens.offsets, rendered.literal))
        offsets: list[Span] = []
        end = 0
        for first, last in tokens.offsets:
            offsets.append((min(first, end), max(last, end)))  # a token of spaces has the offsets (last, last)
            end = offsets[-1][1]
        return EncodedText(tokens.ids, offsets)

    def _split_at(self, text: str, tokens: EncodedText, start: int) -> EncodedText:
        """Encodes again from the last special token before `start` to the next one, if a token crosses `start`."""
        first, first_character, last, last_character = 0, 0, len(tokens.ids), len(text)
        for index, (token_id, (begin, end)) in enumerate(zip(tokens.ids, tokens.offsets, strict=True)):
            if token_id in self.special_ids:
                if end <= start:
                    first, first_character = index, begin
                elif begin >= start:
                    last, last_character = index, begin
                    break
        prompt = self.encode(text[first_character:start])
        between = tokens.ids[first:last]
        if between[: len(prompt.ids)] == prompt.ids:
            return tokens
        rest = self.continuation(prompt.ids, between, text[start:last_character])
        offsets = [(a + first_character, b + first_character) for a, b in prompt.offsets]
        return EncodedText(
            tokens.ids[:first] + prompt.ids + rest + tokens.ids[last:],
            tokens.offsets[:first] + offsets + [(start, last_character)] * len(rest) + tokens.offsets[last:],
        )


# Conversations


@dataclass(frozen=True, kw_only=True)
class RecordConversation:
    """The messages of a record.

    Attributes:
        messages: from `messages_field`.
        names: the name of each message in the record, such as "messages[0]", for errors.
        template: tools and variables of the chat template.
        prompt_length: number of messages whose answers are not trained.
        images: the images as the record gives them, in the order of their placeholders.
    """

    messages: Messages
    names: Sequence[str]
    template: TemplateFields
    prompt_length: int = 0
    images: Sequence[object] = ()

    @property
    def answers(self) -> list[int]:
        """Indices of the answers after the prompt."""
        later = range(self.prompt_length, len(self.messages))
        return [index for index in later if self.messages[index]["role"] == "assistant"]


class ChatEncoder:
    """Encodes conversations.

    Args:
        options: how. `end_of_answer` is appended after the last answer, if the template does not end it.
        images: encodes images; None for text only.

    Raises:
        TokenizerError: `end_of_answer` is not a token.
    """

    def __init__(self, encoder: RecordTextEncoder, options: EncodingOptions, images: ImageEncoder | None) -> None:
        self._encoder, self._options, self._images = encoder, options, images
        end = options.end_of_answer
        if end is not None and encoder.tokenizer.token_to_id(end) is None:
            raise TokenizerError("not a token of the tokenizer", where="end_of_answer", got=repr(end))

    def encode(self, conversation: RecordConversation, source: Source) -> Sample:
        """Encodes a conversation with labels for its answers. Tokens of images have none.

        Raises:
            DataError: no answer is trained, or the images cannot be encoded; see `ImageEncoder`.
            TokenizerError: the template refuses the conversation, or no answer is found; see `find_answers`.
        """
        messages, names = conversation.messages, conversation.names
        answers = conversation.answers[-1:] if self._options.train_answers == "last" else conversation.answers
        trained = [index for index in answers if messages[index].get(TRAINED, True)]
        if not trained:
            raise DataError("no message of the assistant that is trained", where=names[-1].partition("[")[0])
        sizes = [] if self._images is None else self._images.sizes(conversation.images, source)
        render = self._bind(conversation.template)
        whole = trying_text_arguments(
            lambda messages: find_answers(render, messages, trained, names), _for_template(messages)
        )
        self._warn_of_text(whole, source)
        rendered, tokens, images = self._encode_rendered(self._with_ends(whole), sizes)
        labels = [
            token_id if is_answer else UNTRAINED
            for token_id, is_answer in zip(tokens.ids, token_mask(tokens.offsets, rendered.spans or []), strict=True)
        ]
        for image in images:
            labels[image.first : image.last] = [UNTRAINED] * (image.last - image.first)
        return Sample(tokens.ids, labels, source, images)

    def _encode_rendered(
        self, rendered: Rendered, sizes: Sequence[Size]
    ) -> tuple[Rendered, EncodedText, tuple[ImageTokens, ...]]:
        """Returns a conversation with the placeholders of images replaced, its tokens, and the tokens of each image."""
        edits = [] if self._images is None else self._images.edits(rendered, sizes)
        rendered = rendered.edited(edits)
        tokens = self._encoder.encode_conversation(rendered)
        if self._images is not None:
            self._images.check_tokens(tokens.ids, edits)
        spans = zip(_tokens_of(edits, tokens.offsets), sizes, strict=True)
        return rendered, tokens, tuple(ImageTokens(first, last, *size) for (first, last), size in spans)

    def encode_prompt(self, conversation: RecordConversation, source: Source) -> Sample:
        """Encodes a conversation that the model continues with an answer, without labels.

        Raises:
            DataError: the last message is an answer, or the images cannot be encoded; see `ImageEncoder`.
            TokenizerError: the template refuses the conversation.
        """
        messages = conversation.messages
        if messages[-1]["role"] == "assistant":
            raise DataError("the prompt ends with an answer", expected="a message to answer")
        sizes = [] if self._images is None else self._images.sizes(conversation.images, source)
        render = self._bind(conversation.template)
        rendered = trying_text_arguments(lambda messages: render(messages, True), _for_template(messages))
        self._warn_of_text(rendered, source)
        _, tokens, images = self._encode_rendered(rendered, sizes)
        return Sample(tokens.ids, [UNTRAINED] * len(tokens.ids), source, images)

    def _bind(self, template: TemplateFields) -> Render:
        variables = {**self._options.template_variables, **template.variables}

        def render(messages: Messages, is_prompt: bool) -> Rendered:
            return self._encoder.tokenizer.render_chat(
                messages,
                add_generation_prompt=is_prompt,
                finds_spans=not is_prompt,
                tools=template.tools,
                chat_template=self._options.chat_template,
                special_tokens=self._encoder.special_tokens,
                variables=variables,
            )

        return render

    def _warn_of_text(self, rendered: Rendered, source: Source) -> None:
        """Warns of the first special token that is text."""
        for first, last in rendered.literal or []:
            if first < last:
                self._encoder.warn_special(rendered.text[first:last], source)
                break

    def _with_ends(self, rendered: Rendered) -> Rendered:
        """Ends each answer after its last special token, which ends the index; appends a missing one to the text."""
        text, answers, appended = rendered.text, [], self._options.end_of_answer
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
            elif appended is not None and text.startswith(appended, end):
                end += len(appended)
            elif appended is not None and end == len(text):
                text += appended
                end = len(text)
            elif appended is None and end in starts:
                end = next(after for after, before in specials.items() if before == end)
            else:
                what = (
                    "the chat template does not end the answer with a special token, so the model would not learn to "
                    "stop"
                )
                remedy = "Let the template write eos_token there, or pass end_of_answer to open_data."
                raise DataError(what, got=quote(text[start:end][-40:]), remedy=remedy)
            answers.append((start, end))
        return rendered._replace(text=text, spans=answers)


Render = Callable[[Messages, bool], Rendered]
"""Renders messages, as the prompt of an answer or as a whole with its `{% generation %}` blocks."""


def find_answers(render: Render, messages: Messages, trained: Sequence[int], names: Sequence[str]) -> Rendered:
    """Renders a conversation, with the assistant's answers that are trained as its spans.

    Args:
        render: renders messages.
        trained: indices of the messages that are trained, in order.
        names: the name of each message, for errors.

    Raises:
        TokenizerError: the template does not reveal which text the answers are.
    """
    whole = render(messages, False)
    if whole.spans is not None:
        return whole._replace(spans=_trained_blocks(render, messages, whole, trained, names))
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


def _trained_blocks(
    render: Render, messages: Messages, whole: Rendered, trained: Sequence[int], names: Sequence[str]
) -> list[Span]:
    """Returns the `{% generation %}` blocks of the messages that are trained.

    The blocks of an answer end after the messages before it, and before those of the next answer.
    """
    blocks = whole.spans
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
    what = f"the chat template renders {name} differently when later messages follow (it may remove reasoning)"
    raise TokenizerError(
        f"{what}, so the answers cannot be found",
        where="chat_template",
        got=quote(part[same:][:40]),
        expected=quote(text[same:][:40]),
        remedy='Pass train_answers="last" to train the last answer only, or a template with {% generation %} blocks.',
    )


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


def _without_images(content: object) -> object:
    match content:
        case list() as parts:
            return [part if part["type"] == "text" else {"type": part["type"]} for part in parts]
    return content


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
