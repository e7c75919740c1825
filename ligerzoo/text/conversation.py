"""Conversations with a model, in text and, if the model reads images, with images."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ligerzoo.errors import ImageError, TemplateError
from ligerzoo.text.chat import NO_TEMPLATE
from ligerzoo.text.special_text import SpecialTokens
from ligerzoo.text.tokenizer import Tokenizer


class ImageTextProcessor(Protocol):
    """The methods of `ligerzoo.Processor` that a conversation uses."""

    def read_image(self, image: str | Path, /) -> Tensor:
        """Returns the image in a file as uint8 RGB (3, H, W)."""

    def __call__(
        self, text: list[dict[str, Any]], /, *, add_generation_prompt: bool, special_tokens: SpecialTokens
    ) -> dict[str, Tensor]:
        """Returns the model inputs of the messages."""


class Conversation:
    """The messages of a conversation so far, and the model inputs for the next answer.

    Args:
        tokenizer: the model's tokenizer, with a chat template.
        processor: the model's processor, or None if the model reads text only.
        system: the system message, or None.

    Attributes:
        tokenizer: the tokenizer, to decode answers.
        messages: the messages in the format of chat templates.

    Raises:
        TemplateError: the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: Tokenizer, processor: ImageTextProcessor | None = None, *, system: str | None = None
    ) -> None:
        self.tokenizer, self._processor = tokenizer, processor
        if not tokenizer.chat_templates:
            what = "no chat template, so the model was not trained to chat"
            raise TemplateError(what, where="tokenizer", remedy=NO_TEMPLATE)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._images: list[Tensor] = []

    @property
    def reads_images(self) -> bool:
        """Whether the model reads images."""
        return self._processor is not None

    def add_image(self, file: str | Path) -> None:
        """Adds an image to the next question.

        Raises:
            ImageError: the file cannot be read as an image, or the model reads text only.
        """
        if self._processor is None:
            what = "the model reads text only, or the checkpoint has no preprocessor_config.json"
            raise ImageError(what, where=file, remedy="Load a vision-language model.")
        self._images.append(self._processor.read_image(file))

    def ask(self, question: str) -> dict[str, Tensor]:
        """Adds a question, after the images that belong to it, and returns the model inputs for its answer."""
        text = {"type": "text", "text": question}
        images = [{"type": "image", "image": image} for image in self._images]
        self.messages.append({"role": "user", "content": [*images, text] if images else question})
        self._images = []
        if self._processor is not None:
            return self._processor(self.messages, add_generation_prompt=True, special_tokens="text")
        inputs: dict[str, Tensor] = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, special_tokens="text", return_tensors="pt"
        )
        return inputs

    def add_answer(self, text: str) -> None:
        """Adds the model's answer, so that later questions may refer to it."""
        self.messages.append({"role": "assistant", "content": text})
