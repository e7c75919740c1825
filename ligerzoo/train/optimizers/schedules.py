"""Learning-rate schedules: functions of the step, without a state to save."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from ligerzoo.checks import AT_LEAST_1, COUNT, FRACTION, check, one_of
from ligerzoo.errors import LigerzooError

Schedule = Callable[[int], float]
"""Maps the number of updates done so far, from 0, to a factor of the learning rate, from 0 to 1."""

ScheduleName = Literal["constant", "linear", "cosine", "wsd"]


def schedule(
    name: ScheduleName,
    steps: int,
    *,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    min_factor: float = 0.0,
) -> Schedule:
    """Returns a schedule: the factor of the learning rate as a function of the step.

    All schedules first rise linearly, (step + 1) / warmup_steps, so that the first update has an effect. Then

    - "constant" stays at 1;
    - "linear" falls linearly to `min_factor` at `steps`;
    - "cosine" falls along half a cosine (Loshchilov & Hutter 2017) to `min_factor` at `steps`;
    - "wsd" stays at 1, and falls linearly to `min_factor` in the last `decay_steps` (warmup-stable-decay, Hu et al.
      2024): a run can be continued from before the decay.

    From `steps` on, the factor stays at its last value.

    Args:
        name: "constant", "linear", "cosine" or "wsd".
        steps: updates of the run.
        warmup_steps: updates of the warmup.
        decay_steps: updates of the decay of "wsd"; a tenth of `steps` if None.
        min_factor: factor at the end, from 0 to 1.

    Raises:
        ValueError: a number is out of range, the warmup and the decay are longer than the run, or an argument is given
            that the schedule does not use.
    """
    check("schedule", one_of(get_args(ScheduleName)), name=name)
    check("schedule", AT_LEAST_1, steps=steps)
    check("schedule", COUNT, warmup_steps=warmup_steps)
    check("schedule", FRACTION, min_factor=min_factor)
    if name == "constant" and min_factor != 0:
        what = f'min_factor={min_factor} with "constant", which never falls'
        raise LigerzooError(what, where="schedule", expected=0.0)
    if name != "wsd" and decay_steps is not None:
        what = f"decay_steps={decay_steps} with {name!r}"
        raise LigerzooError(what, where="schedule", expected='None, or "wsd"')
    if decay_steps is None:
        decay_steps = {"constant": 0, "wsd": max(1, steps // 10)}.get(name, steps - warmup_steps)
    check("schedule", COUNT, decay_steps=decay_steps)
    if warmup_steps + decay_steps > steps:
        what, expected = f"warmup_steps={warmup_steps} and decay_steps={decay_steps}", f"at most steps={steps} together"
        raise LigerzooError(what, where="schedule", expected=expected)

    def factor(step: int) -> float:
        check("schedule", COUNT, step=step)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if decay_steps == 0:
            return 1.0
        progress = min(1.0, max(0.0, (step - (steps - decay_steps)) / decay_steps))
        remaining = (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress
        return min_factor + (1 - min_factor) * remaining

    return factor


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets the learning rate of each group to `factor` times its initial one, without a host sync.

    The initial one is the entry `initial_lr` of a group, as torch's schedulers name it, and is saved with the
    optimizer. `make_optimizer` sets it; else the first call takes the current `lr`.

    Args:
        optimizer: any optimizer of `torch.optim`. If `lr` is a tensor, it is filled.
        factor: 0 or positive, such as `schedule(...)(step)`.
    """
    check("set_lr", FRACTION, factor=factor)
    remember_lr(optimizer)
    for group in optimizer.param_groups:
        lr = group["initial_lr"] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def remember_lr(optimizer: torch.optim.Optimizer) -> None:
    """Sets `initial_lr` of groups that have none, to `lr`."""
    for group in optimizer.param_groups:
        if "initial_lr" not in group:
            group["initial_lr"] = float(group["lr"])
