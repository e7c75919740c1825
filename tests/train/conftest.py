"""A tiny checkpoint and a data set for all tests of training."""

from pathlib import Path

import pytest

from tests.train.tiny_run import write_checkpoint, write_data


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "train.jsonl")
