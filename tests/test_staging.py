"""Copies of weights to a GPU. On a CPU, stand-ins for pinned buffers and events check the order."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo import AutoModel
from ligerzoo.hub import staging
from ligerzoo.hub.staging import Staging
from tests.models.tiny import Tiny
from tests.models.tiny_llama import LLAMA

SIZE = 64
TENSORS = [
    torch.arange(77, dtype=torch.float64).view(7, 11),
    torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()[:, 1:4],
    torch.tensor(5),
    torch.tensor([True, False]),
    torch.empty(0, 4),
    torch.arange(SIZE * 3, dtype=torch.uint8).view(torch.float8_e4m3fn),
]


class FakeEvent:
    """Records the calls of an event."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def record(self, stream: Any) -> None:
        self.calls.append("record")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    created: list[FakeEvent] = []

    def buffer() -> tuple[Tensor, FakeEvent]:
        created.append(FakeEvent())
        return torch.empty(SIZE, dtype=torch.uint8), created[-1]

    monkeypatch.setattr(staging, "_BUFFER_BYTES", SIZE)
    monkeypatch.setattr(staging, "_pinned_buffer", buffer)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return created


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_copies_have_the_same_bits(events: list[FakeEvent]) -> None:
    staged = Staging(torch.device("cpu"))
    for tensor in TENSORS:
        copied = staged.copy(tensor)
        assert (copied.shape, copied.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(bits(copied), bits(tensor))


def test_a_buffer_is_filled_after_the_gpu_has_read_it(events: list[FakeEvent]) -> None:
    Staging(torch.device("cpu")).copy(torch.zeros(7 * SIZE - 1, dtype=torch.uint8))
    assert [event.calls for event in events] == [["synchronize", "record"] * 4, ["synchronize", "record"] * 3]


@pytest.mark.gpu
def test_weights_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tiny("llama", LLAMA, shards=3).write(tmp_path)
    monkeypatch.setattr(staging, "_BUFFER_BYTES", 100)  # elements are cut
    with torch.device("cuda"):
        model = AutoModel.from_pretrained(tmp_path)
    expected = AutoModel.from_pretrained(tmp_path, device="cpu").state_dict()
    for name, weight in model.state_dict().items():
        assert weight.is_cuda
        assert torch.equal(weight.cpu(), expected[name])


PREPARING = """
import json, sys
from ligerzoo.kernels.preparation import preparing_triton
with preparing_triton():
    pass
from triton.runtime.cache import triton_key
print(json.dumps(["triton" in sys.modules, triton_key.cache_info().currsize]))
"""


def test_triton_is_prepared_at_the_end() -> None:
    pytest.importorskip("triton")
    out = subprocess.run([sys.executable, "-c", PREPARING], capture_output=True, text=True, check=True)
    assert (json.loads(out.stdout), out.stderr) == ([True, 1], "")
