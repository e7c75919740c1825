"""Trains a tokenizer: byte-level BPE (Sennrich et al., 2016; Radford et al., 2019), by the tokenizers library.

Each byte has a token, so every text can be encoded and decodes to itself: nothing is normalized. Digits are separate
tokens. The text is read once, and only its distinct words are kept in memory.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from ligerzoo.errors import TokenizerError
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.read_all import read_texts

PAD, BOS, START, END = SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
"""The first tokens of a new tokenizer. `END` ends documents, completions and messages, so that a model that was trained
on any of them stops at the same token."""

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHATML = """\
{%- if tools %}{{ raise_exception("this chat template has no tools") }}{% endif -%}
{{- bos_token -}}
{%- for message in messages %}
    {%- if message.tool_calls %}{{ raise_exception("this chat template has no tool calls") }}{% endif %}
    {%- set content = message.content %}
    {%- if content is not string %}{% set content = content | map(attribute="text") | join %}{% endif %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- content + "<|im_end|>" }}{%- endgeneration %}
    {%- else %}
        {{- content + "<|im_end|>" }}
    {%- endif %}
    {{- "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
"""The format ChatML, with the assistant's answers in generation blocks."""


def train_tokenizer(
    data: object,
    vocab_size: int,
    *,
    columns: Mapping[str, str] | None = None,
    chat_template: str | None = CHATML,
    progress: bool | None = None,
) -> Tokenizer:
    """Returns a new tokenizer; `save_pretrained` writes it as transformers reads it.

    It adds the token `<|bos|>` before each text. A small text may have too few pairs of tokens for the vocabulary,
    which is then smaller; a warning says so.

    Args:
        data: texts; see `ligerzoo.train.data.read_all.read_texts`.
        vocab_size: number of tokens, with 256 bytes and 4 special tokens.
        columns: columns of the data by our names, see `open_data`.
        chat_template: source of the chat template; None for none.
        progress: whether to show a progress bar on stderr; None if stderr is a terminal.

    Raises:
        DataError: as `read_texts`; the error names file and line.
        TokenizerError: the size is out of range, or the chat template is malformed.
    """
    if not MIN_VOCAB_SIZE <= vocab_size <= 2**20:
        raise TokenizerError(
            "out of range", where="vocab_size", got=vocab_size, expected=f"{MIN_VOCAB_SIZE} to {2**20}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=64,
        show_progress=sys.stderr.isatty() if progress is None else progress,
    )
    backend.train_from_iterator(read_texts(data, columns), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    if backend.get_vocab_size() < vocab_size:
        warnings.warn(
            f"the text has only {backend.get_vocab_size():,} tokens that occur twice or are bytes, instead of "
            f"{vocab_size:,}; more text gives more tokens",
            stacklevel=2,
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": END,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer.json": backend.to_str(pretty=True), "tokenizer_config.json": json.dumps(config, indent=2)}
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template
    tokenizer = Tokenizer({name: content.encode() for name, content in files.items()}, "new tokenizer")
    if chat_template is not None:
        example = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
        tokenizer.apply_chat_template(example, tokenize=False)  # raises if the template is malformed
    return tokenizer
