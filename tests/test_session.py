"""Sessions of benchmarks: limits, results and the file that is written meanwhile."""

import json
import time
from pathlib import Path

import pytest

from benchmarks import session
from benchmarks.session import JOBS, Job, Session


def script(directory: Path, name: str, text: str) -> str:
    """Writes a module and returns its command."""
    (directory / f"{name}.py").write_text(text, encoding="utf-8")
    return f"{name} {{out}}"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_jobs_end_fail_and_are_stopped(modules: Path) -> None:
    writes = "import json, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(json.dumps({'ms': 3}))\n"
    jobs = {
        "good": Job(20, script(modules, "good", f"{writes}print('done')"), "good.json"),
        "bad": Job(20, script(modules, "bad", "raise SystemExit(3)")),
        "slow": Job(2, script(modules, "slow", f"import time\n{writes}time.sleep(60)"), "slow.json"),
        "late": Job(1e6, script(modules, "late", "")),
        "several": Job(1, script(modules, "several", ""), all_gpus=True),
    }
    begin = time.monotonic()
    Session(jobs, 0, begin + 60, modules / "out.json").run()
    assert time.monotonic() - begin < 40
    found = json.loads((modules / "out.json").read_text())
    assert (found["good"]["exit"], found["good"]["result"]) == (0, {"good.json": {"ms": 3}})
    assert found["good"]["output"].strip() == "done"
    assert found["bad"]["exit"] == 3
    assert found["slow"]["exit"] == "stopped at its limit"
    assert "KeyboardInterrupt" in found["slow"]["output"]
    assert found["slow"]["result"] == {"slow.json": {"ms": 3}}
    assert "needs 1000000 s" in found["late"]["skipped"]
    assert found["several"] == {"skipped": "needs several GPUs"}


def test_each_gpu_takes_the_next_job(modules: Path) -> None:
    text = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], time.time()); time.sleep(1)"
    command = script(modules, "device", text)
    Session({name: Job(20, command) for name in "abc"}, 2, time.monotonic() + 60, modules / "out.json").run()
    found = json.loads((modules / "out.json").read_text())
    assert {found[name]["output"].split()[0] for name in "ab"} == {"0", "1"}


@pytest.mark.slow
def test_failed_tests_are_known_before_the_end(modules: Path) -> None:
    lines = ["[gw1] [ 3%] PASSED tests/a.py::test_b", "[gw1] [ 3%] FAILED tests/a.py::test_c[1 x] ", "filler " * 9000]
    jobs = {
        "tests": Job(
            2, script(modules, "tests", f"import time\nprint(*{lines!r}, sep=chr(10), flush=True)\ntime.sleep(60)")
        )
    }
    Session(jobs, 0, time.monotonic() + 60, modules / "out.json").run()
    assert json.loads((modules / "out.json").read_text())["tests"]["failed"] == ["tests/a.py::test_c[1 x]"]


def test_only_the_jobs_that_compare_with_it_find_fla(modules: Path) -> None:
    command = script(modules, "path", "import sys; print('/of/fla' in sys.path)")
    jobs = {"tests": Job(20, command), "delta": Job(20, command, with_fla=True)}
    Session(jobs, 0, time.monotonic() + 60, modules / "out.json", fla=Path("/of/fla")).run()
    found = json.loads((modules / "out.json").read_text())
    assert [found[name]["output"].strip() for name in jobs] == ["False", "True"]


def test_unpacking(tmp_path: Path) -> None:
    workload = {"model": "tiny", "providers": {"ligerzoo": {"tokens_per_s": 1.0}}}
    found = {
        "training_1b": {"result": {"training.json": {"workloads": {"tiny_2x16": workload}}}},
        "memory": {"result": {"memory.json": {"cases": {}}}},
        "tests": {"output": "1 passed"},
    }
    path = tmp_path / "session.json"
    path.write_text(json.dumps(found))
    session.unpack(path, tmp_path)
    assert json.loads((tmp_path / "memory.json").read_text()) == {"cases": {}}
    assert json.loads((tmp_path / "training.json").read_text()) == {"workloads": {"tiny_2x16": workload}}


def test_the_list_names_every_job(capsys: pytest.CaptureFixture[str]) -> None:
    session.main(["--list"])
    assert len(capsys.readouterr().out.splitlines()) == len(JOBS)
