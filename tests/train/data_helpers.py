"""A tokenizer with chat templates, and files of records, for tests of training data."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from ligerzoo.text.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]

CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""

GENERATION = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""

HISTORY_CHANGES = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.last -%}{{- '<think></think>' -}}{%- endif -%}
{{- message.content + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""

NO_END = """{%- for message in messages -%}{{- message.role + ': ' + message.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif -%}"""

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "user assistant system tool\n\n\nHello! How are you? yes yes yes no no no, 12345",
    "Answer: yes\nAnswer: no\n",
] * 4


@cache
def byte_level() -> Backend:
    """Byte-level BPE with a BOS token from the post-processor."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(SPECIAL)
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [bos])
    return backend


def files_of(backend: Backend, template: str | None = CHATML) -> dict[str, bytes]:
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@cache
def tokenizer(template: str | None = CHATML) -> Tokenizer:
    return Tokenizer(files_of(byte_level(), template), "toy")


def write_lines(file: Path, records: Iterable[Mapping[str, Any] | str]) -> Path:
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    file.write_text("".join(line + "\n" for line in lines))
    return file


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    """A conversation that alternates between user and assistant."""
    messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return {"messages": messages + [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}
