"""The branches of a captured graph, with streams that only record who waits for whom."""

from typing import Any

import pytest
import torch

from ligerzoo.kernels import cuda_graph
from ligerzoo.kernels.cuda_graph import side_by_side


class Stream:
    """Collects in `waits` the streams that were waited for."""

    device_index = 0

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self._waits = name, waits

    def wait_stream(self, other: "Stream") -> None:
        self._waits.append((self.name, other.name))


class Capture:
    """A capture on a machine without a GPU: the streams of all calls, and their waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[str, str]] = []
        self.used: list[str] = []
        main, *branches = (Stream(name, self.waits) for name in ("main", "a", "b", "c"))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        monkeypatch.setattr(cuda_graph, "_branch_streams", lambda device: tuple(branches))

    def _enter(self, stream: Stream) -> Any:
        self.used.append(stream.name)
        return torch.no_grad()  # any context


@pytest.mark.parametrize("count", [0, 1, 2, 4, 7])
def test_branches_begin_after_the_stream_and_are_joined(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [lambda i=i: i for i in range(count)]
    assert side_by_side(functions) == list(range(count))  # no capture
    capture = Capture(monkeypatch)
    assert side_by_side(functions) == list(range(count))
    branches = ["a", "b", "c"][: max(0, count - 1)]
    assert capture.waits == [(b, "main") for b in branches] + [("main", b) for b in branches]
    assert capture.used == [["main", "a", "b", "c"][i % 4] for i in range(count)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_branches_are_joined_after_an_exception(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise error

    capture = Capture(monkeypatch)
    with pytest.raises(error):
        side_by_side([lambda: None, fails, lambda: None])
    assert capture.used == ["main", "a"]
    assert capture.waits[-2:] == [("main", "a"), ("main", "b")]
