"""A checkpoint of a run: its name, and its files state.json and state.pt, with the fingerprints of all files.

    state.json    step, options, rows of a step, and fingerprints of the files of the checkpoint
    state.pt      data position, fingerprints of the weights, and an optimizer that only one process can use: tensors
                  and numbers, no code

Reading compares all fingerprints, so a file that was damaged, edited or exchanged is an error, never another run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from ligerzoo.errors import CheckpointError
from ligerzoo.files.untrusted import read_json
from ligerzoo.train.fingerprint import fingerprint, fingerprint_of_shards

STATE_FILE, TENSORS_FILE = "state.json", "state.pt"
_NAME = re.compile(r"checkpoint-(\d+)")
_HASHED = 2**16
"""Bytes of a safetensors file whose hash is stored: of its header. Fingerprints protect the tensors."""


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint, after comparing its small files with their fingerprints.

    Attributes:
        path: its directory.
        state: the content of state.json but fingerprints.
    """

    path: Path
    state: Mapping[str, Any]
    _tensors_fingerprint: str

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads state.json, and checks the small files.

        Raises:
            CheckpointError: It is not what a save has written, or belongs to another step.
        """
        try:
            state = read_json(path / STATE_FILE)
        except CheckpointError as error:
            raise _damaged(path, STATE_FILE, error.what, got=error.got) from error
        fields = {"step": int, "options": dict, "processes": int, "fingerprints": dict}
        if missing := [name for name, kind in fields.items() if not isinstance(state.get(name), kind)]:
            got = f"no {' and no '.join(missing)}"
            raise _damaged(path, STATE_FILE, "is not the state of a run", got=got)
        own = state["fingerprints"].pop(STATE_FILE, None)
        _compare(path, {STATE_FILE: own}, {STATE_FILE: fingerprint(state)})
        fingerprints = state.pop("fingerprints")
        tensors_fingerprint = fingerprints.pop(TENSORS_FILE)
        if (name := f"checkpoint-{state['step']}") != path.name:
            raise _damaged(path, STATE_FILE, "is the state of another step", got=name, expected=path.name)
        _compare(path, fingerprints, hashes(path))
        return cls(path, state, tensors_fingerprint)

    def read_tensors(self) -> dict[str, Any]:
        """Reads state.pt.

        Raises:
            CheckpointError: It cannot be read, or is not what a save has written.
        """
        try:
            state: dict[str, Any] = torch.load(self.path / TENSORS_FILE, map_location="cpu", weights_only=True)
        except Exception as error:  # what damaged bytes raise depends on where they are
            got = " ".join(str(error).split())[:200]
            raise _damaged(self.path, TENSORS_FILE, "cannot be read", got=got) from error
        found = fingerprint(state)
        if found != self._tensors_fingerprint and "processes" in state:
            found = fingerprint_of_shards(state, as_on_gpu=True)
        self.compare({TENSORS_FILE: self._tensors_fingerprint}, {TENSORS_FILE: found})
        return state

    def compare(self, saved: Mapping[str, object], found: Mapping[str, str]) -> None:
        """Raises CheckpointError for the first fingerprint that was saved and is not found."""
        _compare(self.path, saved, found)


def write_state(directory: Path, state: Mapping[str, object], numbers: Mapping[str, object]) -> None:
    """Writes state.json and state.pt into a directory that has all other files of a checkpoint.

    Args:
        directory: the new checkpoint.
        state: the step, options and processes of the run, and the rows of a step.
        numbers: what state.pt holds.
    """
    torch.save(numbers, directory / TENSORS_FILE)
    fingerprints = {TENSORS_FILE: fingerprint(numbers), **hashes(directory)}
    content = {**state, "fingerprints": fingerprints}
    fingerprints[STATE_FILE] = fingerprint(content)
    (directory / STATE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def hashes(checkpoint: Path) -> dict[str, str]:
    """Returns the hashes of the files of a checkpoint but state.json and state.pt, by name."""
    found = {}
    for path in checkpoint.rglob("*"):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and name not in (STATE_FILE, TENSORS_FILE):
            with path.open("rb") as file:
                content = file.read(_HASHED if path.suffix == ".safetensors" else -1)
            digest = hashlib.blake2b(content, digest_size=16, key=str(path.stat().st_size).encode())
            found[name] = digest.hexdigest()
    return found


def checkpoints(output: Path) -> list[Path]:
    """Returns the checkpoints in a run's directory, oldest first."""
    found = [path for path in output.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(filter(Path.is_dir, found), key=_step)


def newest_checkpoint(output: Path) -> Path | None:
    """Returns the newest checkpoint in a run's directory, or None."""
    return next(reversed(checkpoints(output)), None)


def last_finite(output: Path) -> str:
    """Returns a sentence with the newest checkpoint, for errors of values that are not finite; nothing without one."""
    newest = newest_checkpoint(output)
    return "" if newest is None else f" The weights of {newest} are finite: start a new run from it."


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _compare(checkpoint: Path, saved: Mapping[str, object], found: Mapping[str, str]) -> None:
    for name, expected in saved.items():
        if found.get(name) != expected:
            what = "differs from what was saved" if name in found else "is missing"
            raise _damaged(checkpoint, name, what)


def _damaged(checkpoint: Path, name: str, what: str | None, **details: object) -> CheckpointError:
    """Returns the error of a file of a checkpoint that is not the one that was saved."""
    remedy = f"The file may be damaged. Remove {checkpoint} to resume an earlier checkpoint."
    return CheckpointError(what, where=checkpoint / name, remedy=remedy, **details)
