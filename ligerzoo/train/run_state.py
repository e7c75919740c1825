"""The output directory of a run: checkpoints from which the run continues bit for bit, and the model at the end.

    OUTPUT/checkpoint-STEP/    the model and tokenizer in Hugging Face format, and two files more:
        state.json             step and options
        state.pt               optimizer, data position and random number generators: tensors and numbers, no code
    OUTPUT/                    the model and tokenizer when the run has ended

A checkpoint appears in one step, when all of its files are complete. A kill at any time leaves only whole ones.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.files.atomic import delete_directory, delete_leftovers, refuse_irreplaceable, replacing_directory
from ligerzoo.files.checkpoint import read_json
from ligerzoo.models import CausalLM
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train import processes

STATE_FILE, TENSORS_FILE = "state.json", "state.pt"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FILES_OF_A_RUN = ("config.json", "log.jsonl", "*.safetensors")


class Stateful(Protocol):
    """Something with a state of numbers, texts, tensors, and lists and dicts of these."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class RunState:
    """The checkpoints of one run.

    Args:
        output: directory of the run.
        options: dataclass of the run's options, stored in each checkpoint.
        resume: continue the run that `output` holds. Without checkpoints, the run starts from the beginning.
        may_change: names of options that may differ from those of the run that continues.
        keep: number of checkpoints to keep: the newest ones.

    Attributes:
        checkpoint: directory of the newest checkpoint, from which the run continues; None for a new run.
        step: number of steps done.

    Raises:
        CheckpointError: `output` holds a run and `resume` is False, or it cannot be replaced by the model at the end.
        ConfigError: Options other than `may_change` differ from those of the run.
    """

    def __init__(
        self, output: str | Path, options: Any, *, resume: bool, may_change: Collection[str] = (), keep: int = 2
    ) -> None:
        self.output, self.keep = Path(output), keep
        self.options = json.loads(json.dumps(dataclasses.asdict(options)))
        refuse_irreplaceable(self.output.resolve())
        if not resume:
            _refuse_earlier_run(self.output)
        self.checkpoint = newest_checkpoint(self.output)
        self.step = 0
        if self.checkpoint is not None:
            state = read_json(self.checkpoint / STATE_FILE)
            self._refuse_changes(state["options"], may_change)
            self.step = int(state["step"])

    def load(self, optimizer: Stateful, data: Stateful) -> None:
        """Restores the optimizer, the data position and the random number generators from the checkpoint, if any."""
        if self.checkpoint is None:
            return
        state = torch.load(self.checkpoint / TENSORS_FILE, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        own = state["processes"][processes.rank()]
        data.load_state_dict(own["data"])
        set_random_state(own["random"])

    def save(self, step: int, model: CausalLM, tokenizer: Tokenizer, optimizer: Stateful, data: Stateful) -> None:
        """Saves a checkpoint, and deletes the oldest ones.

        Raises:
            CheckpointError: It cannot be written, for example because the disk is full. Earlier ones are unchanged.
        """
        target = self.output / f"checkpoint-{step}"
        delete_leftovers(self.output)
        own = processes.gather({"data": data.state_dict(), "random": random_state()})
        try:
            with replacing_directory(target, keep=lambda _: False) as new:
                model.save_pretrained(new)
                tokenizer.save_pretrained(new)
                torch.save({"optimizer": optimizer.state_dict(), "processes": own}, new / TENSORS_FILE)
                state = {"step": step, "options": self.options}
                (new / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
            raise self._not_saved(target, error) from error
        self.checkpoint, self.step = target, step
        for old in checkpoints(self.output)[: -self.keep]:
            delete_directory(old)

    def finish(self, model: CausalLM, tokenizer: Tokenizer) -> None:
        """Saves the model and the tokenizer in the output directory itself.

        Raises:
            CheckpointError: They cannot be written. Checkpoints are unchanged.
        """
        try:
            model.save_pretrained(self.output)
            tokenizer.save_pretrained(self.output)
        except OSError as error:
            raise self._not_saved(self.output, error) from error

    def _not_saved(self, target: Path, error: Exception) -> CheckpointError:
        last = f"{self.checkpoint} is whole: continue from it with --resume." if self.checkpoint else ""
        return CheckpointError(
            "cannot be saved, so the run stops", where=target, got=" ".join(str(error).split()),
            remedy=f"Make room on the disk. {last}".strip(),
        )  # fmt: skip

    def _refuse_changes(self, stored: Mapping[str, Any], may_change: Collection[str]) -> None:
        changes = [
            f"{name}={self.options.get(name)!r} instead of {stored.get(name)!r}"
            for name in sorted({*stored, *self.options} - {*may_change})
            if self.options.get(name) != stored.get(name)
        ]
        if changes:
            raise ConfigError(
                "the options differ from those of the run", where=self.checkpoint, got=", ".join(changes),
                remedy="Continue with the same options, or choose another output directory. These may change: "
                f"{', '.join(sorted(may_change))}.",
            )  # fmt: skip


def checkpoints(output: Path) -> list[Path]:
    """Returns the checkpoints in a run's directory, oldest first."""
    found = [path for path in output.glob("checkpoint-*") if _CHECKPOINT.fullmatch(path.name)]
    return sorted((path for path in found if (path / STATE_FILE).exists()), key=_step)


def newest_checkpoint(output: Path) -> Path | None:
    """Returns the newest checkpoint in a run's directory, or None."""
    return next(reversed(checkpoints(output)), None)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def random_state() -> dict[str, Any]:
    """Returns the states of torch's random number generators."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets torch's random number generators to a state of `random_state`. GPUs that are missing now are left out."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available():
        for device, gpu_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(gpu_state, device)


def _refuse_earlier_run(output: Path) -> None:
    found = [name for pattern in (*_FILES_OF_A_RUN, "checkpoint-*") for name in output.glob(pattern)]
    if found:
        raise CheckpointError(
            "the output directory holds a run or a model", where=output, got=found[0].name,
            remedy="Continue the run with --resume, or choose another directory.",
        )  # fmt: skip
