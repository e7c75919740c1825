"""Which features of our tokenizers the installed version of transformers has. Tests compare with it only these."""

import inspect

import tokenizers
from transformers import PreTrainedTokenizerBase, TokenizersBackend
from transformers.models.auto import tokenization_auto
from transformers.utils import chat_template_utils

HAS_NAMES_OF_REASONING = hasattr(chat_template_utils, "_alias_reasoning_fields")
"""`reasoning` and `thinking` of messages are `reasoning_content` as well."""

HAS_SPECIAL_TOKENS_AS_TEXT = (
    "sanitize_control_tokens" in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)
"""`apply_chat_template` encodes special tokens of messages as text, if asked to."""

HAS_PADDING_SIDE_OF_FILES = (
    hasattr(TokenizersBackend, "_tokenizer_json_has_byte_level")
    and "deepseek_v3" not in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
)
"""The padding side is that of `tokenizer_class`, also of DeepSeek-V3, but not of byte-level vocabularies."""


def _ignores_empty_texts() -> bool:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(1, strategy="only_first")
    try:
        tokenizer.encode("", "a a")
    except BaseException:  # an error of the library
        return False
    return True


TRUNCATION_IGNORES_EMPTY_TEXTS = _ignores_empty_texts()
"""Before tokenizers 0.23.3, "only_first" accepts an empty first text though the second one is too long."""
