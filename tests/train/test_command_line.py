"""Options of a run in a YAML file: what is read, what is refused, and the file that each run writes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ligerzoo import cli
from ligerzoo.train.command_line import write_options
from ligerzoo.train.methods import METHODS
from tests.train.tiny_run import arguments, options, run_script, write_checkpoint, write_data

Errors = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_checkpoint(tmp_path / "model")
    write_data(tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(config: str, *more: str, capsys: Errors) -> list[str]:
    """Returns the lines of the defaults in the printed recipe of a file."""
    Path("options.yaml").write_text(config)
    assert cli.main(["train", "--config", "options.yaml", "--print-recipe", *more]) == 0
    printed = capsys.readouterr().out
    return [
        line.strip() for line in printed.partition("DEFAULTS: dict[str, Any] = {\n")[2].partition("}")[0].splitlines()
    ]


def test_a_run_writes_a_file_that_repeats_it(folder: Path, capsys: Errors) -> None:
    given = options(
        Path("model"), Path("data.jsonl"), Path("run"), max_steps=2, lora_rank=2, lora_targets=("q_proj", "o_proj")
    )
    assert cli.main(arguments(given)) == 0
    file = folder / "run" / "run.yaml"
    assert "lr: 0.001\n" in file.read_text()
    assert cli.main(["train", "--config", str(file), "--output", "again"]) == 0
    assert (folder / "again" / "run.yaml").read_text() == file.read_text().replace("output: run", "output: again")
    name = "adapter_model.safetensors"
    assert (folder / "again" / name).read_bytes() == (folder / "run" / name).read_bytes()
    assert cli.main(["train", "--config", str(file)]) == 1  # the output directory is that of the run
    assert "Continue the run with --resume" in capsys.readouterr().err


def test_the_file_of_a_run_is_whole_or_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = METHODS["sft"].options(model="m", data=("a",), output=str(tmp_path))
    write_options(tmp_path, given)
    earlier = (tmp_path / "run.yaml").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_options(tmp_path, dataclasses.replace(given, lr=1.0))
    assert (tmp_path / "run.yaml").read_bytes() == earlier
    assert [one.name for one in tmp_path.iterdir()] == ["run.yaml"]


def test_values_are_those_of_the_command_line(folder: Path, capsys: Errors) -> None:
    config = """
    model: ~/model
    data: [a.jsonl, "b.jsonl"]
    output: run        # a comment
    lr: 1e-5
    capture: on
    batch_size: 2
    dora: yes
    lora-rank: 4
    epochs: null
    eval-data: only.jsonl
    """
    lines = recipe(config, "--lr", "2e-3", "--no-dora", "--data", "c.jsonl", capsys=capsys)
    expected = {
        "model": f"{Path.home()}/model",
        "data": ("c.jsonl",),
        "lr": 0.002,
        "capture": "on",
        "dora": False,
        "batch_size": 2,
        "epochs": None,
        "eval_data": ("only.jsonl",),
    }
    assert {f"{name!r}: {value!r}," for name, value in expected.items()} <= {*lines}
    assert "'lr': 1e-05," in recipe(config, "model", capsys=capsys)


def test_the_method_may_be_in_the_file(folder: Path, capsys: Errors) -> None:
    config = "model: m\ndata: d\noutput: o\nmethod: dpo\nbeta: 0.3\n"
    assert "'beta': 0.3," in recipe(config, capsys=capsys)
    assert cli.main(["train", "--config", "options.yaml", "--method", "orpo", "--print-recipe"]) == 0
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--config", "options.yaml", "--method", "sft"])
    assert "options.yaml:5: beta: unknown option. --beta is an option of --method dpo" in capsys.readouterr().err


def test_a_script_reads_a_file(folder: Path, capsys: Errors) -> None:
    given = options(Path("model"), Path("data.jsonl"), Path("run"), max_steps=1)
    assert cli.main([*arguments(given), "--print-recipe"]) == 0
    Path("recipe.py").write_text(capsys.readouterr().out)
    Path("options.yaml").write_text("lr: 0.5\nseed: 3\n")
    run_script(Path("recipe.py"), "--config", "options.yaml", "--seed", "4")
    written = (folder / "run" / "run.yaml").read_text()
    assert "lr: 0.5\n" in written
    assert "seed: 4\n" in written


MISTAKES = [
    ("learning_rate: 1e-4", "options.yaml:1: learning_rate: unknown option. Did you mean '--lr'?"),
    ("\nschedul: linear", "options.yaml:2: schedul: unknown option. Did you mean '--schedule'?"),
    ("lr: abc", "options.yaml:1: lr: got 'abc'; expected a positive number"),
    ("output:", "options.yaml:1: output: got nothing; expected a text that is not empty"),
    ("lr: [1, 2]", "options.yaml:1: lr: got a list; expected a positive number"),
    ("eval-data: []", "options.yaml:1: eval-data: got nothing; expected a text"),
    ("schedule: cosin", "options.yaml:1: schedule: got 'cosin'; expected one of 'constant'"),
    ("dora: maybe", "options.yaml:1: dora: got 'maybe'; expected true or false"),
    ("lr: 1\nlr: 2", "options.yaml:2: lr: set twice; also in line 1"),
    ("optimizer: {lr: 1}", "options.yaml:1: optimizer: not an option; expected a value or a list of values"),
    ("- lr: 1", "options.yaml:1: not options; expected lines such as lr: 1e-4"),
    ("lr: [1", "options.yaml:1: not valid YAML: "),
    ("lr: !!python/object/apply:os.mkdir [hacked]", "options.yaml:1: lr: got a list"),
    ("!!python/object/apply:os.mkdir [hacked]", "options.yaml:1: not options"),
    ("method: stf", "options.yaml:1: method: got 'stf'; expected one of"),
]


@pytest.mark.parametrize("config, message", MISTAKES)
def test_a_mistake_in_the_file_is_one_line(
    config: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Errors
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("options.yaml").write_text(config)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "model", "--data", "x", "--output", "y", "--config", "options.yaml"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ligerzoo train: error: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["options.yaml"]


def test_a_file_that_is_not_there_or_lacks_options(tmp_path: Path, capsys: Errors) -> None:
    (tmp_path / "none.yaml").write_text("data: x\noutput: y\n")
    for name, message in (("gone.yaml", "gone.yaml: No such file"), ("none.yaml", "are required: MODEL")):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["train", "--config", str(tmp_path / name)])
        assert message in capsys.readouterr().err.splitlines()[0]
