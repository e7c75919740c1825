"""A damaged state of a run is refused with an error that names the file; it never becomes another run."""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligerzoo.errors import LigerzooError
from ligerzoo.train.recipes import sft
from ligerzoo.train.run_checkpoint import newest_checkpoint
from tests.train.tiny_run import options

Damage = Callable[[Path], object]


@pytest.fixture(scope="module", params=[{"ema": 0.5}])
def run(
    request: pytest.FixtureRequest, checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A run of 3 steps with checkpoints of steps 2 and 3, and options that continue it to step 4."""
    changes = {"schedule": "constant", "warmup": 0.0, "keep": 9, "save_every": 2, **request.param}
    given = options(checkpoint, data, tmp_path_factory.mktemp("run") / "run", max_steps=3, **changes)
    assert sft.main(sft.SFTRunOptions(**given)) == 0
    assert sft.main(sft.SFTRunOptions(**{**given, "max_steps": 4, "output": f"{given['output']}-whole"})) == 0
    return {**given, "max_steps": 4, "resume": True}


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all entries of nested containers; of equal ones, such as parameters, the first two."""
    keys = list(state) if isinstance(state, Mapping) else range(len(state)) if isinstance(state, list) else ()
    for key in [*keys][:2] if isinstance(state, list) or all(isinstance(key, int) for key in keys) else keys:
        if state[key] is not None:
            yield (*path, key)
        yield from leaves(state[key], (*path, key))


def altered(value: Any) -> Any:
    """Returns another value of the same type."""
    if isinstance(value, torch.Tensor):
        return value.roll(1) if value.numel() > 1 and not torch.equal(value, value.roll(1)) else value + 1
    match value:
        case bool() | None:
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case dict():
            return {**value, "x": 1}
        case _:
            return [*value, 0]


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "dropped": lambda parent, key: parent.pop(key),
    "altered": lambda parent, key: parent.__setitem__(key, altered(parent[key])),
    "null": lambda parent, key: parent.__setitem__(key, None),
}


def changed(state: Any, path: tuple[Any, ...], change: str) -> Any:
    parent = state
    for key in path[:-1]:
        parent = parent[key]
    CHANGES[change](parent, path[-1])
    return state


def is_refused(run: dict[str, Any], output: Path, damage: Damage) -> str:
    """Returns the error of a run that continues after damage; the empty text if it continues bit for bit."""
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(run["output"], output)
    checkpoint = newest_checkpoint(output)
    assert checkpoint is not None
    damage(checkpoint)
    found: LigerzooError | None = None
    try:
        assert sft.main(sft.SFTRunOptions(**{**run, "output": str(output)})) == 0
    except LigerzooError as error:
        found = error
    if found is None:
        assert weights(output) == weights(Path(f"{run['output']}-whole"))
        return ""
    assert found.remedy is not None, found
    return str(found)


def weights(output: Path) -> bytes:
    return next(output.glob("*model.safetensors")).read_bytes()


def test_every_field_of_state_json(run: dict[str, Any], tmp_path: Path) -> None:
    text = (Path(run["output"]) / "checkpoint-3" / "state.json").read_text()
    for index, path in enumerate(leaves(json.loads(text))):
        changes = [*CHANGES] if len(path) == 1 else [[*CHANGES][index % 3]]
        for change in changes:

            def damage(checkpoint: Path, path: tuple[Any, ...] = path, change: str = change) -> None:
                (checkpoint / "state.json").write_text(json.dumps(changed(json.loads(text), path, change)))

            message = is_refused(run, tmp_path / "run", damage)
            assert "checkpoint-3/state.json: " in message, (path, change, message)
            assert f"Remove {tmp_path}/run/checkpoint-3 to resume an earlier checkpoint" in message


def test_every_field_of_state_pt(run: dict[str, Any], tmp_path: Path) -> None:
    """The position in the data and the fingerprints; of a quantized optimizer also its state."""
    file = Path(run["output"]) / "checkpoint-3" / "state.pt"
    found = [*leaves(torch.load(file, weights_only=True))]
    assert len(found) > 25
    for index, path in enumerate(found):
        change = [*CHANGES][index % 3]

        def damage(checkpoint: Path, path: tuple[Any, ...] = path, change: str = change) -> None:
            state = torch.load(checkpoint / "state.pt", weights_only=True)
            torch.save(changed(state, path, change), checkpoint / "state.pt")

        message = is_refused(run, tmp_path / "run", damage)
        assert "checkpoint-3/state.pt: differs from what was saved" in message, (path, change, message)
    content, source = bytearray(file.read_bytes()), random.Random(0)
    for _ in range(10):
        damaged = content.copy()
        damaged[source.randrange(len(content))] ^= 1 << source.randrange(8)
        # The message may be empty: not all bytes of a zip file matter.
        is_refused(run, tmp_path / "run", lambda checkpoint, new=damaged: (checkpoint / "state.pt").write_bytes(new))  # type: ignore[misc]
    message = is_refused(run, tmp_path / "run", lambda checkpoint: torch.save([1], checkpoint / "state.pt"))
    assert "state.pt: differs from what was saved" in message


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


@pytest.mark.parametrize("run", [{"ema": 0.5}, {"lora_rank": 2}], ids=["ema", "lora"], indirect=True)
def test_every_file(run: dict[str, Any], tmp_path: Path) -> None:
    """Missing, empty, cut, and that of another checkpoint."""
    source = Path(run["output"]) / "checkpoint-3"
    for name in files_of(source):

        def cut(checkpoint: Path, name: str = name) -> None:
            (checkpoint / name).write_bytes((source / name).read_bytes()[:-9])

        def exchange(checkpoint: Path, name: str = name) -> None:
            shutil.copyfile(source.with_name("checkpoint-2") / name, checkpoint / name)

        damages: dict[str, Damage] = {
            "missing": lambda checkpoint, name=name: (checkpoint / name).unlink(),  # type: ignore[misc]
            "empty": lambda checkpoint, name=name: (checkpoint / name).write_bytes(b""),  # type: ignore[misc]
            "cut": cut, "exchanged": exchange,
        }  # fmt: skip
        for kind, damage in damages.items():
            message = is_refused(run, tmp_path / "run", damage)
            is_same = (source.with_name("checkpoint-2") / name).read_bytes() == (source / name).read_bytes()
            if name == "adapter_model.safetensors" or is_same:  # resuming reads the tensors in trained/
                assert message or kind == "exchanged", (name, kind)
            else:
                assert f"{tmp_path}/run/checkpoint-3" in message, (name, kind, message)


@pytest.mark.parametrize("run", [{"ema": 0.5}, {"lora_rank": 2}], ids=["ema", "lora"], indirect=True)
def test_one_bit_of_a_tensor(run: dict[str, Any], tmp_path: Path) -> None:
    for name in files_of(Path(run["output"]) / "checkpoint-3"):
        if name.endswith(".safetensors") and (name != "adapter_model.safetensors"):  # trained/ holds the same tensors

            def flip(checkpoint: Path, name: str = name) -> None:
                tensors = load_file(checkpoint / name)
                max(tensors.values(), key=torch.Tensor.numel).view(torch.int32).view(-1)[5] ^= 1
                metadata = {"format": "pt"}
                save_file(tensors, checkpoint / name, metadata)

            assert "differs from what was saved" in is_refused(run, tmp_path / "run", flip), name


LOGS: dict[str, Callable[[list[str]], list[str]]] = {
    "broken JSON": lambda lines: [lines[0], "{", *lines[1:]],
    "not an object": lambda lines: [*lines[:2], "[1]", *lines[2:]],
    "no step": lambda lines: ['{"loss": 1}', *lines],
    "a step is a text": lambda lines: [lines[0].replace(" 1,", ' "1",', 1), *lines[1:]],
    "a step is missing": lambda lines: [lines[0], *lines[2:]],
    "the last step is missing": lambda lines: lines[:-1],
    "two runs": lambda lines: [*lines[:2], *lines],
}


@pytest.mark.parametrize("kind", LOGS)
def test_a_log_of_other_steps(run: dict[str, Any], tmp_path: Path, kind: str) -> None:
    def damage(checkpoint: Path) -> None:
        path = checkpoint.parent / "log.jsonl"
        path.write_text("".join(f"{line}\n" for line in LOGS[kind](path.read_text().splitlines())))

    message = is_refused(run, tmp_path / "run", damage)
    assert "log.jsonl" in message
    assert "is not the log of the run that continues" in message
    (tmp_path / "run" / "log.jsonl").unlink()  # the remedy
    assert sft.main(sft.SFTRunOptions(**{**run, "output": str(tmp_path / "run")})) == 0


def test_renamed_and_damaged_checkpoints(run: dict[str, Any], tmp_path: Path) -> None:
    def rename(checkpoint: Path) -> None:
        checkpoint.rename(checkpoint.with_name("checkpoint-4"))

    message = is_refused(run, tmp_path / "run", rename)
    assert "checkpoint-4/state.json: is the state of another step; got checkpoint-3; expected checkpoint-4" in message
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")  # the remedy: the run goes on from step 2
    assert sft.main(sft.SFTRunOptions(**{**run, "output": str(tmp_path / "run")})) == 0
    assert weights(tmp_path / "run") == weights(Path(f"{run['output']}-whole"))


@pytest.mark.parametrize("run", [{"lora_rank": 2}], ids=["lora"], indirect=True)
def test_another_base_model(run: dict[str, Any], tmp_path: Path) -> None:
    """The base of an adapter is loaded from MODEL, which may have changed."""
    base, kept = Path(run["model"]) / "model.safetensors", tmp_path / "base"
    shutil.copyfile(base, kept)

    def change(_: Path) -> None:
        tensors = load_file(base)
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, base, {"format": "pt"})

    try:
        message = is_refused(run, tmp_path / "run", change)
    finally:
        shutil.copyfile(kept, base)
    assert "weights of MODEL" in message
