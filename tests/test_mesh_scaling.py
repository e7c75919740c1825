"""The benchmark of all GPUs of a host: its schedule, its comparison and its tables; and a tiny run on a CPU."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mesh_scaling
from benchmarks.mesh_scaling import Case, all_cases, compared, levels_of, run_all
from benchmarks.mesh_scaling_report import mesh_scaling_chart, mesh_scaling_figures
from benchmarks.meshes import OURS, PEER
from benchmarks.processes import error_in
from ligerzoo.memory import Recompute

ROOT = Path(mesh_scaling.__file__).parent.parent
ENVIRONMENT = {"gpu": "some GPU"}


def row(gpus: int, ms: float, provider: str = OURS, **changes: Any) -> dict[str, Any]:
    mesh = f"shard={gpus}" if gpus > 1 else ""
    facts = Case(name="dense", gpus=gpus, mesh=mesh, provider=provider).facts()
    plan = {"levels": [["MLP", 2], ["NOTHING", 1]], "keeps_gathered": False} if provider == OURS else {}
    predicted = {"predicted_ms": 80.0, "predicted_gib": 49.5, **plan} if provider == OURS else {"recomputed": "nothing"}
    return {**facts, "ms": ms, "tokens_per_s": 8192 / ms * 1e3, "peak_gib": 50.0, **predicted, **changes}


def test_rows_are_compared_with_one_gpu_and_with_the_peer() -> None:
    rows = compared([row(1, 80.0), row(1, 100.0, PEER), row(2, 100.0), row(2, 125.0, PEER)])
    assert [one["share"] for one in rows] == [1.0, 1.0, 0.8, 0.8]
    assert [one.get("over_peer") for one in rows] == [1.25, None, 1.25, None]
    page = "\n".join(mesh_scaling_figures({"environment": ENVIRONMENT, "rows": rows}))
    assert "| 2 | `shard=2` | 81,920 | 0.800 | 1.25 | 100 | 80 (-20.0%) | 50.0 | 49.5 (-1.0%) | norm outputs" in page
    assert "gate and up in 2 blocks, nothing in 1 blocks |" in page
    assert "| 2 | FSDP2 | 65,536 | 0.800 |  | 125 |  | 50.0 |  | nothing |" in page
    chart = mesh_scaling_chart({"rows": rows})
    assert "ligerzoo, predicted" in chart
    assert "2 GPUs" in chart
    assert mesh_scaling_chart({"rows": [row(2, 3.0)]}) == ""


def test_what_was_not_measured_says_why() -> None:
    failed = {**Case(name="large", gpus=2, method="lora").facts(), "error": "does not fit: needs 90 of 74 GiB"}
    killed = {"case": "killed", "gpus": 4, "killed_after": 31, "ended_s": 4.0, "resumed_on": 2, "saved": 30}
    rows = [failed, {**killed, "steps": 90, "samples": 4095, "lost": 1, "repeated": 0}]
    page = "\n".join(mesh_scaling_figures({"environment": ENVIRONMENT, "rows": rows})).replace("\n", " ")
    assert "needs 90 of 74 GiB |" in page
    assert "Of 4,096 samples, 1 were lost and 0 trained twice." in page


def test_levels_of_blocks_are_read_back() -> None:
    assert levels_of(row(1, 1.0)) == (Recompute.MLP, Recompute.MLP, Recompute.NOTHING)


def test_cases_run_side_by_side_on_different_gpus() -> None:
    """In their order: one that needs all GPUs waits for those before it, and those after wait for it."""
    running, most, order = set[int](), [0], list[int]()
    lock = threading.Lock()

    def run(case: Case, gpus: Sequence[int], limit: float) -> dict[str, Any]:
        with lock:
            assert len(gpus) == case.gpus
            assert not running & set(gpus)
            running.update(gpus)
            most[0] = max(most[0], len(running))
            order.append(case.length)
        time.sleep(0.05)
        with lock:
            running.difference_update(gpus)
        return {"length": case.length}

    counts = (2, 1, 1, 4, 1, 3)
    cases = [Case(name="dense", gpus=count, length=number) for number, count in enumerate(counts)]
    rows = list(run_all(cases, 4, time.monotonic() + 1000, run))
    assert sorted(one["length"] for one in rows) == list(range(6))
    assert order.index(3) == 3
    assert most[0] == 4


def test_a_case_without_time_is_skipped() -> None:
    cases = [Case(name="long", gpus=1, seconds=90), Case(name="dense", gpus=1, seconds=10)]
    limits = []

    def run(case: Case, gpus: Sequence[int], limit: float) -> dict[str, Any]:
        limits.append(limit)
        return case.facts()

    rows = list(run_all(cases, 1, time.monotonic() + 50, run))
    assert rows[0]["skipped"] == "needs 90 of 50 s"
    assert rows[1]["case"] == "dense"
    assert limits == [20]


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_cases_of_a_host(gpus: int) -> None:
    cases = all_cases(gpus)
    assert len({json.dumps(case.facts()) for case in cases}) == len(cases)
    assert all(case.setting.sizes.over(case.gpus) for case in cases)
    dense = [case.gpus for case in cases if case.name == "dense" and case.provider == OURS]
    assert dense == [count for count in (8, 4, 2, 1) if count <= gpus]
    if gpus > 1:
        assert sum(case.length for case in cases if case.name == "long") == 32768 * gpus


def test_the_first_error_is_that_of_the_processes() -> None:
    text = "warning\n[rank2]: torch.OutOfMemoryError: CUDA out of memory.\ntorch.distributed.ChildFailedError: x"
    assert error_in(text) == "torch.OutOfMemoryError: CUDA out of memory."
    assert error_in("Killed\n") == "Killed"


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    command = [sys.executable, "-m", "benchmarks.mesh_scaling", "--tiny", "--providers", OURS, "--seconds", "2000"]
    subprocess.run([*command, "--out", str(out)], cwd=ROOT, check=True, timeout=2000)
    rows = json.loads(out.read_text())["rows"]
    assert not [one["error"] for one in rows if "error" in one]
    assert [one["case"] for one in rows] == [*["dense"] * 2, "long", *["experts"] * 4, *["large"] * 2, "killed"]
    assert all(one["tokens_per_s"] > 0 and one["predicted_gib"] > 0 for one in rows[:-1])
    killed = rows[-1]
    assert (killed["lost"], killed["repeated"], killed["resumed_on"]) == (0, 0, 1)
    assert killed["ended_s"] < 60
