"""Steps whose loss or gradients are infinite or NaN: which are skipped, and when a run stops."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ligerzoo.errors import LigerzooError
from ligerzoo.train.run_checkpoint import last_finite

MAX_SKIPPED, MAX_SKIPPED_AT_END = 10, 2
"""Number of skipped steps in a row after which the run stops; and with which it may end."""


class NonFiniteSteps:
    """What a run does about values that are not finite. `SkipNonFinite` skips an update on the device, and counts.

    A run warns of a skipped update, does not save before the next one that is not skipped, and stops after many in a
    row. It also stops after a step with such values whose update was not skipped.

    Args:
        output: directory of the run.
        first_step: number of steps done before.
        steps: number of steps at the end of the run.
        finish_saving: waits for a checkpoint that is being written, which the error names.

    Attributes:
        in_a_row: number of the last steps whose update was skipped.
    """

    def __init__(self, output: Path, first_step: int, steps: int, finish_saving: Callable[[], object]) -> None:
        self._output, self._first_step, self._steps = output, first_step, steps
        self._finish_saving = finish_saving
        self._skipped, self.in_a_row = 0, 0

    def note(self, entry: dict[str, Any], sources: Callable[[], str]) -> None:
        """Judges the entry of a step, and replaces the number of skipped updates so far by whether this one was.

        Args:
            entry: of the log. Values that are not finite become None if the update was skipped.
            sources: returns the samples of the step, for messages.

        Raises:
            LigerzooError: a value is not finite and the update was not skipped, or too many were.
        """
        before, self._skipped = self._skipped, int(entry.pop("skipped", 0))
        if self._skipped > before:
            self.in_a_row += 1
            self._note_skipped(entry, f"step {entry['step']}, {sources()}")
            return
        self.in_a_row = 0
        for name, value in (("loss", entry["loss"]), ("norm of the gradients", entry.get("grad_norm", 0.0))):
            if not math.isfinite(value):
                what = f"the {name} is not a finite number, so the run stops"
                raise self._stop(what, f"step {entry['step']}, {sources()}", value)

    def _note_skipped(self, entry: dict[str, Any], where: str) -> None:
        entry["skipped"] = True
        is_end = entry["step"] == self._steps
        most = min(MAX_SKIPPED_AT_END, self._steps - self._first_step - 1) if is_end else MAX_SKIPPED - 1
        if self.in_a_row > most:
            steps = f"the last {self.in_a_row} steps" if is_end else f"{MAX_SKIPPED} steps in a row"
            what = f"the gradients of {steps} are not finite, so the run stops"
            raise self._stop(what, where, f"loss {entry['loss']}")
        warnings.warn(f"{where}: gradients are not finite, so the update is skipped", stacklevel=6)
        for name in ("loss", "grad_norm"):
            if not math.isfinite(entry.get(name, 0.0)):
                entry[name] = None

    def _stop(self, what: str, where: str, got: object) -> LigerzooError:
        self._finish_saving()
        remedy = f"Look at these samples, or lower the learning rate.{last_finite(self._output)}"
        return LigerzooError(what, where=where, got=got, remedy=remedy)
