"""Fixtures of the tests against transformers."""

from pathlib import Path

import pytest

from tests.models.tiny import Tiny


@pytest.fixture(scope="module")
def directory(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the module's `tiny` fixture."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny.write(path)
    return path
