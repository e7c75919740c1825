"""The benchmark of meshes: a tiny run on a CPU, and its table."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import meshes
from benchmarks.meshes import OURS, PEER, compared
from benchmarks.meshes_report import mesh_figures

ROOT = Path(meshes.__file__).parent.parent


def row(gpus: int, mesh: str, ms: float, last: float, provider: str = OURS, case: str = "dense") -> dict[str, Any]:
    figures = {"tokens_per_s": 1e6 / ms, "ms": ms, "peak_gib": 10.0, "losses": [3.0, last]}
    return {"provider": provider, "gpus": gpus, "case": case, "mesh": mesh, **figures}


def test_rows_are_compared_with_one_gpu_and_the_fastest_peer() -> None:
    rows = [
        row(1, "", 100.0, 2.0), row(1, meshes.REVERSED, 101.0, 2.25), row(2, "shard=2", 50.0, 1.5),
        row(2, "fsdp", 75.0, 2.0, PEER), row(2, "tensor plan", 60.0, 2.0, PEER),
    ]  # fmt: skip
    found = compared(rows)
    assert found[2]["speedup"] == 2.0
    assert found[2]["largest_loss_difference"] == 0.5
    assert found[2]["over_peer"] == 1.2
    assert found[1]["largest_loss_difference"] == 0.25
    page = "\n".join(mesh_figures({"environment": {"gpu": "some GPU"}, "rows": found}))
    assert "| ligerzoo | 2 | `shard=2` | 20,000 | 2.00 | 10.0 | 0.5000 | 1.20 |" in page


def test_a_case_without_a_result_says_why() -> None:
    failed = {"provider": PEER, "gpus": 2, "case": "experts", "mesh": "expert plan", "error": "not finished within 9 s"}
    assert "not finished within 9 s" in "\n".join(mesh_figures({"environment": {"gpu": "some GPU"}, "rows": [failed]}))


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.meshes", "--tiny", "--providers", OURS, "--only", "dense", "longest"]
    subprocess.run([*command, "--out", str(tmp_path / "meshes.json")], cwd=ROOT, check=True, timeout=300)
    rows = json.loads((tmp_path / "meshes.json").read_text())["rows"]
    assert [found["mesh"] for found in rows] == ["", meshes.REVERSED, "shard=2", "tensor=2", "", "context=2"]
    assert all(found["largest_loss_difference"] < 1e-5 for found in rows if found["case"] == "dense")
    assert [found["tokens"] for found in rows if found["case"] == "longest"] == [128, 256]
