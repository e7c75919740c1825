"""The text demo passes its checks, the checks detect errors, and its model is as documented."""

import importlib.util
import json
import math
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo import Tokenizer, cli
from ligerzoo.demo import text as demo
from ligerzoo.models import Llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _threads() -> Any:
    """Restores the number of threads, which the demo sets to 1."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# The demo


def test_the_demo_passes_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == 0
    output, progress = capsys.readouterr()
    ticks = [line for line in output.splitlines() if line.startswith("✓ ")]
    assert len(ticks) == 5
    assert "5 of 5 checks passed." in output
    assert "\033" not in output  # no colours outside a terminal
    before, after = (float(word) for word in ticks[2].split()[-3::2])
    assert after < 0.9 * before
    assert f"{demo.STEPS}/{demo.STEPS}" in progress
    assert "loss=" in progress
    for step in (demo.load, demo.complete, demo.fine_tune, demo.save_and_reload, demo.generate_twice):
        assert f"    def {step.__name__}(" in output
    assert all(command in output for _, command in demo.next_commands())


@pytest.mark.slow
def test_the_demo_trains_on_a_text_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "fine_tune", few_steps)
    text = tmp_path / "lines.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 300)
    assert cli.main(["demo", "--text", str(text)]) == 0
    assert "Fine-tune on lines.txt" in capsys.readouterr().out
    text.write_text("The quick brown fox jumps over the lazy dog.")
    assert cli.main(["demo", "--text", str(text)]) == 1
    assert "the text is too short" in capsys.readouterr().err


def few_steps(model: Llama, windows: Tensor) -> None:
    fine_tune(model, windows, steps=3)


def train_nothing(model: Llama, windows: Tensor) -> None:
    pass


def load_modified(directory: Path) -> tuple[Llama, Tokenizer]:
    model, tokenizer = load(directory)
    model.model.norm.weight.data[7] += 1e-3
    return model, tokenizer


def complete_nothing(model: Llama, tokenizer: Tokenizer, prompt: str) -> str:
    return prompt + " key in items:\n        )("


def flip_a_bit(model: Llama, directory: Path) -> Llama:
    reloaded = save_and_reload(model, directory)
    reloaded.model.layers[2].mlp.up_proj.weight.data.view(torch.uint8)[5, 9] ^= 1
    return reloaded


def change_dtype(model: Llama, directory: Path) -> Llama:
    return save_and_reload(model, directory).to(torch.float64)


def generate_other_tokens(model: Llama, tokenizer: Tokenizer, prompt: str) -> tuple[Tensor, Tensor]:
    cached, uncached = generate_twice(model, tokenizer, prompt)
    return cached, uncached.index_fill(1, torch.tensor([20]), 0)


load, fine_tune, save_and_reload, generate_twice = (
    demo.load,
    demo.fine_tune,
    demo.save_and_reload,
    demo.generate_twice,
)


BROKEN: list[tuple[str, Callable[..., Any], str]] = [
    ("load", load_modified, "each tensor equal to the files"),
    ("complete", complete_nothing, "valid Python"),
    ("fine_tune", train_nothing, "the validation loss fell"),
    ("save_and_reload", flip_a_bit, "the same, bit for bit"),
    ("generate_twice", generate_other_tokens, "with and without the cache are equal"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", [BROKEN, [("save_and_reload", change_dtype, "the same, bit for bit")]], ids=["every step", "one step"]
)
def test_the_demo_reports_failed_checks(
    broken: list[tuple[str, Callable[..., Any], str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "fine_tune", few_steps)
    for step, function, _ in broken:
        monkeypatch.setattr(demo, step, function)
    assert cli.main(["demo"]) == 1
    output = capsys.readouterr().out
    complaints = [line for line in output.splitlines() if line.startswith("✗ NOT TRUE: ")]
    for complaint, (_, _, claim) in zip(complaints, broken, strict=True):
        assert claim in complaint
    assert f"{5 - len(broken)} of 5 checks passed." in output


def test_generation_is_compared_with_and_without_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    generate = Llama.generate

    def spy(model: Llama, ids: Tensor, use_cache: bool = True, **options: Any) -> Tensor:
        used.append(use_cache)
        return generate(model, ids, use_cache=use_cache, **options)

    monkeypatch.setattr(Llama, "generate", spy)
    demo.generate_twice(*demo.load(demo.CHECKPOINT), "def f(")
    assert used == [True, False]


def test_the_commands_to_try_next_work() -> None:
    (_, from_the_hub), (_, own_text), (_, compose) = demo.next_commands()
    for command, name in ((from_the_hub, "generate"), (own_text, "demo")):
        python, *words = shlex.split(command)
        assert Path(python).resolve() == Path(sys.executable).resolve()
        assert words[:2] == ["-m", "ligerzoo"]
        options = cli.parse(words[2:])
        assert options.run.__name__ == name
    assert options.text.is_file()
    result = subprocess.run(["bash", "-c", compose], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("Decoder(")


@pytest.mark.parametrize(
    "text, lines",
    [("x = 1\n)(", 1), ("def f():\n    return (1 +\n        2)\n    y = [", 3), ("def f():", 0), ("", 0)],
)
def test_lines_of_python_are_counted(text: str, lines: int) -> None:
    assert demo.count_python_lines(text) == lines


def test_training_and_validation_windows_are_disjoint() -> None:
    tokenizer = Tokenizer.from_pretrained(demo.CHECKPOINT)
    text = "".join(f"line {number}\n" for number in range(1000))
    training, validation = demo.split(text, tokenizer)
    assert training.shape[1] == validation.shape[1] == demo.WINDOW
    assert (training[:, 0] == tokenizer.bos_token_id).all()
    rows = {tuple(row) for row in training.tolist()}
    assert len(rows) == len(training) >= 4 * len(validation)
    assert not rows & {tuple(row) for row in validation.tolist()}


# The model in the package


def test_the_model_is_small_and_in_hugging_face_format() -> None:
    sizes = {path.name: path.stat().st_size for path in demo.CHECKPOINT.iterdir()}
    assert sum(sizes.values()) <= 8_000_000
    shards = [name for name in sizes if name.endswith(".safetensors")]
    assert len(shards) >= 2
    assert sizes.keys() >= {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_training_is_recorded() -> None:
    record = json.loads((demo.CHECKPOINT / "training.json").read_text())
    assert tuple(record["held_out"]) == demo.HELD_OUT
    assert isinstance(record["seed"], int)
    assert record["versions"].keys() >= {"ligerzoo", "python", "torch", "triton"}
    curve = record["curve"]
    assert len(curve["step"]) == len(curve["train_loss"]) == len(curve["held_out_loss"]) >= 10
    assert min(curve["held_out_loss"]) == pytest.approx(record["held_out_loss"], abs=1e-4)
    assert record["held_out_loss_as_stored"] < 0.5 * curve["held_out_loss"][0]


def test_the_model_knows_python() -> None:
    """The loss on a held-out module is near the recorded one; newer Pythons have changed the module."""
    record = json.loads((demo.CHECKPOINT / "training.json").read_text())
    model, tokenizer = demo.load(demo.CHECKPOINT)
    import statistics

    training, validation = demo.split(Path(statistics.__file__).read_text(), tokenizer)
    assert demo.loss_on(model, torch.cat([training[:16], validation[:8]])) < record["held_out_loss"] + 1


# The script that trains it


@pytest.fixture
def script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("train_embedded_model", ROOT / "tools/train_embedded_model.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_held_out_modules_are_not_trained_on(script: types.ModuleType, tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "a/test/d.py", "html/entities.py", "html/parser.py", "site-packages/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = [path.relative_to(tmp_path).as_posix() for path in script.source_files(tmp_path)]
    assert found == ["a/c.py", "b.py", "html/parser.py"]


def test_a_window_begins_at_a_line(script: types.ModuleType) -> None:
    text = "import x\n\n\ndef f(a):\n    if a:\n        return  a + 10\n\n\nclass É:\n" * 200
    tokenizer = script.train_tokenizer([text])
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    windows = script.Windows(tokenizer, [text, text], "cpu")
    tokens = windows.random(64, torch.Generator().manual_seed(0))
    assert tokens.shape == (64, script.CONTEXT)
    assert (tokens[:, 0] == tokenizer.token_to_id(script.BOS)).all()
    first_lines = {tokenizer.decode(row[1:6]).strip("\n").split("\n")[0] for row in tokens.tolist()}
    assert first_lines == {"import x", "def f(a):", "    if a:", "        return  a +", "class É:"}


@pytest.mark.slow
def test_the_trained_model_loads(
    script: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = ["bisect.py", "heapq.py", "textwrap.py"]
    monkeypatch.setattr(script, "HELD_OUT", ("bisect.py",))
    monkeypatch.setattr(script, "source_files", lambda root: [root / name for name in modules])
    monkeypatch.setattr(script, "VOCABULARY", 300)
    monkeypatch.setattr(script, "PROMPTS", ("def f(",))
    out = tmp_path / "model"
    arguments = ["--out", str(out), "--device", "cpu", "--steps", "20", "--batch", "1"]
    monkeypatch.setattr(sys, "argv", ["train_embedded_model.py", *arguments])
    script.main()

    model, tokenizer = demo.load(out)
    assert len(tokenizer) == model.config.vocab_size == 300
    record = json.loads((out / "training.json").read_text())
    assert record["modules"] == 2
    assert record["curve"]["step"] == [10, 20]
    assert record["held_out_loss"] < 5 < math.log(300)
    assert record["held_out_loss_as_stored"] == pytest.approx(record["held_out_loss"], abs=0.02)
    assert "def f(" in capsys.readouterr().out
