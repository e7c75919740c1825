"""The output directory of a run: checkpoints from which the run continues bit for bit, and the model at the end.

    OUTPUT/checkpoint-STEP/    the model and tokenizer in Hugging Face format, and what resuming needs:
        state.json, state.pt   see `run_checkpoint`
        optimizer/             other optimizers
        averages/              averaged weights, with an EMA
        trained/               trained parameters of a run that trains adapters, by their names in the model
    OUTPUT/                    the model and tokenizer when the run has ended

The model of a run that trains adapters is an adapter in PEFT's format. Several processes save together. What they save
does not depend on their number: tensors are whole, the position in the data is that of all, and random numbers come
from the seed, the step and the micro-batch (`Run.seed`).
A checkpoint appears in one step, when all of its files are complete. A kill at any time leaves only whole ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from ligerzoo import adapters
from ligerzoo.dtensors import local
from ligerzoo.errors import RAISED, CheckpointError, ConfigError, Problems
from ligerzoo.files.atomic import delete_directory, refuse_irreplaceable
from ligerzoo.files.slots import delete_leftovers
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
from ligerzoo.train import processes
from ligerzoo.train.fingerprint import fingerprint, fingerprint_of_shards
from ligerzoo.train.options import options_of
from ligerzoo.train.output_lock import OutputLock
from ligerzoo.train.run_checkpoint import RunCheckpoint, checkpoints, newest_checkpoint, write_state
from ligerzoo.train.run_options import RunOptions
from ligerzoo.train.saving_thread import SavingThread
from ligerzoo.train.trained_state import AVERAGES, OPTIMIZER, TrainedState

LOG_FILE, TRAINED = "log.jsonl", "trained"
ROWS = {"accumulate", "batch_size"}
"""Options that may change if the rows of a step remain."""
_FILES_OF_A_RUN = ("config.json", LOG_FILE, "*.safetensors")


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
        problems: keeps the errors of a dry run.

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

    def __init__(
        self,
        output: str | Path,
        options: RunOptions,
        *,
        lock: OutputLock | None = None,
        problems: Problems = RAISED,
    ) -> None:
        self.output, self._keep, self._lock = Path(output), options.keep, lock
        self.options = json.loads(json.dumps(dataclasses.asdict(options)))
        self._listed = sorted(options_of(type(options)), key=lambda one: one.name)
        self._resumed: RunCheckpoint | None = None
        self.step, ranks = 0, processes.data_ranks()
        self._thread, self._copies = SavingThread(), HostCopies()
        self.rows, self.micro_batches = options.rows_of_step(ranks), None
        with problems, failing_together(f"opening {output}"):
            if not options.resume:
                _refuse_earlier_run(self.output)
        newest = newest_checkpoint(self.output) if options.resume else None
        self.checkpoint: Path | None = processes.gather(newest)[0]
        with problems, failing_together(f"opening {output}"):
            if self.checkpoint is not None:
                if not self.checkpoint.is_dir():
                    what, remedy = "is not on this host", "Choose an output directory on storage that all hosts share."
                    raise CheckpointError(what, where=self.checkpoint, got=socket.gethostname(), remedy=remedy)
                self._resumed = RunCheckpoint.open(self.checkpoint)
                state = self._resumed.state
                may_change = {one.name for one in self._listed if one.may_change}
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
        if self._resumed is None:
            trained.refuse_infinite_weights(self.output, "before the first step")
            return
        directory = self._resumed.path
        with failing_together(f"reading {directory}"):
            state = self._resumed.read_tensors()
        is_earlier = "processes" in state  # an earlier format, with the fingerprints of shards
        own = state["processes"][processes.rank()] if is_earlier else state
        if adapters.has_adapters(trained.model):
            load_tensors(trained.weights, directory / TRAINED)
        if "optimizer" in state:
            trained.optimizer.load_state_dict(state["optimizer"])
        else:
            load_optimizer(trained.model, trained.optimizer, directory / OPTIMIZER)
        if trained.ema is not None:
            averaged = trained.ema.state_dict()
            load_tensors(averaged["averages"], directory / AVERAGES)
            trained.ema.load_state_dict({**averaged, "updates": state["ema_updates"]})
        found = trained.fingerprints(fingerprint_of_shards if is_earlier else fingerprint)
        with failing_together(f"reading {directory}"):
            self._resumed.compare(own["fingerprints"], found)
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
                    state = {"step": step, "options": self.options, "processes": processes.world_size()}
                    write_state(new, {**state, "rows": self.rows}, saved.numbers)
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
            f"{one.written(self.options.get(one.name))} instead of {one.written(stored.get(one.name))}"
            for one in self._listed
            if one.name not in may_change and self.options.get(one.name) != stored.get(one.name)
        ]
        if changes:
            what = "the options differ from those of the run"
            flags = ", ".join(one.flag for one in self._listed if one.name in may_change)
            remedy = f"Continue with the same options, or choose another output directory. These may change: {flags}."
            raise ConfigError(what, where=self.checkpoint, got=", ".join(changes), remedy=remedy)


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
