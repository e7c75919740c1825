"""The scripts in examples/ run on a CPU, with the models of the package."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ligerzoo.models import Llama
from tools import notebooks

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def test_every_script_is_tested() -> None:
    tested = {"train_llama.py", "compose.py", "vision.py", "serve.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*tested, "reward.py"}  # the README's reward function


def run(name: str, *arguments: str) -> None:
    runpy.run_path(str(EXAMPLES / name))["main"](*arguments)


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


def test_train_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run("train_llama.py")
    output = capsys.readouterr().out
    found = losses(output)
    assert len(found) == 12
    assert sum(found[-5:]) < sum(found[:5])
    assert "def load(directory):\n    return" in output
    assert Llama.from_pretrained(tmp_path / "runs/llama").config.vocab_size > 0


def test_compose(capsys: pytest.CaptureFixture[str]) -> None:
    run("compose.py")
    found = losses(capsys.readouterr().out)
    assert len(found) == 3
    assert found[-1] < 0.8 * found[0]


def test_vision(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    run("vision.py")
    answers = re.findall(r"^(\d)\.png: (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert [number for number, _ in answers] == ["1", "2", "3", "4"]
    assert all(answer.startswith("a ") for _, answer in answers)


def test_serve() -> None:
    pytest.importorskip("uvicorn")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / "serve.py")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    first, *answers = process.stdout.splitlines()
    assert first.startswith("example at http://127.0.0.1:")
    assert any(line.startswith("def add(a, b):") for line in answers)
    assert any(line.startswith("import") and len(line) > len("import") for line in answers)


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(path: Path) -> None:
    """Every cell runs in a new kernel. The figures that are stored in the notebook may be those of another machine."""
    pytest.importorskip("nbclient")
    import nbformat

    stored = nbformat.read(path, as_version=4)
    for cell, executed in zip(stored.cells, notebooks.execute(path).cells, strict=True):
        printed = [output.name for output in executed.get("outputs", [])]
        assert printed == [output.name for output in cell.get("outputs", [])], "run python -m tools.notebooks"
        assert set(printed) <= {"stdout"}
