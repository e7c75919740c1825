"""The log, the plot, the FLOPs of a step, and requests to stop."""

import itertools
import json
import resource
import signal
import threading
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ligerzoo import AutoModel
from ligerzoo.errors import CheckpointError, LigerzooError
from ligerzoo.models import CausalLM, Mixtral, MixtralConfig
from ligerzoo.train.log import RunLog, cut_log, first_sources, live_line, read_log
from ligerzoo.train.plot import HEIGHT, MAX_POINTS, plot_metric, plot_svg, thinned, ticks
from ligerzoo.train.run import StopRequest
from ligerzoo.train.throughput import StepFlops
from tests.train.tiny_run import SIZES


@dataclass
class Counted:
    tokens: int = 6
    trained_tokens: int = 4
    padding: int = 2
    sources: list[str] = field(default_factory=lambda: ["a:1", "a:2", "a:1"])
    inputs: dict[str, Tensor] = field(default_factory=lambda: {"position_ids": torch.arange(8)[None]})


@pytest.fixture
def model(checkpoint: Path) -> CausalLM:
    return AutoModel.from_pretrained(checkpoint)


def log_values(log: RunLog, step: int, **values: float) -> None:
    given = {name: torch.tensor(value) for name, value in {"loss": 1.0, **values}.items()}
    log.step(step, values=given, lr=1e-3, batches=[Counted(), Counted()])


def log_losses(log: RunLog, losses: list[float], first: int = 1, *, norms: list[float] | None = None) -> None:
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), first):
        log_values(log, step, loss=loss, grad_norm=norm)


def test_each_step_is_a_line(model: CausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path, model, first_step=0, steps=2) as log:
        log_losses(log, [2.5])
        assert read_log(tmp_path / "log.jsonl") == []  # written with the next step, without waiting for this one
        log_losses(log, [2.25], first=2)
        assert len(read_log(tmp_path / "log.jsonl")) == 1
    first, second = read_log(tmp_path / "log.jsonl")
    expected = {"step": 1, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "tokens": 12, "trained_tokens": 8, "mfu": None}
    assert first.items() >= expected.items()
    assert first["padding"] == 0.25
    assert first["tokens_per_second"] == pytest.approx(12 / first["seconds"])
    assert 0.1 < first["memory_gib"] < 100
    assert list(first) == list(second)
    assert "step 2 of 2: loss 2.2500, " in capsys.readouterr().err


def test_the_live_line_fits() -> None:
    numbers = {"loss": 12.34567, "grad_norm": 1234.5, "lr": 1.5e-5, "mfu": 0.41, "memory_gib": 140.25}
    entry = {**numbers, "tokens_per_second": 1_234_567.8, "padding": 0.123, "images": 1000, "reward": -0.123456}
    line = live_line(entry, ["reward"], 70)
    assert line == "reward -0.1235, loss 12.3457, grad norm 1234.50, lr 1.5e-05, 1,234,568 tokens/s"[: len(line)]
    assert 50 < len(line) <= 70
    everything = live_line(entry, ["reward"], 1000)
    assert everything.startswith(line)
    assert everything.endswith("MFU 41%, 140.2 GiB, padding 12%, images 1,000")
    assert live_line({**entry, "loss": None, "grad_norm": None, "mfu": None}, [], 20) == "loss not finite"


def test_a_log_that_cannot_be_written_is_named(model: CausalLM, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with (
            pytest.raises(CheckpointError, match=r"log\.jsonl: cannot be written, so the run stops; got .*too large"),
            RunLog(tmp_path, model, first_step=0, steps=9) as log,
        ):
            log_losses(log, [1.0] * 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry["step"] for entry in read_log(tmp_path / "log.jsonl")] == [1]


def test_time_of_saving_is_left_out(model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    with RunLog(tmp_path, model, first_step=0, steps=3) as log:
        for step in (1, 2, 3):
            now += step
            log_losses(log, [1.0], first=step)
            if step == 2:
                with log.paused():
                    assert len(read_log(tmp_path / "log.jsonl")) == 2
                    now += 100
    assert [entry["seconds"] for entry in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]


def test_a_loss_of_zero_is_warned_of_once(model: CausalLM, tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="step 1: the loss is exactly 0.* a:1, a:2$") as warned,
        RunLog(tmp_path, model, first_step=0, steps=2) as log,
    ):
        log_losses(log, [0.0, 0.0])
    assert len(warned) == 1


def test_gradients_of_zero_are_warned_of_once(model: CausalLM, tmp_path: Path) -> None:
    message = "steps 2 to 6: the gradients are exactly 0, so nothing is learned; .* a:1, a:2$"
    norms = [1.0, *[0.0] * 8]
    with pytest.warns(UserWarning, match=message) as warned, RunLog(tmp_path, model, first_step=0, steps=9) as log:
        log_losses(log, [1.0] * 9, norms=norms)
    assert len(warned) == 1


def test_steps_without_a_signal_are_counted(
    model: CausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog(tmp_path, model, first_step=2, steps=9, may_be_zero=True) as log:
        for step in range(3, 10):
            log_values(log, step, grad_norm=0.0, groups_without_signal=float(step > 4))
    assert "\n5 steps without a signal: the rewards in each group were equal\n" in f"\n{capsys.readouterr().err}"


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused_before_a_save(model: CausalLM, tmp_path: Path, loss: float) -> None:
    with RunLog(tmp_path, model, first_step=0, steps=9) as log:
        log_losses(log, [1.0, loss])
        with pytest.raises(LigerzooError, match="step 2, a:1, a:2: the loss is not a finite number"), log.paused():
            pytest.fail("saved")
    assert [entry["step"] for entry in read_log(tmp_path / "log.jsonl")] == [1]


@pytest.mark.parametrize("step, kept", [(0, 0), (1, 1), (2, 3), (3, 4), (9, 4)])
@pytest.mark.parametrize("tail", ["", '{"step": 4, "lo', '{"step": 4}'])
def test_a_log_is_cut_after_a_step(tmp_path: Path, step: int, kept: int, tail: str) -> None:
    lines = [json.dumps({"step": number}) + "\n" for number in (1, 2, 2, 3)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(lines) + tail)
    assert read_log(path) == [json.loads(line) for line in lines]
    cut_log(path, step)
    assert path.read_text() == "".join(lines[:kept])


def test_sources_are_shortened() -> None:
    assert first_sources([Counted(sources=["b:1", "a:2"]), Counted(sources=["b:1"])]) == "b:1, a:2"
    assert first_sources([Counted(sources=[str(number) for number in range(9)])]) == "0, 1, 2, 3 and 5 more"


# The plot


def test_the_plot_shows_every_point(tmp_path: Path) -> None:
    steps = [{"step": step, "loss": 3 - 0.1 * step} for step in range(1, 11)]
    entries = [*steps, {"step": 10, "eval_loss": 2.1}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    plot_metric(tmp_path)
    root = ElementTree.fromstring((tmp_path / "loss.svg").read_text())
    training, evaluation = [element for element in root.iter() if element.tag.endswith("polyline")]
    points = [tuple(map(float, point.split(","))) for point in training.attrib["points"].split()]
    assert len(points) == 10
    assert points == sorted(points)
    assert [y for _, y in points] == sorted(y for _, y in points)  # falls, and y grows downwards
    (x, y), (end, low) = map(float, evaluation.attrib["points"].split(",")), points[-1]
    assert x == end
    assert y < low
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"training", "evaluation", "step", "loss, nats per token", "10"} <= texts


def plotted(values: list[float]) -> tuple[list[float], set[str | None]]:
    """Returns the heights of a curve of steps, and all texts of its plot."""
    points = [(float(step), value) for step, value in enumerate(values, 1)]
    root = ElementTree.fromstring(plot_svg({"training": points}, x="step", y="loss"))
    [curve] = [element for element in root.iter() if element.tag.endswith("polyline")]
    heights = [float(point.split(",")[1]) for point in curve.attrib["points"].split()]
    return heights, {element.text for element in root.iter() if element.tag.endswith("text")}


def test_spikes_do_not_flatten_the_curve_and_their_values_are_written() -> None:
    values = [2 + 6 * 0.9**step for step in range(60)]
    heights, texts = plotted(values)
    assert not any(text and text.startswith(("\u2191", "\u2193")) for text in texts)
    values[20], values[40] = 5e4, -700.0
    spiked, texts = plotted(values)
    assert {"\u2191 50000", "\u2193 -700"} <= texts
    assert spiked[:20] == heights[:20]
    assert spiked[20] == min(spiked)
    assert spiked[40] == max(spiked)
    alternating, texts = plotted([(-1.0) ** step * 100 for step in range(60)])
    assert len(set(alternating)) == 2
    assert "100" in texts


def test_the_plot_of_one_step_has_whole_steps() -> None:
    [height], texts = plotted([2.3])
    assert 0 < height < HEIGHT
    assert {"0", "1", "2"} <= texts
    assert "0.5" not in texts


def test_long_labels_do_not_overlap() -> None:
    labels = ("training (with dropout)", "held-out modules (averaged weights)", "a third one")
    curves = {label: [(1.0, 2.0)] for label in labels}
    root = ElementTree.fromstring(plot_svg(curves, x="step", y="loss, nats per token"))
    ends = {text.text: float(text.attrib["x"]) for text in root.iter() if text.tag.endswith("text")}
    assert all(ends[first] <= ends[second] - 7 * len(second) for first, second in itertools.pairwise(labels))
    assert ends["loss, nats per token"] < ends[labels[0]] - 7 * len(labels[0])


def test_no_plot_without_steps(tmp_path: Path) -> None:
    plot_metric(tmp_path)
    assert not (tmp_path / "loss.svg").exists()


@pytest.mark.parametrize("values", [[1.0], [0.0, 1.0], [2.31, 2.34], [-3, 1000], [1e-9, 2e-9]])
def test_ticks_enclose_the_values(values: list[float]) -> None:
    found = ticks(values)
    assert 2 <= len(found) <= 8
    assert found[0] <= min(values) <= max(values) <= found[-1]


def test_long_curves_are_thinned_and_labels_escaped() -> None:
    points = [(float(step), 1.0) for step in range(10 * MAX_POINTS + 1)]
    assert len(thinned(points)) <= MAX_POINTS
    assert thinned(points)[0] == (5.0, 1.0)
    ElementTree.fromstring(plot_svg({"a < b": points}, x="x & y", y="y"))


# FLOPs


@pytest.mark.parametrize("experts_per_token", [None, 1, 4])
def test_flops_agree_with_a_count_of_the_operations(experts_per_token: int | None, model: CausalLM) -> None:
    """torch counts attention on a CPU since 2.15, with the scores that a causal mask hides."""
    if experts_per_token is not None:
        model = Mixtral(MixtralConfig(**{**SIZES, "num_experts": 4, "num_experts_per_tok": experts_per_token}))
    tokens = torch.randint(258, (2, 64))
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    positions = torch.arange(64).expand(2, -1)
    pairs, layers, features = 2 * 64 * 65 / 2, 2, 32
    attention = 3 * (2 + 2) * pairs * layers * features  # forward and twice backward: scores, and sums of values
    counts = counter.get_flop_counts()["Global"]
    products = sum(flops for operation, flops in counts.items() if "attention" not in str(operation))
    assert StepFlops(model)(positions, tokens=128) == products + attention


# Requests to stop


def test_the_second_signal_raises() -> None:
    with StopRequest() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_threads_cannot_be_stopped() -> None:
    seen: list[Any] = []

    def use() -> None:
        with StopRequest() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [False]
