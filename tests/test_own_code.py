"""`--import`: commands run models of the user's own classes, from a file or module that registers them."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ligerzoo import cli, convert, own_code
from tests.train.tiny_run import write_checkpoint, write_data

ROOT = Path(__file__).parent.parent
CODE = """\
from dataclasses import dataclass

from helper import NAME
from ligerzoo import AutoModel
from ligerzoo.models import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class MineConfig(LlamaConfig):
    pass


class Mine(Llama):
    pass


AutoModel.register(MineConfig, Mine, NAME)
"""
TRAIN = "train model --data data.jsonl --seq-length 64 --max-steps 1 --device cpu"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model of an own class, its file next to one that it imports, and data."""
    write_checkpoint(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "mine"}))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    write_data(tmp_path / "data.jsonl")
    (tmp_path / "my_model.py").write_text(CODE)
    (tmp_path / "helper.py").write_text("NAME = 'mine'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert, "_REGISTERED", {})
    monkeypatch.setattr(own_code, "_IMPORTED", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("my_model", "helper"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("code", ["my_model.py", "my_model"])
def test_commands_run_own_classes(
    code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # chat reads no question
    commands = {
        "info": "info model",
        "train": f"{TRAIN} --output run",
        "plan": f"{TRAIN} --output other --dry-run",
        "generate": "generate model --prompt hi --max-new-tokens 2",
        "chat": "chat model",
        "evaluate": "evaluate model --data data.jsonl",
        "embed": "embed model --input data.jsonl --field prompt --pooling mean --output embeddings.jsonl",
    }
    for name, command in commands.items() if code.endswith(".py") else [("info", commands["info"])]:
        assert cli.main([*command.split(), "--import", code]) == 0, (name, capsys.readouterr().err)
        if name in ("info", "train"):
            assert "Mine" in capsys.readouterr().out
    if code.endswith(".py"):
        assert "import:\n- my_model.py\n" in (folder / "run" / "run.yaml").read_text()


def test_a_new_process_needs_the_import(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for more, code in (([], 1), (["--import", "my_model.py"], 0)):
        command = [
            sys.executable,
            "-m",
            "ligerzoo",
            "generate",
            "model",
            "--prompt",
            "a",
            "--max-new-tokens",
            "1",
            *more,
        ]
        result = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == code
        assert ("got 'mine'" in result.stderr) == code


@pytest.mark.slow
def test_each_process_of_torchrun_imports(folder: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ligerzoo"]
    for more in (["--dry-run"], []):
        command = [sys.executable, *launch, *TRAIN.split(), "--output", "run", "--import", "my_model.py", *more]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert (folder / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("none.py", None, "error: --import: there is no such file; got none.py; expected FILE.py or a module"),
        ("no_such_module", None, "error: --import: no such module; got no_such_module"),
        ("my_modle", None, "Did you mean 'my_model.py'?"),
        ("text.txt", "x", "error: --import: not a Python file; got text.txt"),
        ("fails.py", "import torch\n1 / 0\n", "error: fails.py:2: cannot be imported; got ZeroDivisionError: "),
        ("twice.py", CODE, "error: twice.py:17: cannot be imported; got ConfigError: "),
    ],
)
def test_code_that_cannot_be_imported(
    name: str, content: str | None, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (folder / name).write_text(content)
    given = ["--import", "my_model.py", "--import", name] if name == "twice.py" else ["--import", name]
    assert cli.main(["info", "model", *given]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
