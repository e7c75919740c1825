"""What the tests of all architectures against transformers begin with: a checkpoint of the module's `tiny`."""

from pathlib import Path

import pytest

from tests.models.tiny import Tiny


@pytest.fixture(scope="module")
def directory(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tiny.write(path)
    return path
