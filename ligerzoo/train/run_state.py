"""The output directory of a run: checkpoints from which the run continues bit for bit, and the model at the end.

    OUTPUT/checkpoint-STEP/    the model and tokenizer in Hugging Face format, and what resuming needs:
        state.json             step, options and number of processes
        state.pt               optimizer, data position and random number generators: tensors and numbers, no code
        optimizer/             the optimizer of a run of several processes
        averages/              averaged weights, with an EMA
        trained/               trained parameters of a run that trains adapters, by their names in the model
    OUTPUT/                    the model and tokenizer when the run has ended

The model of a run that trains adapters is an adapter in PEFT's format. Several processes save together.
A checkpoint appears in one step, when all of its files are complete. A kill at any time leaves only whole ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ligerzoo import adapters
from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.files.atomic import delete_directory, refuse_irreplaceable
from ligerzoo.files.slots import delete_leftovers
from ligerzoo.files.untrusted import read_json
from ligerzoo.models import CausalLM
from ligerzoo.parallel import (
    failing_together,
    load_optimizer,
    load_tensors,
    replacing_directory_together,
    save_optimizer,
    save_tensors,
)
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train import processes
from ligerzoo.train.optimizers import EMA
from ligerzoo.vision.processor import Processor

STATE_FILE, TENSORS_FILE = "state.json", "state.pt"
OPTIMIZER, AVERAGES, TRAINED = "optimizer", "averages", "trained"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FILES_OF_A_RUN = ("config.json", "log.jsonl", "*.safetensors")


def _read_tensors(path: Path) -> dict[str, Any]:
    """Reads what `torch.save` wrote.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            "cannot be read", where=path, got=" ".join(str(error).split())[:200],
            remedy=f"The file may be damaged. Remove {path.parent} to resume an earlier checkpoint.",
        ) from error  # fmt: skip
    return state


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
        CheckpointError: `output` holds a run and `resume` is False, or it cannot be created, or replaced at the end.
        ConfigError: Options other than `may_change`, or the number of processes, differ from those of the run; the
            run has more than `max_steps` steps; or `output` is the working directory or contains it.
    """

    def __init__(
        self, output: str | Path, options: Any, *, resume: bool, may_change: Collection[str] = (), keep: int = 2
    ) -> None:
        self.output, self.keep = Path(output), keep
        self.options = json.loads(json.dumps(dataclasses.asdict(options)))
        self.checkpoint: Path | None = None
        self.step = 0
        with failing_together(f"opening {output}"):
            _refuse_output(self.output)
            if not resume:
                _refuse_earlier_run(self.output)
            self.checkpoint = newest_checkpoint(self.output)
            if self.checkpoint is not None:
                state = read_json(self.checkpoint / STATE_FILE)
                if missing := [name for name in ("options", "step") if name not in state]:
                    raise CheckpointError(
                        "is not the state of a run", where=self.checkpoint / STATE_FILE,
                        got=f"no {' and no '.join(missing)}", remedy="Remove this directory to resume an earlier one.",
                    )  # fmt: skip
                self._refuse_changes(state["options"], may_change)
                self._refuse_other_processes(state.get("processes", 1))
                self.step = int(state["step"])
                self._refuse_fewer_steps()

    def load(
        self, optimizer: torch.optim.Optimizer, data: Stateful, *, model: CausalLM | None = None, ema: EMA | None = None
    ) -> None:  # fmt: skip
        """Restores the state of the run from the checkpoint, if any.

        Args:
            optimizer: of the model that was loaded from the checkpoint, or of a model with new adapters.
            data: gets the position in the data.
            model: the model; needed if it is sharded or has adapters, whose parameters are restored.
            ema: gets the averaged weights.
        """
        if self.checkpoint is None:
            return
        state = _read_tensors(self.checkpoint / TENSORS_FILE)
        if model is not None and adapters.has_adapters(model):
            load_tensors(_trained(model), self.checkpoint / TRAINED)
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
        else:
            assert model is not None
            load_optimizer(model, optimizer, self.checkpoint / OPTIMIZER)
        if ema is not None:
            averaged = ema.state_dict()
            load_tensors(averaged["averages"], self.checkpoint / AVERAGES)
            ema.load_state_dict({**averaged, "updates": state["ema_updates"]})
        own = state["processes"][processes.rank()]
        data.load_state_dict(own["data"])
        set_random_state(own["random"])

    def save(
        self, step: int, model: CausalLM, tokenizer: Tokenizer | Processor, optimizer: torch.optim.Optimizer,
        data: Stateful, ema: EMA | None = None,
    ) -> None:  # fmt: skip
        """Saves a checkpoint, and deletes the oldest ones. All processes must call it.

        Raises:
            CheckpointError: It cannot be written, for example because the disk is full. Earlier ones are unchanged.
        """
        target = self.output / f"checkpoint-{step}"
        own = processes.gather({"data": data.state_dict(), "random": random_state()})
        tensors: dict[str, Any] = {"processes": own}
        try:
            if processes.is_main():
                delete_leftovers(self.output)
            with replacing_directory_together(target) as new:
                self._save_model(model, new)
                if adapters.has_adapters(model):
                    save_tensors(_trained(model), new / TRAINED)
                if ema is not None:
                    averaged = ema.state_dict()
                    tensors["ema_updates"] = averaged["updates"]
                    save_tensors(averaged["averages"], new / AVERAGES)
                if processes.world_size() > 1:
                    save_optimizer(model, optimizer, new / OPTIMIZER)
                else:
                    tensors["optimizer"] = optimizer.state_dict()
                if processes.is_main():  # after all that the processes do together
                    tokenizer.save_pretrained(new)
                    torch.save(tensors, new / TENSORS_FILE)
                    state = {"step": step, "options": self.options, "processes": processes.world_size()}
                    (new / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
            raise self._not_saved(target, error) from error
        self.checkpoint, self.step = target, step
        if processes.is_main():
            for old in checkpoints(self.output)[: -self.keep]:
                delete_directory(old)

    def finish(self, model: CausalLM, tokenizer: Tokenizer | Processor) -> None:
        """Saves the model and the tokenizer in the output directory itself. All processes must call it.

        Raises:
            CheckpointError: They cannot be written. Checkpoints are unchanged.
        """
        try:
            self._save_model(model, self.output)
            with failing_together(f"saving {self.output}"):
                if processes.is_main():
                    tokenizer.save_pretrained(self.output)
        except OSError as error:
            raise self._not_saved(self.output, error) from error

    def _save_model(self, model: CausalLM, directory: Path) -> None:
        """Saves the model, or its adapter if it has one."""
        if not adapters.has_adapters(model):
            model.save_pretrained(directory)
            return
        with failing_together(f"saving {directory}"):
            adapters.save_adapter(model, directory, base_model=self.options.get("model"))

    def _not_saved(self, target: Path, error: Exception) -> CheckpointError:
        last = f"{self.checkpoint} is whole: continue from it with --resume." if self.checkpoint else ""
        return CheckpointError(
            "cannot be saved, so the run stops", where=target, got=" ".join(str(error).split()),
            remedy=f"Make room on the disk. {last}".strip(),
        )  # fmt: skip

    def _refuse_other_processes(self, count: int) -> None:
        if count != processes.world_size():
            raise ConfigError(
                "the run had another number of processes", where=self.checkpoint, got=processes.world_size(),
                expected=count, remedy=f"Resume it with {count}, or start a new run from this checkpoint as the model.",
            )  # fmt: skip

    def _refuse_fewer_steps(self) -> None:
        if (asked := self.options.get("max_steps")) is not None and asked < self.step:
            raise ConfigError(
                "the run has done more steps", where="option max_steps", got=asked, expected=f"{self.step} or more",
                remedy=f"To go back, remove the newer checkpoints from {self.output}.",
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


def _trained(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def _own_gpus() -> list[int]:
    """Returns the GPUs that this process uses: its own among several processes, else all."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.current_device()] if processes.world_size() > 1 else list(range(torch.cuda.device_count()))


def random_state() -> dict[str, Any]:
    """Returns the states of torch's random number generators, on the CPU and on the GPUs of this process."""
    return {"cpu": torch.get_rng_state(), "cuda": [torch.cuda.get_rng_state(gpu) for gpu in _own_gpus()]}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets torch's random number generators to a state of `random_state`. GPUs that are missing now are left out."""
    torch.set_rng_state(state["cpu"])
    for gpu, gpu_state in zip(_own_gpus(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(gpu_state, gpu)


def _refuse_output(output: Path) -> None:
    """Refuses a directory that could not be created or replaced at the end of the run."""
    path = output.resolve()
    if Path.cwd().is_relative_to(path):
        raise ConfigError(
            "is the working directory or contains it, and would be replaced", where="option output", got=output,
            expected="a new directory", remedy="Such as --output run.",
        )  # fmt: skip
    existing = next(one for one in (path, *path.parents) if one.exists())
    if not existing.is_dir():
        raise CheckpointError(f"{existing} is a file", where="option output", got=output, expected="a new directory")
    if existing != path and not os.access(existing, os.W_OK | os.X_OK):
        raise CheckpointError(f"{existing} is not writable", where="option output", got=output)
    refuse_irreplaceable(path)


def _refuse_earlier_run(output: Path) -> None:
    found = [path for pattern in (*_FILES_OF_A_RUN, "checkpoint-*") for path in output.glob(pattern)]
    found = [path for path in found if path.is_dir() or path.stat().st_size]  # the log of a run without a step is empty
    if found:
        raise CheckpointError(
            "the output directory holds a run or a model", where=output, got=found[0].name,
            remedy="Continue the run with --resume, or choose another directory.",
        )  # fmt: skip
