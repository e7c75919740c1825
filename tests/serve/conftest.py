"""A server of the demo's model. Skips the tests of the server where its packages or its client are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ligerzoo.models import Llama
    from ligerzoo.text.tokenizer import Tokenizer
    from tests.serve.serving import Served

SERVER_TESTS = ["test_app.py", "test_limits.py", "test_load.py", "test_logprobs.py", "test_tokenization.py"]

collect_ignore = [] if all(map(find_spec, ("starlette", "uvicorn", "openai"))) else SERVER_TESTS


@pytest.fixture(scope="module")
def demo() -> tuple[Llama, Tokenizer]:
    from tests.serve.serving import load_demo

    return load_demo()


@pytest.fixture(scope="module")
def served(demo: tuple[Llama, Tokenizer]) -> Iterator[Served]:
    from tests.serve.serving import serving

    with serving(*demo) as running:
        yield running
