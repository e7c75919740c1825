"""Streamers receive every token; the text streamer prints whole characters."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import TextStreamer, generate
from tests.generate.models import PROMPT, Scripted, StreamingLetters


def test_a_streamer_receives_the_prompts_and_each_step() -> None:
    class Collector:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, token_ids: Tensor) -> None:
            self.got.append(token_ids.tolist())

        def end(self) -> None:
            self.got.append("end")

    collector = Collector()
    model = Scripted([[7, 50, 9], [8, 9, 50]])
    generate(model, PROMPT, max_new_tokens=5, eos_token_id=50, pad_token_id=0, streamer=collector)
    assert collector.got == [[[1, 2], [3, 4]], [7, 8], [50, 9], [0, 50], "end"]


@pytest.mark.parametrize(
    "options, printed",
    [
        ({}, "STOPc\n"),
        ({"skip_prompt": False}, "abaSTOPc\n"),
        ({"skip_special_tokens": False}, "STOPc<end>\n"),
    ],
)
def test_a_text_streamer_prints_the_continuation(options: dict[str, Any], printed: str) -> None:
    file = io.StringIO()
    streamer = TextStreamer(StreamingLetters(), file=file, **options)
    prompt = torch.tensor([[3, 0]])
    for repeat in (1, 2):
        generate(Scripted([[4, 5, 2, 9]]), prompt, max_new_tokens=9, eos_token_id=9, streamer=streamer)
        assert file.getvalue() == printed * repeat


def test_a_text_streamer_flushes_each_piece() -> None:
    class Terminal(io.StringIO):
        def flush(self) -> None:
            self.flushed = self.getvalue()

    terminal = Terminal()
    streamer = TextStreamer(StreamingLetters(), file=terminal)
    streamer.put(torch.tensor([4]))
    streamer.put(torch.tensor([5]))
    assert terminal.flushed == "ST"


def test_a_text_streamer_prints_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextStreamer(StreamingLetters())
    streamer.put(torch.tensor([4]))
    streamer.end()
    assert capsys.readouterr().out == "ST\n"


def test_a_text_streamer_accepts_one_prompt_only() -> None:
    with pytest.raises(LigerzooError, match=r"TextStreamer: .*got 2 prompts"):
        generate(Scripted([[1], [1]]), PROMPT, max_new_tokens=1, streamer=TextStreamer(StreamingLetters()))
