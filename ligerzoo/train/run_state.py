"""The output directory of a run: checkpoints from which the run continues bit for bit, and the model at the end.

    OUTPUT/checkpoint-STEP/    the model and tokenizer in Hugging Face format, and what resuming needs:
        state.json             step, options, rows of a step, and fingerprints of the files of the checkpoint
        state.pt               data position, fingerprints of the weights, and an optimizer that only one process can
                               use: tensors and numbers, no code
        optimizer/             other optimizers
        averages/              averaged weights, with an EMA
        trained/               trained parameters of a run that trains adapters, by their names in the model
    OUTPUT/                    the model and tokenizer when the run has ended

The model of a run that trains adapters is an adapter in PEFT's format. Several processes save together. What they save
does not depend on their number: tensors are whole, the position in the data is that of all, and random numbers come
from the seed, the step and the micro-batch (`Run.seed`).
A checkpoint appears in one step, when all of its files are complete. A kill at any time leaves only whole ones.
Resuming compares all fingerprints, so a file that was damaged, edited or exchanged is an error, never another run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from ligerzoo import adapters
from ligerzoo.dtensors import local
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError, first_names
from ligerzoo.files.atomic import delete_directory, refuse_irreplaceable
from ligerzoo.files.slots import delete_leftovers
from ligerzoo.files.untrusted import read_json
from ligerzoo.hub.saving import prepared
from ligerzoo.models import CausalLM
from ligerzoo.optimizer_table import LOW_BIT
from ligerzoo.parallel import (
    failing_together,
    load_optimizer,
    load_tensors,
    replacing_directory_together,
    save_tensors,
)
from ligerzoo.parallel.host_copies import HostCopies
from ligerzoo.parallel.states import StoredOptimizer, stored_optimizer
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train import processes
from ligerzoo.train.fingerprint import fingerprint, fingerprint_of_shards
from ligerzoo.train.optimizers import EMA
from ligerzoo.train.options import options_of
from ligerzoo.train.output_lock import OutputLock
from ligerzoo.train.run_options import RunOptions
from ligerzoo.train.saving_thread import SavingThread
from ligerzoo.vision.processor import Processor

LOG_FILE, STATE_FILE, TENSORS_FILE = "log.jsonl", "state.json", "state.pt"
OPTIMIZER, AVERAGES, TRAINED = "optimizer", "averages", "trained"
ROWS = {"accumulate", "batch_size"}
"""Options that may change if the rows of a step remain."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FILES_OF_A_RUN = ("config.json", LOG_FILE, "*.safetensors")
_HASHED = 2**16
"""Bytes of a safetensors file whose hash is stored: of its header. Fingerprints protect the tensors."""


class Stateful(Protocol):
    """Something with a state of numbers, texts, tensors, and lists and dicts of these."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainedState:
    """What a run trains, and what continuing needs.

    Attributes:
        model: the model.
        tokenizer: its tokenizer or processor.
        optimizer: its optimizer.
        data: the position in the data.
        ema: the averaged weights, if there are any.
    """

    model: CausalLM
    tokenizer: Tokenizer | Processor
    optimizer: torch.optim.Optimizer
    data: Stateful
    ema: EMA | None

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that train, by name."""
        return {name: weight.detach() for name, weight in self.model.named_parameters() if weight.requires_grad}

    def fingerprints(self, fingerprint: Callable[[object], str] = fingerprint) -> dict[str, str]:
        """Returns the fingerprints of the states that are not in state.pt. All processes must call it."""
        weights = self.weights
        frozen = {name: tensor for name, tensor in self.model.state_dict().items() if name not in weights}
        origin = "weights of MODEL" if adapters.has_adapters(self.model) else "weights that are not trained"
        found = {"weights that are trained": fingerprint(weights), origin: fingerprint(frozen)}
        found[OPTIMIZER] = fingerprint(self.optimizer.state_dict()["state"])
        if self.ema is not None:
            found[AVERAGES] = fingerprint(self.ema.state_dict()["averages"])
        return found

    def refuse_infinite_weights(self, output: Path, when: str) -> None:
        """Raises LigerzooError if a weight that trains is infinite or NaN, in all processes."""
        found = dict.fromkeys(chain.from_iterable(processes.gather(weights_that_are_not_finite(self.model))))
        if found:
            what, where = f"weights are infinite or NaN {when}, so the run stops", first_names(list(found), 3)
            remedy = f"Look at the data, or lower the learning rate.{last_finite(output)}"
            raise LigerzooError(what, where=where, remedy=remedy)


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds.

    Attributes:
        numbers: what is in state.pt.
        model: the state of the model; nothing for one with adapters.
        averages: averaged weights, if there are any.
        optimizer: the optimizer, if it is not in `numbers`.
    """

    numbers: dict[str, Any]
    model: Mapping[str, torch.Tensor]
    averages: Mapping[str, torch.Tensor]
    optimizer: StoredOptimizer | None

    def _parts(self) -> dict[str, Mapping[str, torch.Tensor]]:
        optimizer = {} if self.optimizer is None else {"whole": self.optimizer.whole, "own": self.optimizer.own}
        return {"model": self.model, AVERAGES: self.averages, **optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name."""
        return {f"{part}/{name}": tensor for part, these in self._parts().items() for name, tensor in these.items()}

    @property
    def can_be_copied(self) -> bool:
        """Whether `tensors` are all that is saved, and plain, or DTensors of plain ones."""
        is_plain = all(type(local(tensor)) in (torch.Tensor, torch.nn.Parameter) for tensor in self.tensors().values())
        is_all = bool(self.model) and self.optimizer is not None
        return is_all and is_plain and all(tensor.is_floating_point() for tensor in self.model.values())

    def replaced(self, tensors: Mapping[str, torch.Tensor]) -> _Saved:
        """Returns the same with other tensors, by the names of `tensors`."""
        parts = {part: {name: tensors[f"{part}/{name}"] for name in these} for part, these in self._parts().items()}
        assert self.optimizer is not None
        optimizer = replace(self.optimizer, whole=parts["whole"], own=parts["own"])
        return replace(self, model=parts["model"], averages=parts[AVERAGES], optimizer=optimizer)


class RunState:
    """The checkpoints of one run. A context manager, which waits for the thread that saves, or interrupts it.

    Args:
        options: the run's options, stored in each checkpoint. With `resume` the run that `output` holds continues;
            without checkpoints, it starts from the beginning.
        lock: the lock of `output`, in the main process; None in others, and in a dry run.

    Attributes:
        checkpoint: directory of the newest checkpoint, from which the run continues; None for a new run.
        step: number of steps done.
        rows: rows of a step in all processes; None if they depend on the completions.
        micro_batches: the gradient accumulation that gives a step these rows, in each process; None likewise.

    Raises:
        CheckpointError: `output` holds a run and `resume` is False, or the state of its newest checkpoint is damaged.
        ConfigError: Options other than those that may change differ from those of the run; the rows of a step do not
            divide among the processes; or the run has more than `max_steps` steps.
    """

    def __init__(self, output: str | Path, options: RunOptions, *, lock: OutputLock | None = None) -> None:
        self.output, self._keep, self._lock = Path(output), options.keep, lock
        self.options = json.loads(json.dumps(dataclasses.asdict(options)))
        self.checkpoint: Path | None = None
        self.step, ranks = 0, processes.data_ranks()
        self._thread, self._copies = SavingThread(), HostCopies()
        self.rows = options.rows_of_step(ranks)
        with failing_together(f"opening {output}"):
            if not options.resume:
                _refuse_earlier_run(self.output)
        self.checkpoint = processes.gather(newest_checkpoint(self.output))[0]
        with failing_together(f"opening {output}"):
            if self.checkpoint is not None:
                if not self.checkpoint.is_dir():
                    what, remedy = "is not on this host", "Choose an output directory on storage that all hosts share."
                    raise CheckpointError(what, where=self.checkpoint, got=socket.gethostname(), remedy=remedy)
                state = self._read_state(self.checkpoint)
                may_change = {one.name for one in options_of(type(options)) if one.may_change}
                if "rows" not in state:
                    self._refuse_other_processes(state["processes"])
                elif self.rows == state["rows"]:
                    may_change |= ROWS
                elif self.options.get("accumulate") == state["options"].get("accumulate"):
                    self.rows, may_change = state["rows"], may_change | {"batch_size"}
                self._refuse_changes(state["options"], may_change)
                self.step = state["step"]
                self._refuse_fewer_steps()
            self.micro_batches = None if self.rows is None else options.micro_batches(self.rows, ranks)

    def load(self, trained: TrainedState) -> None:
        """Restores the state of the run from the checkpoint, if any. All processes must call it.

        Args:
            trained: the model, as loaded from the checkpoint, or with new adapters, whose parameters are restored; and
                what else is restored.

        Raises:
            CheckpointError: A file of the checkpoint is missing, damaged, or not the one that was saved.
            LigerzooError: A weight that trains is infinite or NaN.
        """
        if self.checkpoint is None:
            trained.refuse_infinite_weights(self.output, "before the first step")
            return
        with failing_together(f"reading {self.checkpoint}"):
            state = self._read_tensors(self.checkpoint)
        is_earlier = "processes" in state  # an earlier format, with the fingerprints of shards
        own = state["processes"][processes.rank()] if is_earlier else state
        if adapters.has_adapters(trained.model):
            load_tensors(trained.weights, self.checkpoint / TRAINED)
        if "optimizer" in state:
            trained.optimizer.load_state_dict(state["optimizer"])
        else:
            load_optimizer(trained.model, trained.optimizer, self.checkpoint / OPTIMIZER)
        if trained.ema is not None:
            averaged = trained.ema.state_dict()
            load_tensors(averaged["averages"], self.checkpoint / AVERAGES)
            trained.ema.load_state_dict({**averaged, "updates": state["ema_updates"]})
        found = trained.fingerprints(fingerprint_of_shards if is_earlier else fingerprint)
        with failing_together(f"reading {self.checkpoint}"):
            _compare(own["fingerprints"], found, self.checkpoint)
        trained.data.load_state_dict(own["data"])

    def save(self, step: int, trained: TrainedState) -> None:
        """Saves a checkpoint, and deletes the oldest ones. All processes must call it.

        A thread writes copies of the states, in the memory of the host, while the training goes on. Without room for
        them, or with adapters, whose states are small, it returns when all is written.

        Raises:
            CheckpointError: It, or the checkpoint before, cannot be written, for example because the disk is full.
                Earlier ones are unchanged.
            LigerzooError: A weight that trains is infinite or NaN. Nothing is written.
        """
        self.wait()
        trained.refuse_infinite_weights(self.output, f"after step {step}")
        saved = self._saved(trained)
        tensors = saved.tensors()
        can_copy = saved.can_be_copied and self._copies.fits(tensors.values(), processes.world_size_of_host())
        if all(processes.gather(can_copy)):
            saved = saved.replaced(self._copies(tensors))
            write_model = prepared(trained.model, self.output, state_dict=saved.model)
            self._thread.start(partial(self._write, step, trained, saved, write_model))
        else:
            self._write(step, trained, saved, partial(self._save_model, trained.model))

    def wait(self) -> None:
        """Waits until the last checkpoint is written, and raises its error. All processes must call it."""
        self._thread.wait()

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is written, or has failed."""
        self._thread.close()

    @property
    def has_failed(self) -> bool:
        """Whether the last checkpoint could not be written, in this process; see `wait`."""
        return self._thread.has_failed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._thread.close(interrupt=kind is not None and not issubclass(kind, Exception))

    def _saved(self, trained: TrainedState) -> _Saved:
        """Returns what a checkpoint holds of the states now."""
        numbers = {"data": trained.data.state_dict(), "fingerprints": trained.fingerprints()}
        model = {} if adapters.has_adapters(trained.model) else trained.model.state_dict()
        averages, optimizer = {}, None
        if trained.ema is not None:
            averaged = trained.ema.state_dict()
            numbers["ema_updates"], averages = averaged["updates"], averaged["averages"]
        if self.options["optimizer"] in LOW_BIT:
            numbers["optimizer"] = trained.optimizer.state_dict()
            del numbers["fingerprints"][OPTIMIZER]
        else:
            optimizer = stored_optimizer(trained.model, trained.optimizer)
        return _Saved(numbers, model, averages, optimizer)

    def _write(self, step: int, trained: TrainedState, saved: _Saved, write_model: Callable[[Path], object]) -> None:
        """Writes a checkpoint, also in a thread while the training goes on: then it does not read the model."""
        target = self.output / f"checkpoint-{step}"
        with self._saving(target):
            if processes.is_main():
                delete_leftovers(self.output)
            with replacing_directory_together(target) as new:
                write_model(new)
                if not saved.model:
                    save_tensors(trained.weights, new / TRAINED)
                if saved.averages:
                    save_tensors(saved.averages, new / AVERAGES)
                if saved.optimizer is not None:
                    saved.optimizer.write(new / OPTIMIZER)
                if processes.is_main():  # after all that the processes do together
                    trained.tokenizer.save_pretrained(new)
                    torch.save(saved.numbers, new / TENSORS_FILE)
                    fingerprints = {TENSORS_FILE: fingerprint(saved.numbers), **_hashes(new)}
                    state = {"step": step, "options": self.options, "processes": processes.world_size()}
                    state |= {"rows": self.rows, "fingerprints": fingerprints}
                    fingerprints[STATE_FILE] = fingerprint(state)
                    (new / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        self.checkpoint, self.step = target, step
        if processes.is_main():
            for old in checkpoints(self.output)[: -self._keep]:
                delete_directory(old)

    def finish(self, trained: TrainedState, files: Collection[str]) -> None:
        """Saves the model and the tokenizer in the output directory itself, and says so. All processes must call it.

        Args:
            trained: the model and its tokenizer or processor.
            files: names of the other files that the run may have written, for the user.

        Raises:
            CheckpointError: They cannot be written, or the directory was deleted. Checkpoints are unchanged.
            LigerzooError: A weight that trains is infinite or NaN. Nothing is written.
        """
        self.wait()
        trained.refuse_infinite_weights(self.output, "at the end")
        with self._saving(self.output):
            self._save_model(trained.model, self.output)
            with failing_together(f"saving {self.output}"):
                if processes.is_main():
                    trained.tokenizer.save_pretrained(self.output)
                    self._check_directory()
        kind = "adapter" if adapters.has_adapters(trained.model) else "model"
        *names, last = [f"the {kind}", *(name for name in files if (self.output / name).exists())]
        processes.say(f"{self.output} holds {', '.join(names)} and {last}")

    @contextmanager
    def _saving(self, target: Path) -> Iterator[None]:
        """Checks the directory first; an error of writing says which checkpoint is whole."""
        try:
            with failing_together(f"saving {target}"):
                self._check_directory()
            yield
        except CheckpointError:
            self._check_directory()  # which explains the error, if it was deleted meanwhile
            raise
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
            self._check_directory()
            last = newest_checkpoint(self.output)
            whole = f" {last} is whole: continue from it with --resume." if last else ""
            what, got = "cannot be saved, so the run stops", " ".join(str(error).split())
            raise CheckpointError(what, where=target, got=got, remedy=f"Make room on the disk.{whole}") from error

    def _check_directory(self) -> None:
        """Raises CheckpointError if the directory or the log in it was deleted or replaced during the run."""
        if self._lock is not None:
            self._lock.check()
            if not (self.output / LOG_FILE).exists():
                raise CheckpointError("was deleted during the run", where=self.output / LOG_FILE)

    def _save_model(self, model: CausalLM, directory: Path) -> None:
        """Saves the model, or its adapter if it has one."""
        if not adapters.has_adapters(model):
            model.save_pretrained(directory)
            return
        with failing_together(f"saving {directory}"):
            adapters.save_adapter(model, directory, base_model=self.options.get("model"))

    def _read_state(self, checkpoint: Path) -> dict[str, Any]:
        """Reads state.json, and checks the small files of a checkpoint.

        Raises:
            CheckpointError: It is not what a save has written, or belongs to another step.
        """
        try:
            state = read_json(checkpoint / STATE_FILE)
        except CheckpointError as error:
            raise _damaged(checkpoint, STATE_FILE, error.what, got=error.got) from error
        fields = {"step": int, "options": dict, "processes": int, "fingerprints": dict}
        if missing := [name for name, kind in fields.items() if not isinstance(state.get(name), kind)]:
            got = f"no {' and no '.join(missing)}"
            raise _damaged(checkpoint, STATE_FILE, "is not the state of a run", got=got)
        own = state["fingerprints"].pop(STATE_FILE, None)
        _compare({STATE_FILE: own}, {STATE_FILE: fingerprint(state)}, checkpoint)
        self._tensors_fingerprint = state["fingerprints"].pop(TENSORS_FILE)
        if (name := f"checkpoint-{state['step']}") != checkpoint.name:
            raise _damaged(checkpoint, STATE_FILE, "is the state of another step", got=name, expected=checkpoint.name)
        _compare(state["fingerprints"], _hashes(checkpoint), checkpoint)
        return state

    def _read_tensors(self, checkpoint: Path) -> dict[str, Any]:
        """Reads state.pt.

        Raises:
            CheckpointError: It cannot be read, or is not what a save has written.
        """
        try:
            state = torch.load(checkpoint / TENSORS_FILE, map_location="cpu", weights_only=True)
        except Exception as error:  # what damaged bytes raise depends on where they are
            got = " ".join(str(error).split())[:200]
            raise _damaged(checkpoint, TENSORS_FILE, "cannot be read", got=got) from error
        found = fingerprint(state)
        if found != self._tensors_fingerprint and "processes" in state:
            found = fingerprint_of_shards(state, as_on_gpu=True)
        _compare({TENSORS_FILE: self._tensors_fingerprint}, {TENSORS_FILE: found}, checkpoint)
        return state  # type: ignore[no-any-return]

    def _refuse_other_processes(self, count: int) -> None:
        if count != processes.world_size():
            what = "a checkpoint of an earlier version, from a run of another number of processes"
            remedy = f"Resume it with {count} until it saves again, or start a new run from it as the model."
            raise ConfigError(what, where=self.checkpoint, got=processes.world_size(), expected=count, remedy=remedy)

    def _refuse_fewer_steps(self) -> None:
        if (asked := self.options.get("max_steps")) is not None and asked < self.step:
            what = "the run has done more steps"
            remedy = f"To go back, remove the newer checkpoints from {self.output}."
            raise ConfigError(what, where="option max_steps", got=asked, expected=f"{self.step} or more", remedy=remedy)

    def _refuse_changes(self, stored: Mapping[str, Any], may_change: Collection[str]) -> None:
        changes = [
            f"{name}={self.options.get(name)!r} instead of {stored.get(name)!r}"
            for name in sorted({*stored, *self.options} - {*may_change})
            if self.options.get(name) != stored.get(name)
        ]
        if changes:
            what = "the options differ from those of the run"
            remedy = (
                "Continue with the same options, or choose another output directory. These may change: "
                f"{', '.join(sorted(may_change))}."
            )
            raise ConfigError(what, where=self.checkpoint, got=", ".join(changes), remedy=remedy)


def weights_that_are_not_finite(model: CausalLM) -> list[str]:
    """Returns the names of weights that train and, in this process, have a value that is infinite or NaN.

    Waits for the GPU.
    """
    own = {name: local(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    largest = [
        (name, torch.linalg.vector_norm(weight.detach(), torch.inf).double())
        for name, weight in own.items()
        if weight.numel()
    ]
    if not largest:
        return []
    are_finite = torch.stack([value for _, value in largest]).isfinite().tolist()
    return [name for (name, _), is_finite in zip(largest, are_finite, strict=True) if not is_finite]


def checkpoints(output: Path) -> list[Path]:
    """Returns the checkpoints in a run's directory, oldest first."""
    found = [path for path in output.glob("checkpoint-*") if _CHECKPOINT.fullmatch(path.name)]
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


def _damaged(checkpoint: Path, name: str, what: str | None, **details: object) -> CheckpointError:
    """Returns the error of a file of a checkpoint that is not the one that was saved."""
    remedy = f"The file may be damaged. Remove {checkpoint} to resume an earlier checkpoint."
    return CheckpointError(what, where=checkpoint / name, remedy=remedy, **details)


def _hashes(checkpoint: Path) -> dict[str, str]:
    """Returns the hashes of the files of a checkpoint but state.json and state.pt, by name."""
    hashes = {}
    for path in checkpoint.rglob("*"):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and name not in (STATE_FILE, TENSORS_FILE):
            with path.open("rb") as file:
                content = file.read(_HASHED if path.suffix == ".safetensors" else -1)
            digest = hashlib.blake2b(content, digest_size=16, key=str(path.stat().st_size).encode())
            hashes[name] = digest.hexdigest()
    return hashes


def _compare(saved: Mapping[str, Any], found: Mapping[str, str], checkpoint: Path) -> None:
    """Raises CheckpointError for the first fingerprint that was saved and is not found."""
    for name, expected in saved.items():
        if found.get(name) != expected:
            what = "differs from what was saved" if name in found else "is missing"
            raise _damaged(checkpoint, name, what)


def refuse_output(output: Path) -> None:
    """Refuses a directory that could not be created or replaced at the end of the run."""
    path = output.resolve()
    if Path.cwd().is_relative_to(path):
        what, remedy = "is the working directory or contains it, and would be replaced", "Such as --output run."
        raise ConfigError(what, where="option output", got=output, expected="a new directory", remedy=remedy)
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
        what = "the output directory holds a run or a model"
        remedy = "Continue the run with --resume, or choose another directory."
        raise CheckpointError(what, where=output, got=found[0].name, remedy=remedy)
