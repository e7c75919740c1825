"""A tiny checkpoint with byte tokens and a small data set, for runs that take a second."""

import json
import random
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from ligerzoo.models import Llama, LlamaConfig
from ligerzoo.train.methods import METHODS

SIZES: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 257,
    "max_position_embeddings": 256,
}  # fmt: skip


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer with a token for each byte, 256 for the beginning and 257 for the end of a text."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def write_checkpoint(directory: Path, **changes: Any) -> Path:
    """Writes a Llama with random weights, and its tokenizer."""
    torch.manual_seed(0)
    write_tokenizer(directory)
    Llama(LlamaConfig(**{**SIZES, **changes})).save_pretrained(directory)
    return directory


def write_data(file: Path, samples: int = 60, seed: int = 0) -> Path:
    """Writes prompts and completions of 3 to 60 characters."""
    source = random.Random(seed)
    words = ["liger", "lion", "tiger", "is", "a", "large", "cat", "hybrid", "of", "and"]

    def text(most: int) -> str:
        return " ".join(source.choices(words, k=source.randint(1, most)))

    lines = [json.dumps({"prompt": text(4), "completion": " " + text(8)}) for _ in range(samples)]
    file.write_text("\n".join(lines) + "\n")
    return file


def options(checkpoint: Path, data: Path, output: Path, /, **changes: Any) -> dict[str, Any]:
    """Returns options of a run of a few steps in float32 on the CPU."""
    given: dict[str, Any] = {
        "model": str(checkpoint), "data": (str(data),), "output": str(output), "seq_length": 64, "batch_size": 2,
        "max_steps": 6, "lr": 1e-3, "device": "cpu", "activation_budget": "none",
    }  # fmt: skip
    return {**given, **changes}


def arguments(given: dict[str, Any]) -> list[str]:
    """Returns the command line `ligerzoo train` with these options."""
    line = ["train", given["model"]]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            line.append(flag)
        elif name != "model" and value is not None:
            for one in value if isinstance(value, tuple) else (value,):
                line += [flag, str(one)]
    return line


def train(given: dict[str, Any]) -> int:
    """Runs the recipe of the options' method, and returns its exit code."""
    method = METHODS[given.get("method", "sft")]
    code: int = import_module(method.module).main(method.options(**given))
    return code


def run_script(recipe: Path, *arguments: str) -> None:
    """Runs a printed recipe within this process, as `python recipe.py` with these arguments would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(recipe), *arguments])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(recipe), run_name="__main__")
