"""Tiny checkpoints and quiet clients for the tests of integrations."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of a tiny checkpoint with its tokenizer, by `model_type`."""
    from tests.integrations.clients import COMPARED, write

    root = tmp_path_factory.mktemp("checkpoints")
    return {model_type: write(model_type, root / model_type) for model_type in COMPARED}


@pytest.fixture(scope="session", autouse=True)
def _no_progress_bars() -> Iterator[None]:
    transformers = pytest.importorskip("transformers")
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(verbosity)
