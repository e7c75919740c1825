"""The allocator's setting, in the environment and on a GPU."""

import os
import subprocess
import sys

import pytest

from ligerzoo.memory.allocator import let_segments_grow

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("given", [None, *VARIABLES])
def test_settings_of_the_user_stay(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(given, "max_split_size_mb:512")
    let_segments_grow()
    found = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    assert found == ({VARIABLES[0]: "expandable_segments:True"} if given is None else {given: "max_split_size_mb:512"})
    monkeypatch.delenv(VARIABLES[0], raising=False)


SEGMENTS = """
import torch
from ligerzoo.memory.allocator import let_segments_grow
let_segments_grow()
x = torch.zeros(1 << 20, device="cuda")
assert torch.cuda.memory_snapshot()[0]["is_expandable"]
"""


@pytest.mark.gpu
def test_segments_grow() -> None:
    local = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    subprocess.run([sys.executable, "-c", SEGMENTS], env=local, check=True)
