"""Tiny tokenizers and the loaders that tests of transformers' clients share."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from ligerzoo.integrations import transformers as wrapped
from tests.models.tiny import Tiny

COMPARED = ("llama", "mixtral", "phi3", "qwen2_vl")
"""Architectures that are compared with transformers: plain, mixture of experts, fused projections, images."""

TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message['role'] + '|> ' }}
{%- if message['content'] is string %}{% set parts = [{'type': 'text', 'text': message['content']}] %}
{%- else %}{% set parts = message['content'] %}{% endif %}
{%- if message['role'] == 'assistant' %}{% generation %}{{ parts[0]['text'] + ' </s> ' }}{% endgeneration %}
{%- else %}
{%- for part in parts %}
{{- '<|vision_start|> <|image_pad|> <|vision_end|> ' if part['type'] == 'image' else part['text'] + ' </s> ' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}
"""
SPECIAL = {
    "<pad>": 0, "<s>": 1, "</s>": 2, "<|image_pad|>": 90, "<|video_pad|>": 91, "<|vision_start|>": 92,
    "<|vision_end|>": 93, "<|user|>": 94, "<|assistant|>": 95, "<|system|>": 96, "<unk>": 97,
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose words are w3 to w89, with special tokens where the tiny configs expect them."""
    vocabulary = {**{f"w{i}": i for i in range(3, 90)}, **SPECIAL}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=[name for name in SPECIAL if name.startswith("<|")], chat_template=TEMPLATE,
        model_max_length=128,
    )  # fmt: skip


def write(model_type: str, directory: Path) -> Path:
    """Writes the first tiny checkpoint of an architecture, with the tokenizer."""
    rows: list[Tiny] = import_module(f"tests.models.tiny_{model_type}").CHECKPOINTS
    rows[0].write(directory)
    tokenizer().save_pretrained(directory)
    return directory


def ours(directory: Path, **options: Any) -> Any:
    return wrapped.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)


def theirs(directory: Path) -> PreTrainedModel:
    has_vision = "vision_config" in (directory / "config.json").read_text()
    auto = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
