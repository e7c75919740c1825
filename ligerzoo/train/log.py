"""What a run shows: a live line, and one JSON object for each step in OUTPUT/log.jsonl.

Values on a GPU are read one step later, so logging does not make the host wait for the step that it has just launched.

A line of log.jsonl is a step, or an evaluation after it:

    {"step": 10, "loss": 2.31, "lr": 1e-05, "grad_norm": 0.8, "tokens": 8000, "trained_tokens": 5000, "padding": 0.02,
     "seconds": 0.12, "tokens_per_second": 66000.0, "mfu": 0.41, "memory_gib": 40.2}
    {"step": 10, "eval_loss": 2.4, "eval_tokens": 100000, "samples": [{"prompt": "...", "continuation": "..."}]}

`loss` is the mean over the trained tokens of the step, in nats. `padding` is a share of all positions. `mfu` is null if
the peak of the device is not known. `seconds` leaves out saving and evaluation. All numbers but `memory_gib` are
those of all processes. `skipped` is there if the update was skipped because gradients were not finite; `loss` and
`grad_norm` are then null if they are not finite. `images` is there if the step has any. `dropped` is the number
of records read so far that have no sample, such as those that are too long, if there are any.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from tqdm import tqdm

from ligerzoo.device import DelayedReads
from ligerzoo.errors import CheckpointError
from ligerzoo.files.untrusted import is_at
from ligerzoo.models import CausalLM
from ligerzoo.parallel import failing_together
from ligerzoo.train import processes
from ligerzoo.train.non_finite import NonFiniteSteps
from ligerzoo.train.run_state import LOG_FILE
from ligerzoo.train.throughput import StepFlops, peak_flops, peak_memory_gib

ZERO_GRADIENTS = 5
"""Number of steps in a row with gradients of exactly 0 after which a run warns."""

SECONDS_BETWEEN_LINES = 10
"""Without a terminal, the time between two printed lines."""

COLUMNS = 100
"""The most characters of the live line."""

STOPPED = 130
"""Exit code of a run that Ctrl-C or SIGTERM has stopped, as a shell reports SIGINT."""


class CountedBatch(Protocol):
    """What the log reads of a batch."""

    @property
    def inputs(self) -> Mapping[str, Tensor]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def trained_tokens(self) -> int: ...
    @property
    def padding(self) -> int: ...
    @property
    def sources(self) -> Sequence[object]: ...


class DeviceTime:
    """The time at which a device has done all work that was launched before."""

    def __init__(self, device: torch.device) -> None:
        self._event, self._time = None, time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: DeviceTime) -> float:
        """Returns the seconds from an earlier time; the device must have reached both."""
        if self._event is not None and earlier._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1000
        return self._time - earlier._time


def first_sources(batches: Iterable[CountedBatch], limit: int = 4) -> str:
    """Returns the files and lines of the first samples of batches, for a message."""
    different = list(dict.fromkeys(str(source) for batch in batches for source in batch.sources))
    more = f" and {len(different) - limit} more" if len(different) > limit else ""
    return ", ".join(different[:limit]) + more


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """In this context, an error of the file system becomes a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        remedy = "Make room on the disk, and continue from the last checkpoint with --resume."
        raise CheckpointError("cannot be written, so the run stops", where=path, got=error, remedy=remedy) from error


Entry = Mapping[str, Any]
"""A line of the log."""


class _LaunchedStep(NamedTuple):
    """A step whose numbers are not read yet: its entry, their names, its FLOPs and batches, and when it ends."""

    entry: dict[str, Any]
    names: list[str]
    flops: float
    batches: Sequence[CountedBatch]
    end: DeviceTime


class RunLog:
    """The log of a run. Only the main process prints and writes.

    Args:
        output: directory of the run, created if it does not exist. A log of the same run is continued.
        model: the model, to count FLOPs.
        first_step: number of steps done before. Later steps in an existing log, which the run repeats, are deleted.
            The log must be that of these steps.
        steps: number of steps at the end of the run.
        report: called with each object that is written, for example to send it to TensorBoard.
        shown: metrics of a step that the live line begins with.
        may_be_zero: whether a loss of exactly 0 is normal, as in policy gradients.
        finish_saving: waits for a checkpoint that is being written.

    Raises:
        CheckpointError: An existing log is damaged, or not that of the steps done before.
    """

    def __init__(
        self,
        output: Path,
        model: CausalLM,
        *,
        first_step: int,
        steps: int,
        report: Callable[[Entry], object] | None = None,
        shown: Sequence[str] = (),
        may_be_zero: bool = False,
        finish_saving: Callable[[], object] = lambda: None,
    ) -> None:
        self.path = output / LOG_FILE
        self._device, self._flops, self._peak = model.device, StepFlops(model), peak_flops(model.device)
        self._steps, self._report = steps, report
        self._reads: DelayedReads[_LaunchedStep] = DelayedReads(model.device, 1)
        self._shown, self._may_be_zero, self._warns_of_zero = shown, may_be_zero, not may_be_zero
        self._without_signal = self._zero_gradients = 0
        self._printed, self._dropped = 0.0, 0
        self._non_finite = NonFiniteSteps(output, first_step, steps, finish_saving)
        self._file = None
        with failing_together(f"opening {self.path}"):
            if processes.is_main():
                output.mkdir(parents=True, exist_ok=True)
                cut_log(self.path, first_step, has_all_steps=True)
                self._file = self.path.open("a", encoding="utf-8")
        is_silent = None if processes.is_main() else True  # None: shown on a terminal only
        count = f"{steps}/{steps} [00:00:00<00:00:00], "
        self._width = len(count)
        self._progress = tqdm(
            total=steps,
            initial=first_step,
            disable=is_silent,
            dynamic_ncols=True,
            bar_format="{n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
        )
        self._last = DeviceTime(model.device)

    def step(
        self,
        step: int,
        *,
        values: Mapping[str, Tensor | None],
        lr: float,
        batches: Sequence[CountedBatch],
        dropped: int = 0,
    ) -> None:
        """Logs a step that has been launched, and writes the one before it. All processes must call it.

        Args:
            step: number of the step, from 1.
            values: 0-d numbers of the step by name; None for one that is not known. "loss" is the mean over the trained
                tokens of all batches, which is averaged over the processes; "grad_norm" is that before clipping;
                "skipped" is the number of updates that have been skipped so far because of gradients that are not
                finite, see `SkipNonFinite`. Without it such gradients are an error.
            lr: learning rate.
            batches: batches of the step, of this process.
            dropped: number of records so far that have no sample, in all processes.

        Raises:
            LigerzooError: The loss or the norm of the step before was not a finite number, and its update was not
                skipped, or too many were.
        """
        copied = {name: value for name, value in values.items() if value is not None}
        copied["loss"] = processes.mean(copied["loss"])
        self._write_steps()
        flops = sum(self._flops(batch.inputs["position_ids"], batch.tokens) for batch in batches)
        counts = (sum(getattr(batch, name) for batch in batches) for name in ("tokens", "trained_tokens", "padding"))
        images = sum(getattr(batch, "images", 0) for batch in batches)
        tokens, trained, padding, flops, images = processes.total_of_data(*counts, int(flops), images)
        entry = {"step": step, "loss": None, "lr": lr, **dict.fromkeys(copied), "tokens": tokens}
        entry |= {"trained_tokens": trained, "padding": padding / max(1, tokens + padding)}
        entry |= {name: count for name, count in (("images", images), ("dropped", dropped)) if count}
        self._dropped = dropped
        stacked = torch.stack([value.detach().double() for value in copied.values()])
        self._reads.push(_LaunchedStep(entry, list(copied), flops, batches, DeviceTime(self._device)), stacked)

    def evaluation(self, step: int, **values: Any) -> None:
        """Logs an evaluation after a step. The first value is printed; its name begins with `eval_`."""
        self._write({"step": step, **values})
        name, value = next(iter(values.items()))
        self.say(f"step {step}: {name.removeprefix('eval_')} on the evaluation data {value:.4f}")
        for sample in values.get("samples", ()):
            self.say(f"  {sample['prompt']!r} -> {sample['continuation']!r}")

    def is_skipped(self) -> bool:
        """Returns whether the update of the last step was skipped, after waiting for the step."""
        self._write_steps()
        return self._non_finite.in_a_row > 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Writes all steps, then leaves the time in the block out of the throughput: for evaluation and saving."""
        self._write_steps()
        if self._file is not None:
            with writing(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
        yield
        self._last = DeviceTime(self._device)

    def say(self, line: str) -> None:
        """Prints a line above the live line."""
        if processes.is_main():
            self._progress.write(line, file=sys.stderr)

    def stopped(self, step: int, checkpoint: object) -> int:
        """Prints that the run stopped after a step, and from which checkpoint it continues. Returns the exit code."""
        self.say(f"Stopped after step {step}. --resume continues from {checkpoint}.")
        return STOPPED

    def _write_steps(self) -> None:
        """Waits for the steps that have been pushed, at most one, and writes them."""
        for (entry, names, flops, batches, end), values in self._reads.pop(waits=True):
            entry |= dict(zip(names, values, strict=True))
            entry["seconds"] = seconds = end.seconds_since(self._last)
            self._last = end
            entry["tokens_per_second"] = entry["tokens"] / seconds
            entry["mfu"] = flops / seconds / self._peak / processes.world_size() if self._peak else None
            entry["memory_gib"] = peak_memory_gib(self._device)
            self._non_finite.note(entry, partial(first_sources, batches))
            self._warn_of_zero(entry, batches)
            self._write(entry)
            self._show(entry)

    def _warn_of_zero(self, entry: Entry, batches: Sequence[CountedBatch]) -> None:
        if entry["loss"] == 0 and self._warns_of_zero and "skipped" not in entry:
            self._warns_of_zero = False
            warnings.warn(
                f"step {entry['step']}: the loss is exactly 0, as if nothing were trained; look at the labels of "
                f"{first_sources(batches)}",
                stacklevel=4,
            )
        self._without_signal += entry.get("groups_without_signal") == 1
        self._zero_gradients = self._zero_gradients + 1 if entry.get("grad_norm") == 0 else 0
        if self._zero_gradients == ZERO_GRADIENTS and not self._may_be_zero:
            warnings.warn(
                f"steps {entry['step'] - ZERO_GRADIENTS + 1} to {entry['step']}: the gradients are exactly 0, so "
                f"nothing is learned; lower the learning rate, or look at the labels of {first_sources(batches)}",
                stacklevel=4,
            )

    def _write(self, entry: Entry) -> None:
        if self._file is not None:
            with writing(self.path):
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()
            if not is_at(self._file.fileno(), self.path):
                what = "was deleted, moved or replaced during the run, so the run stops"
                remedy = "Start the run again, or continue from the last checkpoint, if any, with --resume."
                raise CheckpointError(what, where=self.path, remedy=remedy)
        if self._report is not None and processes.is_main():
            self._report(entry)

    def _show(self, entry: Entry) -> None:
        printed = f"step {entry['step']} of {self._steps}: "
        self._progress.set_postfix_str(live_line(entry, self._shown, COLUMNS - self._width), refresh=False)
        self._progress.update()
        is_last = entry["step"] == self._steps
        if self._progress.disable and (is_last or time.perf_counter() - self._printed > SECONDS_BETWEEN_LINES):
            self._printed = time.perf_counter()
            self.say(printed + live_line(entry, self._shown, COLUMNS - len(printed)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is None:
                self._write_steps()
            if self._dropped:
                self.say(f"{self._dropped:,} records were not trained: too long, or blank")
            if self._without_signal:
                self.say(f"{self._without_signal:,} steps without a signal: the rewards in each group were equal")
        finally:
            self._progress.close()
            if self._file is not None:
                with writing(self.path):  # writes again what could not be written
                    self._file.close()


def live_line(entry: Entry, shown: Sequence[str], columns: int) -> str:
    """Returns the numbers of a step that fit in a line, the most important ones first.

    Args:
        entry: the step in the log.
        shown: metrics that the line begins with.
        columns: the most characters.
    """
    loss, norm = entry["loss"], entry.get("grad_norm")
    parts = [
        *(f"{name} {entry[name]:.4g}" for name in shown),
        "loss not finite" if loss is None else f"loss {loss:.4f}",
        "" if norm is None else f"grad norm {norm:.2f}",
        f"lr {entry['lr']:.1e}",
        f"{entry['tokens_per_second']:,.0f} tokens/s",
        f"MFU {entry['mfu']:.0%}" if entry["mfu"] is not None else "",
        f"{entry['memory_gib']:.1f} GiB",
        f"padding {entry['padding']:.0%}",
        f"images {entry['images']:,}" if "images" in entry else "",
    ]
    line = ""
    for part in filter(None, parts):
        longer = f"{line}, {part}" if line else part
        if len(longer) > columns:
            break
        line = longer
    return line


def read_log(path: Path) -> list[dict[str, Any]]:
    """Reads a log. A last line that is cut off, because the process was killed, is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def cut_log(path: Path, step: int, *, has_all_steps: bool = False) -> None:
    """Deletes the lines of a log after a step, which a run that continues from that step writes again.

    Args:
        path: the log, which may not exist.
        step: number of steps done.
        has_all_steps: whether the log has each step from its first one to `step`, if any.

    Raises:
        CheckpointError: A line is damaged, or a step is missing or repeated.
    """
    if not path.exists():
        return
    end, last = 0, 0
    with path.open("r+b") as file:
        for number, line in enumerate(file if step else (), 1):
            if not line.endswith(b"\n"):
                break
            if (current := _step_of(line)) is None or current < last or (has_all_steps and end and current > last + 1):
                raise _other_log(f"{path}:{number}", f"step {current} after step {last}", "the next step")
            if current > step:
                break
            end, last = end + len(line), current
        if has_all_steps and end and last < step:
            raise _other_log(path, f"{last} steps", f"{step}, those of the checkpoint")
        file.truncate(end)


def _step_of(line: bytes) -> int | None:
    """Returns the step of a line; None if it is damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if type(step) is int and step > 0 else None


def _other_log(where: object, got: str, expected: str) -> CheckpointError:
    what, remedy = "is not the log of the run that continues", "Move the file away: the run continues with a new one."
    return CheckpointError(what, where=where, got=got, expected=expected, remedy=remedy)
