"""Tiny random checkpoints that sentence-transformers itself has written. Importing it takes seconds of CPU time."""

import random
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS = "a an and as at be by for from in is it lion large not of on or tiger that the this to was with you"
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ":", "|", *WORDS.split()]
SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "initializer_range": 0.2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}


class Sentences(NamedTuple):
    """An embedding model to write.

    Attributes:
        config: `model_type`, and fields of the config of transformers.
        pooling: modes.
        include_prompt: see `ligerzoo.layers.Pooling`.
        modules: names of the modules after pooling, with the arguments of each.
        settings: arguments of `SentenceTransformer`.
        template: special tokens around a text.
        padding_side: of the tokenizer.
    """

    config: dict[str, Any]
    pooling: str | Sequence[str] = "mean"
    include_prompt: bool = True
    modules: Sequence[tuple[str, dict[str, Any]]] = ()
    settings: Mapping[str, Any] = MappingProxyType({})
    template: str = "[CLS] $A [SEP]"
    padding_side: str = "right"

    def __str__(self) -> str:
        return str(self.config["model_type"])


_PROMPTS = {"query": "the lion : ", "passage": ""}
EMBEDDING_GEMMA = Sentences(
    {"model_type": "gemma3_text", "use_bidirectional_attention": True, "sliding_window": 9, **DECODER,
     "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    modules=[
        ("Dense", {"in_features": 32, "out_features": 40, "bias": False, "activation_function": torch.nn.Identity()}),
        ("Dense", {"in_features": 40, "out_features": 24, "bias": False, "activation_function": torch.nn.Identity()}),
        ("Normalize", {}),
    ],
    settings={"prompts": {**_PROMPTS, "Retrieval-query": "this is : "}},
)  # fmt: skip
QWEN3_EMBEDDING = Sentences(
    {"model_type": "qwen3", **DECODER},
    "lasttoken",
    modules=[("Normalize", {})],
    settings={"prompts": _PROMPTS, "truncate_dim": 20},
    template="$A [SEP]",
    padding_side="left",
)
MODELS = [
    Sentences(
        {"model_type": "bert", **SIZES},
        "cls",
        modules=[("Normalize", {})],
        settings={"prompts": _PROMPTS, "default_prompt_name": "query", "similarity_fn_name": "dot"},
    ),
    Sentences(
        {"model_type": "xlm-roberta", **SIZES, "type_vocab_size": 1},
        include_prompt=False,
        settings={"prompts": _PROMPTS, "similarity_fn_name": "euclidean"},
    ),
    Sentences(
        {"model_type": "modernbert", "local_attention": 8, "cls_token_id": 2, "sep_token_id": 3, **SIZES},
        ["max", "mean_sqrt_len_tokens", "weightedmean", "cls", "mean", "lasttoken"],
        include_prompt=False,
        modules=[("Dense", {"in_features": 192, "out_features": 24, "use_residual": True})],
        settings={"similarity_fn_name": "manhattan"},
    ),
    QWEN3_EMBEDDING,
    EMBEDDING_GEMMA,
]


def imported() -> Any:
    """Returns the module, whose import warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sentence_transformers
        import sentence_transformers.base.modules
        import sentence_transformers.sentence_transformer.modules
    return sentence_transformers


def write_word_tokenizer(directory: Path, template: str, padding_side: str = "right") -> None:
    """Writes a tokenizer with a token for each word."""
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(TOKENS)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Whitespace()
    special = [(name, TOKENS.index(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    options = {"padding_side": padding_side, "model_max_length": 40}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names, **options).save_pretrained(directory)


def write_sentence_model(directory: Path, row: Sentences) -> Any:
    """Writes a model, and returns it as a `SentenceTransformer`."""
    from transformers import AutoConfig, AutoModel

    library, base = imported(), directory.with_name(f"{directory.name}-base")
    config = AutoConfig.for_model(**row.config)
    torch.manual_seed(0)
    AutoModel.from_config(config, attn_implementation="eager").save_pretrained(base)
    write_word_tokenizer(base, row.template, row.padding_side)
    modules, pooling = library.base.modules, library.sentence_transformer.modules.Pooling
    model = library.SentenceTransformer(
        modules=[
            modules.Transformer(str(base)),
            pooling(config.hidden_size, row.pooling, include_prompt=row.include_prompt),
            *(getattr(modules, name)(**arguments) for name, arguments in row.modules),
        ],
        device="cpu",
        **row.settings,
    )
    model.save_pretrained(str(directory), create_model_card=False)
    return library.SentenceTransformer(str(directory), device="cpu")


def texts(count: int = 12) -> list[str]:
    """Returns texts of 1 to 60 words, some longer than `model_max_length`."""
    source, words = random.Random(0), WORDS.split()
    return [" ".join(source.choices(words, k=source.choice([1, 2, 5, 9, 20, 33, 60]))) for _ in range(count)]
