"""After which steps a run evaluates, saves and stops."""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.train import processes
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog
from ligerzoo.train.run_options import RunOptions


@dataclass(frozen=True)
class Due:
    """What is due after a step.

    Attributes:
        evaluation: whether to evaluate: every `eval_every` steps and after the last one, given evaluation data.
        save: whether to save: every `save_every` steps, after the last one and before stopping.
        stop: whether to stop: after a save, if a process was asked to before the last step.
    """

    evaluation: bool
    save: bool
    stop: bool


class Schedule:
    """After which steps a run evaluates, saves and stops.

    Saving and stopping wait for a step whose update is not skipped. Otherwise checkpoints of a model that no longer
    learns would replace the last good ones.

    Args:
        options: options of the run.
        steps: number of steps of the run.
        stop: asks the run to stop.
        log: knows whether updates are skipped.
    """

    def __init__(self, options: RunOptions, steps: int, stop: StopRequest, log: RunLog) -> None:
        self._options, self._steps, self._stop, self._log = options, steps, stop, log
        self._waits_to_save = False

    def after(self, step: int) -> Due:
        """Returns what is due after a step. All processes must call it, and get the same."""
        is_last, is_stopped = step == self._steps, any(processes.total(self._stop.requested))
        save = is_last or is_stopped or self._waits_to_save or step % self._options.save_every == 0
        self._waits_to_save = save and any(processes.total(self._log.is_skipped()))
        save = save and not self._waits_to_save
        return Due(
            evaluation=self._options.eval_data is not None and (is_last or step % self._options.eval_every == 0),
            save=save,
            stop=save and is_stopped and not is_last,
        )
