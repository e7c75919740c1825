"""What the tests of transformers' clients share: a tokenizer, a processor, data sets, loaders and a comparison."""

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from ligerzoo.integrations import transformers as integration
from tests.models.comparing import raw_bytes
from tests.models.tiny import Tiny

COMPARED = ("llama", "mixtral", "phi3", "qwen2_vl")
"""Architectures that are compared with transformers: plain, mixture of experts, fused projections, images."""

TOKENS = {
    "<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 90)}, "<|image_pad|>": 90, "<|video_pad|>": 91,
    "<|vision_start|>": 92, "<|vision_end|>": 93, "<|user|>": 94, "<|assistant|>": 95, "<unk>": 96, "abcdef": 97,
}  # fmt: skip
"""Vocabulary, with special tokens where the tiny configs expect them. transformers finds stop strings by "abcdef"."""

PLACEHOLDERS = [90, 91]

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message.role + '|> ' }}
{%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string else message.content %}
{%- if message.role == 'assistant' %}{% generation %}{{ parts[0].text + ' </s> ' }}{% endgeneration %}
{%- else %}
{%- for part in parts %}
{{- '<|vision_start|> <|image_pad|> <|vision_end|> ' if part.type == 'image' else part.text + ' </s> ' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}
"""

LENGTHS = (12, 20, 9, 31, 7, 16, 25, 14)


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words that are separated by spaces."""
    words = Tokenizer(models.WordLevel(TOKENS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=[name for name in TOKENS if name.startswith("<|")], chat_template=CHAT_TEMPLATE,
        model_max_length=128,
    )  # fmt: skip


def processor() -> Any:
    """Returns Qwen2-VL's processor without its video processor, which needs torchvision."""
    from transformers import ProcessorMixin, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class ImageProcessor(Qwen2VLProcessor):  # type: ignore[misc]
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id, self.video_token_id = PLACEHOLDERS
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    size = {"shortest_edge": 64, "longest_edge": 1024}
    images = Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=size)
    return ImageProcessor(images, tokenizer(), CHAT_TEMPLATE)


class Writer:
    """Makes up rows of data sets: the same ones for each instance."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def words(self, count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(3, 90, (count,), generator=self.generator).tolist())

    def message(self, role: str, count: int) -> list[dict[str, str]]:
        return [{"role": role, "content": self.words(count)}]

    def image(self, count: int) -> Any:
        from PIL import Image

        pixels = torch.rand(16, 8 + 8 * (count % 3), 3, generator=self.generator) * 255
        return Image.fromarray(pixels.byte().numpy())


def rows(make: Callable[[Writer, int], dict[str, Any]]) -> Any:
    """Returns a data set of two rows for each of `LENGTHS`."""
    from datasets import Dataset

    writer = Writer()
    return Dataset.from_list([make(writer, length) for length in LENGTHS * 2])


def write(model_type: str, directory: Path) -> Path:
    """Writes the first tiny checkpoint of an architecture, with the tokenizer."""
    checkpoints: list[Tiny] = import_module(f"tests.models.tiny_{model_type}").CHECKPOINTS
    checkpoints[0].write(directory)
    tokenizer().save_pretrained(directory)
    return directory


def ours(directory: Path, **options: Any) -> Any:
    return integration.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)


def theirs(directory: Path) -> PreTrainedModel:
    has_vision = "vision_config" in (directory / "config.json").read_text()
    auto = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def assert_same(got: Iterable[float], expected: Iterable[float]) -> None:
    """Compares losses and gradient norms: to 1e-5, relative to those above 1."""
    pairs = list(zip(got, expected, strict=True))
    assert pairs
    assert all(abs(a - b) <= 1e-5 * max(1, abs(b)) for a, b in pairs), pairs


def assert_loads_in_transformers(directory: Path, model: Any, again: Path) -> None:
    """Asserts that ligerzoo and transformers load the weights of a wrapped model bit for bit.

    Args:
        directory: where it was saved.
        model: the model.
        again: where to write what transformers loads.
    """
    expected = raw_bytes(model.state_dict())
    assert raw_bytes(ours(directory).state_dict()) == expected
    loaded, info = type(theirs(directory)).from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    loaded.save_pretrained(again)
    assert raw_bytes(ours(again).state_dict()) == expected
