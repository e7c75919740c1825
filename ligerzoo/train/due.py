"""What is due after a step: an evaluation, saving, stopping."""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.train import processes
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.run_options import RunOptions


@dataclass(frozen=True)
class Due:
    """What is due after a step.

    Attributes:
        evaluation: whether to evaluate: every `eval_every` steps and after the last one, given evaluation data.
        save: whether to save: every `save_every` steps, after the last one and before stopping.
        stop: whether a process was asked to stop before the last step.
    """

    evaluation: bool
    save: bool
    stop: bool


def due_after(step: int, steps: int, options: RunOptions, stop: StopRequest) -> Due:
    """Returns what is due after a step of a run of `steps` steps. All processes must call it, and get the same."""
    is_last, is_stopped = step == steps, any(processes.total(stop.requested))
    return Due(
        evaluation=options.eval_data is not None and (is_last or step % options.eval_every == 0),
        save=is_last or is_stopped or step % options.save_every == 0,
        stop=is_stopped and not is_last,
    )
