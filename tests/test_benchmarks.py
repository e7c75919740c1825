"""The benchmarks' bookkeeping, with fake providers, and the pages and plots written from the results."""

import importlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from benchmarks import delta_channels, losses, operations, recurrence_launches, report, scaling, state_space
from benchmarks.measure import compact_json, interleaved
from benchmarks.row import (
    DIRECTIONS,
    OURS,
    Floor,
    Goal,
    Machine,
    Provider,
    Row,
    compare,
    find_truth,
    measure_row,
    verdicts,
)
from benchmarks.suite import compact_row, measure_suite, suite_command, summary

MACHINE = Machine(bytes_per_second=1e9, flops_per_second=1e9, measured_flops_per_second=1e9)


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def in_place(x: Tensor, weight: Tensor) -> Tensor:
    y = scaled(x, weight)
    x.detach().zero_()
    return y


def fails(x: Tensor, weight: Tensor) -> Tensor:
    raise RuntimeError("first line\nsecond line")


def missing() -> Callable[..., Any]:
    return importlib.import_module("no_such_module").function  # type: ignore[no-any-return]


def row(**providers: Provider) -> Row:
    def inputs() -> dict[str, Tensor]:
        return {"x": torch.randn(5, 3, requires_grad=True), "weight": torch.randn(3, requires_grad=True)}

    return Row(
        "scaled", (5, 3), inputs, scaled, providers, Floor(1e6, 3e6), shared=frozenset({"weight"}), tokens_at_once=2
    )


def measure(**providers: Provider) -> dict[str, Any]:
    return measure_row(row(**providers), device="cpu", machine=MACHINE, seconds=0.001)


def test_a_row_has_times_errors_and_its_floor() -> None:
    result = measure(ligerzoo=Provider(lambda: scaled), peer=Provider(lambda: scaled, "a note"))
    ours, peer = result["providers"]["ligerzoo"], result["providers"]["peer"]
    assert peer["note"] == "a note"
    assert 0 < ours["forward_ms"] < 1000
    assert 0 < ours["forward_backward_ms"] < 1000
    assert set(ours["errors"]) == {"y", "dx", "dweight"}
    assert max(ours["errors"].values()) < 1e-6
    assert result["floor"] == {"unit": "bytes", "forward_ms": 1.0, "forward_backward_ms": 3.0}
    comparison = result["comparison"]["forward_backward"]
    assert comparison["fastest peer"] == "peer"
    assert comparison["ours / fastest peer"] == ours["forward_backward_ms"] / peer["forward_backward_ms"]
    assert comparison["ours / floor"] == ours["forward_backward_ms"] / 3.0
    json.dumps(result)


def test_a_wrong_provider_shows_in_its_errors() -> None:
    errors = measure(ligerzoo=Provider(lambda: lambda x, weight: 2 * x * weight))["providers"]["ligerzoo"]["errors"]
    assert errors == {"y": pytest.approx(1), "dx": pytest.approx(1), "dweight": pytest.approx(1)}


def test_a_missing_or_failing_provider_has_an_error_entry() -> None:
    result = measure(
        ligerzoo=Provider(lambda: scaled),
        missing=Provider(missing),
        fails=Provider(lambda: fails),
        gpu=Provider(lambda: scaled, needs_gpu=True),
    )
    entries = result["providers"]
    assert entries["missing"] == {"error": "not installed: no_such_module"}
    assert entries["fails"] == {"error": "RuntimeError: first line"}
    assert entries["gpu"] == {"error": "needs a GPU"}
    assert result["comparison"]["forward"]["fastest peer"] is None
    assert result["comparison"]["forward"]["ours / fastest peer"] is None
    assert "missing: not installed" in summary(result | {"goals": []})


def test_a_provider_that_is_not_ready_in_time_has_an_error_entry() -> None:
    def hangs(x: Tensor, weight: Tensor) -> Tensor:
        while True:
            pass

    slow = row(ligerzoo=Provider(lambda: scaled), slow=Provider(lambda: hangs))
    result = measure_row(slow, device="cpu", machine=MACHINE, seconds=0.001, patience=0.1)
    assert result["providers"]["slow"] == {"error": "TimeoutError: not ready within 0 s"}
    assert "forward_ms" in result["providers"]["ligerzoo"]


def test_a_provider_that_overwrites_its_inputs_gets_copies() -> None:
    result = measure(peer=Provider(lambda: in_place, overwrites=True), ligerzoo=Provider(lambda: scaled))
    assert max(result["providers"]["ligerzoo"]["errors"].values()) < 1e-6


def test_the_truth_computed_in_chunks_equals_the_whole() -> None:
    target = torch.tensor([1, -100, 2, 0, 1, -100, 0])
    inputs = {"hidden": torch.randn(7, 4, requires_grad=True), "weight": torch.randn(3, 4, requires_grad=True)}
    all_inputs = {"hidden": inputs["hidden"], "weight": inputs["weight"], "target": target}
    whole = Row(
        "head", (7, 4, 3), lambda: all_inputs, operations.linear_cross_entropy, {}, Floor(1, 1), shared=operations.HEAD
    )
    truth = find_truth(whole, all_inputs)
    parts = find_truth(replace(whole, tokens_at_once=3), all_inputs)
    loss = operations.linear_cross_entropy(inputs["hidden"].double(), inputs["weight"].double(), target)
    expected = [loss, *torch.autograd.grad(loss, [inputs["hidden"], inputs["weight"]])]
    for found in (truth, parts):
        for actual, exact in zip([*found.outputs, *found.gradients], expected, strict=True):
            torch.testing.assert_close(actual.float(), exact.float())


def test_calls_of_providers_alternate() -> None:
    calls = ""

    def call(name: str) -> Callable[[], None]:
        def note() -> None:
            nonlocal calls
            calls += name

        return note

    interleaved({"a": call("a"), "b": call("b")}, device="cpu", rounds=3)
    assert calls == "ababab"


def test_the_fastest_peer_is_not_ourselves() -> None:
    entries: dict[str, Any] = {
        OURS: {"forward_ms": 1.0},
        "a": {"forward_ms": 4.0},
        "b": {"forward_ms": 2.0},
        "c": {"error": "no"},
    }
    assert compare(entries, "forward", 0.5) == {
        "fastest peer": "b",
        "ours / fastest peer": 0.5,
        "ours / floor": 2.0,
    }


def test_goals_are_judged_by_our_own_figures() -> None:
    def result(ours: dict[str, float], waits: bool | None = None) -> dict[str, Any]:
        peer = {"forward_ms": 2.0, "forward_backward_ms": 4.0}
        entries: dict[str, Any] = {OURS: ours, "peer": peer}
        comparison = {d: compare(entries, d, 1.0) for d in DIRECTIONS}
        return {"providers": entries, "comparison": comparison, "waits_for_gpu": waits}

    def met(goal: Goal, ours: dict[str, float], waits: bool | None = None) -> list[bool]:
        before = {"full": result({"forward_ms": 1.0, "forward_backward_ms": 10.0})}
        return [verdict["met"] for verdict in verdicts(goal, result(ours, waits), before)]

    ours = {"forward_ms": 3.0, "forward_backward_ms": 4.0, "extra_mib": 5.0}
    assert met(Goal(), ours) == [False, True]
    assert met(Goal(of_peer=0.9, directions=("forward_backward",)), ours) == [False]
    assert met(Goal(of_peer=None, of_floor=3.5), ours) == [True, False]
    assert met(Goal(of_peer=None, ms=4.0, extra_mib=4.0), ours) == [True, False]
    assert met(Goal(of_peer=None, of_row=("full", 0.4)), ours) == [True]
    assert met(Goal(of_peer=None, of_row=("full", 0.3)), ours) == [False]
    assert met(Goal(of_peer=None, of_row=("nowhere", 0.3)), ours) == [False]
    assert met(Goal(of_peer=None), ours, waits=True) == [False]
    assert met(Goal(of_peer=None), ours, waits=False) == [True]
    assert met(Goal(of_floor=2.0, ms=1.0, extra_mib=1.0), {}) == [False] * 6


def test_a_failing_row_does_not_affect_the_others(tmp_path: Path) -> None:
    def no_inputs() -> dict[str, Tensor]:
        raise MemoryError("too large")

    good = row(ligerzoo=Provider(lambda: scaled))
    broken = Row("broken", (1,), no_inputs, scaled, good.providers, good.floor)
    out = tmp_path / "results.json"
    measure_suite([broken, good], out=out, what="", device="cpu", size=lambda n: min(n, 8), seconds=0.001, patience=10)
    first, second = json.loads(out.with_suffix(".raw.json").read_text())["rows"]
    assert first == {"name": "broken 1", "error": "MemoryError: too large"}
    assert second["name"] == "scaled 5 x 3"
    failed, compact = json.loads(out.read_text())["rows"]
    assert failed == first
    assert (compact["op"], compact["shape"]) == ("scaled", [5, 3])


def test_a_compact_row_has_the_figures_of_the_tables() -> None:
    result = measure(
        ligerzoo=Provider(lambda: scaled), eager=Provider(lambda: scaled), fails=Provider(lambda: fails),
        **{f"{OURS}, another way": Provider(lambda: scaled)},
    )  # fmt: skip
    result["providers"][OURS]["errors"] = {"y": 2e-3, "dx": 3e-3, "loss": 1.0}
    result["providers"]["eager"]["errors"] = {"y": 2e-3, "dx": 1e-3, "loss": 1e-9}
    compact = compact_row(result)
    assert compact["providers"].keys() == {OURS, "eager"}
    assert compact["providers"][OURS].keys() == {"forward_ms", "forward_backward_ms"}
    assert compact["floor"] == {"forward_ms": 1.0, "forward_backward_ms": 3.0}
    assert compact["largest error, ligerzoo / eager"] == {"dx": pytest.approx(3.0)}
    assert report.compared(compact) == result["comparison"]["forward_backward"]


def test_compact_json_is_json_with_a_line_for_each_row() -> None:
    value = {"rows": [{"a": [1, 2.0], "b": None}, {"c": "x\n"}], "empty": {}, "figure": 1018.474609375}
    text = compact_json(value)
    assert text.splitlines()[2] == '    {"a": [1, 2.0], "b": null},'
    assert json.loads(text) == value | {"figure": 1018.47}


@pytest.mark.parametrize("shape", ["4B", "Nemotron-H-8B"])
def test_launches_to_try_include_the_present_one_and_no_wgmma(shape: str) -> None:
    launches = recurrence_launches.SHAPES[shape].launches
    by_tokens = (
        ["query_gradients", "key_gradients"] if shape == "4B" else ["group_gradients", "pair_weights", "prepare"]
    )
    rows = dict.fromkeys(by_tokens, 32)
    assert launches.keys() >= {"prepare", "scan", "outputs", "reverse_scan", *rows}
    for kernel in launches:
        items = [item.launch for item in recurrence_launches.candidates(kernel, shape)]
        assert launches[kernel][2] in items
        for launch in items:
            assert launch is not None
            assert launch.warps <= 2 or (launch.values if "scan" in kernel else rows[kernel]) < 64


def small_ssd(packed: bool = False) -> Row:
    return state_space.ssd_row("small", 2, 50, state_space.Shape(4, 6, 2, 8, 16), packed)


def small_channels(packed: bool = False) -> Row:
    return delta_channels.rule_row("small", 1, 40, 2, packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("small", [small_ssd, small_channels])
def test_our_recurrences_are_those_of_the_formulas(small: Callable[[bool], Row], packed: bool) -> None:
    result = measure_row(small(packed), device="cpu", machine=MACHINE, seconds=0.001)
    errors = result["providers"][OURS]["errors"]
    assert len(errors) == 8
    assert max(errors.values()) < 0.1  # in bf16; another formula would err by about 1
    table = "\n".join(report.recurrence_figures({"state_space": {"environment": {}, "rows": [compact_row(result)]}}))
    assert f"| {report.label(result)} |" in table


def test_our_grouped_norm_is_the_formula() -> None:
    small = state_space.norm_row("small", 5, state_space.Shape(4, 6, 2, 8, 16))
    result = measure_row(small, device="cpu", machine=MACHINE, seconds=0.001)
    assert max(result["providers"][OURS]["errors"].values()) < 0.02


def test_the_committed_results_are_compact() -> None:
    committed = [path for path in (report.ROOT / report.RESULTS).glob("*.json") if ".raw" not in path.suffixes]
    assert committed
    assert max(len(path.read_text().splitlines()) for path in committed) < 150


def test_every_goal_refers_to_an_earlier_row() -> None:
    rows = list(operations.rows(lambda n: n))
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert "linear_cross_entropy 8192 x 4096 x 128256, 75% ignored" in names
    before: set[str] = set()
    for row in rows:
        assert row.goal.of_row is None or row.goal.of_row[0] in before
        before.add(row.name)
    assert len({row.name for row in scaling.rows(lambda n: n)}) == 9


@pytest.mark.parametrize("formula", [*losses.PROVIDERS, *losses.EMBEDDING_LOSSES], ids=lambda formula: formula.__name__)
def test_the_losses_measured_are_the_formulas(formula: Callable[..., Tensor]) -> None:
    of_embeddings = formula in losses.EMBEDDING_LOSSES
    small = losses.embedding_row(formula, 8, 6) if of_embeddings else losses.loss_row(formula, 8, 6, 8, 40)
    result = measure_row(small, device="cpu", machine=MACHINE, seconds=0.001)
    assert max(result["providers"][OURS]["errors"].values()) < 0.1  # in bf16; another formula would err by about 1
    rows = [compact_row(result)]
    table = "\n".join(report.loss_figures({"environment": {"gpu": "some GPU"}, "rows": rows}))
    assert f"| {formula.__name__} 8 x 6{'' if of_embeddings else ' x 8 x 40'} |" in table


def test_the_pages_and_plots_are_up_to_date() -> None:
    report.main(["--check"])


def test_the_report_rewrites_the_pages_and_draws_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [tmp_path / name for name in report.PAGES]
    for page in pages:
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "HIGHLIGHTS", ("cross entropy 128 x 500",))
    results = tmp_path / report.RESULTS
    suites = {"operations": (operations.rows, "cross_entropy 128 x 500"), "scaling": (scaling.rows, "128 x 64 x")}
    for name, (rows, only) in suites.items():
        where = ["--out", str(results / f"{name}.json"), "--device", "cpu"]
        suite_command(rows, what="", out=Path(), seconds=1.0, argv=["--quick", "--only", only, *where])
    arguments = ["--root", str(tmp_path)]
    with pytest.raises(SystemExit, match="out of date"):
        report.main([*arguments, "--check"])

    drawn = []
    for _ in range(2):
        report.main(arguments)
        drawn.append([path.read_text() for path in sorted(results.glob("*.svg"))])
    readme, docs = (page.read_text() for page in pages)
    for text in (readme, docs):
        assert text.startswith(f"before\n{report.BEGIN}\n")
        assert text.endswith(f"{report.END}\nafter\n")
        assert "old" not in text
        assert "Whole models" not in text
    assert "| cross entropy 128 x 500, peaked |" in docs
    assert "highlights.svg" in readme
    assert "|" not in readme  # no suite of its table was measured
    assert "## Scaling of the loss head" in docs
    assert len(drawn[0]) == 2
    assert drawn[0] == drawn[1]
    for plot in drawn[0]:
        ElementTree.fromstring(plot)
    report.main([*arguments, "--check"])


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md", "benchmarks/results/highlights.svg"])
def test_a_page_that_differs_from_the_results_is_found(name: str, tmp_path: Path) -> None:
    for path in ("README.md", "docs/benchmarks.md", str(report.RESULTS)):
        source, target = report.ROOT / path, tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    report.main(["--root", str(tmp_path), "--check"])
    content = (tmp_path / name).read_text()
    assert "1.22" in content or "1.92" in content
    (tmp_path / name).write_text(content.replace("1.92", "1.91").replace("1.22", "1.21"))
    with pytest.raises(SystemExit, match="out of date"):
        report.main(["--root", str(tmp_path), "--check"])


def test_every_highlight_was_measured() -> None:
    rows = report.highlights(report.read_results(report.ROOT / report.RESULTS))
    assert tuple(map(report.label, rows)) == report.HIGHLIGHTS


def test_the_best_time_is_bold_and_a_missing_figure_is_empty() -> None:
    entries: dict[str, Any] = {
        OURS: {"forward_ms": 0.2, "forward_backward_ms": 0.5, "extra_mib": 3.0},
        "torch": {"forward_ms": 0.25, "forward_backward_ms": 1.0},
    }
    line = {
        "op": "add_one",
        "shape": [2, 3],
        "variant": "",
        "providers": entries,
        "floor": {"forward_ms": 0.1, "forward_backward_ms": 0.25},
    }
    assert report.operation_line(line, ["torch", "liger-kernel"]) == [
        "add one 2 x 3", "0.200 / 0.500", "0.250 / 1.00", "", "**0.50**", "2.00", "3",
    ]  # fmt: skip
    assert report.exactness([line]) == ""
    line["largest error, ligerzoo / eager"] = {"y": 2.0}
    assert "at most 2.00 times eager torch's (y of add one 2 x 3)" in report.exactness([line])


def test_the_figures_of_whole_models() -> None:
    environment = {"gpu": "GPU", "torch": "2.11.0", "liger-kernel": "not installed"}
    step = {
        "environment": environment | {"liger-kernel": "0.8.5"},
        "shape": {"batch": 8, "length": 2048},
        "providers": {
            OURS: {"ms": 200.4, "tokens_per_s": 81760.0, "peak_gib": 20.0},
            "transformers": {"ms": 300.0, "tokens_per_s": 54613.0, "peak_gib": 19.0},
        },
    }
    seconds = {"raw safetensors": [0.0, 3.0], OURS: [0.1, 2.0], "transformers": [8.0, 2.0]}
    loading = {"environment": environment, "gib": 15.0, "median_import_and_load_s": seconds}
    text = report.all_figures({"training_step": step, "loading": loading})
    assert "GPU; torch 2.11.0, liger-kernel 0.8.5" in text.replace("\n", " ")
    assert "| **200 ms, 81,800 tokens/s** |  | 300 ms, 54,600 tokens/s |" in text
    assert "| its peak memory | 20.0 GiB |  | **19.0 GiB** |" in text
    assert "| **2.1 s** |  | 10.0 s |" in text
    assert "with safetensors alone takes 3.0 s." in text


def test_launch_figures() -> None:
    entry = {"forward_us": 11.4, "forward_backward_us": 60.2}
    slower = {"forward_us": 12.6, "forward_backward_us": 80.0}
    operations = {"rms_norm": {"ligerzoo": entry, "torch": slower, "liger-kernel": {"error": "not installed"}}}
    figures = report.launch_figures({"environment": {"gpu": "some GPU"}, "operations": operations})
    assert "some GPU" in figures[1]
    assert figures[2].splitlines()[-1] == "| rms norm | 11 / **60** | 13 / 80 |  |"
