"""Names of the files of checkpoints in Hugging Face's layout, and dtypes of their tensors.

The weights are in `model.safetensors`, or in the shards that `model.safetensors.index.json` names. Names with "*" are
glob patterns inside a checkpoint's directory.
"""

import re

import torch

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
CONFIG_FILES = (CONFIG_FILE, ADAPTER_CONFIG_FILE)
"""A repository with only the second is an adapter without its base model."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MODEL_FILES = (*CONFIG_FILES, GENERATION_FILE, INDEX_FILE)
"""The files of a model, without those of the weights, which the index names."""

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE_FILE,
    "additional_chat_templates/*.jinja",
)
"""The files of a tokenizer. Only the first is required."""

TOKENIZER_INPUTS = (*TOKENIZER_FILES, CONFIG_FILE)
"""The files that a tokenizer reads; config.json has the `model_type`, and belongs to the model."""

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
"""The files of a processor, without its tokenizer's."""

PROCESSOR_INPUTS = (*TOKENIZER_INPUTS, *PROCESSOR_FILES)
"""The files that a processor reads."""

MODULES_FILE, SETTINGS_FILE = "modules.json", "config_sentence_transformers.json"
TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The config of the first module of sentence-transformers, of which the first that exists counts."""

MODULE_FILES = (MODULES_FILE, SETTINGS_FILE, *TRANSFORMER_FILES)
"""The files of sentence-transformers, without those of the further modules, which modules.json names."""

EMBEDDING_INPUTS = (*MODULE_FILES, *TOKENIZER_INPUTS)
"""The files that an embedding model reads in addition to those of its language model."""

WEIGHT_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SUPPORTED = "a dtype of 8 bits or more that is not complex"


def is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")
