"""Tiny random checkpoints: each row of CHECKPOINTS holds something that real files do their own way.

A new architecture adds its rows; the tests of this folder go through all of them.
"""

import copy
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Tensors = dict[str, Tensor]

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Tiny:
    """A checkpoint to be written.

    Attributes:
        name: what the row is about.
        config: config.json, word for word.
        tensors: what the files hold, made from all tensors of transformers' model (the tied head included).
        shards: the number of files the tensors are spread over.
        stored_dtype: of the tensors on disk.
        tokens: the length of the sequences that the tests run.
        by_transformers: its `save_pretrained` writes files and config.json, and so spells them.
        stray: a file beside the checkpoint's own that nobody may read.
        corrected: the entries of config.json that belie the files, as saving puts them right.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Callable[[Tensors], Tensors] = dict
    shards: int = 1
    stored_dtype: torch.dtype = torch.float32
    tokens: int = 40
    by_transformers: bool = False
    stray: str | None = None
    corrected: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def write(self, directory: Path) -> None:
        model = random_model(self.config).to(self.stored_dtype)
        directory.mkdir(parents=True, exist_ok=True)
        if self.by_transformers:
            size = sum(parameter.nbytes for parameter in model.parameters())
            model.save_pretrained(directory, max_shard_size=math.ceil(size / self.shards * 1.2))
            assert len(list(directory.glob("*.safetensors"))) == self.shards
        else:
            (directory / "config.json").write_text(json.dumps(self.config))
            tensors = self.tensors({name: tensor.clone() for name, tensor in model.state_dict().items()})
            write_shards(directory, tensors, self.shards)
        if self.stray is not None:
            poison = {name: torch.full_like(tensor, math.nan) for name, tensor in model.state_dict().items()}
            save_file(poison, directory / self.stray)


def random_model(config: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """transformers' model with weights large enough to show every mistake: the default 0.02 would hide most."""
    its_own = copy.deepcopy(dict(config))  # for transformers writes its own spelling into what it is given
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**its_own), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise)
    return model


def write_shards(directory: Path, tensors: Tensors, shards: int = 1) -> None:
    """Tensors spread over files at random, as shard boundaries are arbitrary."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    number = {name: zlib.crc32(name.encode()) % shards + 1 for name in tensors}
    weight_map = {name: f"model-{number[name]:05d}-of-{shards:05d}.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# What a file may hold instead of each tensor once


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_another_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING].flip(0)}


def with_an_equal_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING].clone()}


def with_rotary_buffers(tensors: Tensors) -> Tensors:
    wrong = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(4) for i in range(2)}
    return {**tensors, **wrong}


def with_another_layer(tensors: Tensors) -> Tensors:
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    return {**tensors, **{name.replace("layers.1.", "layers.12."): tensor.clone() for name, tensor in last.items()}}


def of_the_base_model(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != HEAD}


# Llama

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}

LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.5, 3.0, 8.0, 20.0],
    "original_max_position_embeddings": 44,
}


def llama(name: str, changes: Mapping[str, Any] | None = None, absent: tuple[str, ...] = (), **options: Any) -> Tiny:
    config = {**LLAMA, **(changes or {})}
    return Tiny(f"llama {name}", {key: value for key, value in config.items() if key not in absent}, **options)


def llamas() -> Iterator[Tiny]:
    yield llama("plain")
    yield llama(
        "2, few keys",
        absent=(
            "attention_bias", "hidden_act", "initializer_range", "max_position_embeddings", "mlp_bias",
            "num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype",
            "use_cache",
        ),
    )  # fmt: skip

    # Rotary positions, and the two spellings of config.json
    tied_llama3 = {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0, "tie_word_embeddings": True}
    yield llama("3, tied, as transformers 4 spells it", tied_llama3, tensors=without(HEAD))
    yield llama(
        "3, tied, as transformers 5 spells it",
        {
            "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0},
            "tie_word_embeddings": True,
            "dtype": "float32",
            "head_dim": 8,
        },
        absent=("rope_theta", "rope_scaling", "torch_dtype"),
        tensors=without(HEAD),
    )
    yield llama("3, tied, saved by transformers", tied_llama3, by_transformers=True)
    yield llama("linear", {"rope_scaling": {"type": "linear", "factor": 3.0}})
    yield llama("dynamic, within", {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    yield llama("dynamic, beyond", {"rope_scaling": dynamic, "max_position_embeddings": 32})
    yield llama("yarn", {"rope_scaling": YARN, "head_dim": 24})
    yield llama("yarn, type spelled type", {"rope_scaling": {"type": "yarn", "factor": 2}, "head_dim": 24})
    yield llama("yarn, attention factor", {"rope_scaling": {**YARN, "attention_factor": 0.7}, "head_dim": 24})
    yield llama("yarn, mscale", {"rope_scaling": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.4}, "head_dim": 24})
    yield llama("yarn, betas", {"rope_scaling": {**YARN, "beta_fast": 8, "beta_slow": 0.5}, "head_dim": 24})
    yield llama("yarn, not truncated", {"rope_scaling": {**YARN, "truncate": False}, "head_dim": 24})
    yield llama("longrope, at its short context", {"rope_scaling": LONGROPE}, tokens=44)
    yield llama("longrope, one beyond it", {"rope_scaling": LONGROPE}, tokens=45)
    yield llama("longrope, attention factor", {"rope_scaling": {**LONGROPE, "attention_factor": 1.4, "factor": 16.0}})
    yield llama(
        "longrope, context beside it",
        {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 500}, "original_max_position_embeddings": 32},
    )
    yield llama("theta in whole numbers", {"rope_theta": 1000042})
    yield llama(
        "theta twice", {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 300.0}, "rope_theta": 7e5}
    )
    yield llama("scaling twice", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3_SCALING})

    # Shapes
    yield llama("attention bias", {"attention_bias": True})
    yield llama("mlp bias", {"mlp_bias": True})
    yield llama("both biases", {"attention_bias": True, "mlp_bias": True})
    for size in (6, 10, 24, 80):
        yield llama(f"heads of {size}", {"head_dim": size})
    yield llama("heads of 6, in full", {"hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 3})
    yield llama("one key-value head", {"num_key_value_heads": 1})
    yield llama("as many key-value heads", {"num_key_value_heads": 4, "head_dim": 12})
    yield llama(
        "small",
        {
            "hidden_size": 2,
            "intermediate_size": 1,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "vocab_size": 65,
        },
    )
    yield llama("eight layers", {"num_hidden_layers": 8})

    # The head
    tied = {"tie_word_embeddings": True}
    yield llama("tied, embedding alone", tied, tensors=without(HEAD))
    yield llama("tied, head alone", tied, tensors=without(EMBEDDING))
    yield llama("tied, both", tied, tensors=with_an_equal_head)
    untied = {"tie_word_embeddings": False}
    yield llama("tied, both, of two values", tied, tensors=with_another_head, corrected=untied)
    yield llama("not tied, but equal", tensors=with_an_equal_head)
    yield llama("base model", {**tied, "architectures": ["LlamaModel"]}, tensors=of_the_base_model)

    # Files
    half = torch.float16
    yield llama("fp16, no dtype", absent=("torch_dtype",), stored_dtype=half)
    yield llama("fp16, no dtype, fp32 buffers", absent=("torch_dtype",), stored_dtype=half, tensors=with_rotary_buffers)
    yield llama("bf16", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield llama("two dtype keys", {"torch_dtype": "float32", "dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield llama("fp32 stored for fp16", {"torch_dtype": "float16"})
    yield llama("3 shards", shards=3)
    yield llama("3 shards, saved by transformers", shards=3, by_transformers=True)
    yield llama("stray file", stray="consolidated.safetensors")
    yield llama("stray shard", stray="model-00001-of-00001.safetensors")
    yield llama("rotary buffers", tensors=with_rotary_buffers)
    yield llama("a layer too many", tensors=with_another_layer)

    # Entries of config.json
    yield llama("nulls", dict.fromkeys(("head_dim", "num_key_value_heads", "pad_token_id", "quantization_config")))
    yield llama(
        "unknown entries",
        {
            "_name_or_path": "é/模",
            "auto_map": {"AutoModel": "evil.Model"},
            "cache_implementation": "hybrid",
            "pretraining_tp": 4,
            "partial_rotary_factor": 0.5,
            "transformers_version": "4.40.0",
            "sliding_window": 3,
        },
    )
    yield llama("several ends", {"eos_token_id": [2, 5, 7], "pad_token_id": 0})


CHECKPOINTS = list(llamas())
