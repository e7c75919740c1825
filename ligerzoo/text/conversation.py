"""Conversations with a model, in text and, if the model sees them, in images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ligerzoo.errors import ImageError, TokenizerError
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision import read_image
from ligerzoo.vision.processor import Processor


class Conversation:
    """What was said so far, from which the model's inputs for its next answer follow.

    Args:
        reader: the model's processor, or the tokenizer of one that reads text alone.
        system: instructions that come first; None for none.

    Attributes:
        tokenizer: the reader's, to decode answers.
        messages: what was said, in the form of chat templates.

    Raises:
        TokenizerError: there is no chat template.
    """

    def __init__(self, reader: Processor | Tokenizer, system: str | None = None) -> None:
        self._processor = reader if isinstance(reader, Processor) else None
        self.tokenizer = reader.tokenizer if isinstance(reader, Processor) else reader
        if not self.tokenizer.chat_templates:
            raise TokenizerError(
                "the tokenizer has no chat template, so the model was not trained to chat",
                remedy="Continue a text with `ligerzoo generate`, or take the model's instruction-tuned variant.",
            )
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._shown: list[Tensor] = []

    @property
    def sees(self) -> bool:
        """Whether images can be shown."""
        return self._processor is not None

    def show(self, file: str | Path) -> None:
        """Shows an image with the next question.

        Raises:
            ImageError: the file cannot be read as an image, or the model reads text alone.
        """
        if self._processor is None:
            raise ImageError("the model sees no images, or its processor is missing", where=file)
        self._shown.append(read_image(file))

    def ask(self, question: str) -> dict[str, Tensor]:
        """The model's inputs for its answer to a question, which goes after the images that were shown with it."""
        text = {"type": "text", "text": question}
        images = [{"type": "image", "image": image} for image in self._shown]
        self.messages.append({"role": "user", "content": [*images, text] if images else question})
        self._shown = []
        if self._processor is not None:
            return self._processor(self.messages, add_generation_prompt=True)
        inputs: dict[str, Tensor] = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt"
        )
        return inputs

    def answer(self, text: str) -> None:
        """Keeps the model's answer, to which later questions may refer."""
        self.messages.append({"role": "assistant", "content": text})
