"""The part of a step after backward: clipping, skipping, the optimizer, the learning rate and averaged weights."""

from __future__ import annotations

import contextlib
import warnings

import torch

from ligerzoo.models import CausalLM
from ligerzoo.train.optimizers import (
    EMA,
    SkipNonFinite,
    StepInBackward,
    make_optimizer,
    schedule,
    set_lr,
    share_unchanged,
)
from ligerzoo.train.optimizers.clipped_step import ClippedStep
from ligerzoo.train.run_options import RunOptions


def trains_bfloat16(model: CausalLM) -> bool:
    """Whether a weight that trains is in bfloat16, in which most small updates would be lost by rounding."""
    return any(weight.requires_grad and weight.dtype == torch.bfloat16 for weight in model.parameters())


def warn_of_rounding(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Warns if most weights would not change by an update of size `lr`, because their dtype rounds it away.

    Args:
        optimizer: any optimizer.
        lr: peak learning rate; AdamW changes a weight by about as much.
    """
    share = share_unchanged(optimizer, lr)
    if share > 0.5:
        dtype = optimizer.param_groups[0]["params"][0].dtype
        warnings.warn(
            f"a learning rate of {lr:g} is below the resolution of {str(dtype).removeprefix('torch.')} for {share:.0%} "
            "of the weights, which would not change; use --stochastic-rounding on, --dtype float32 --mixed-precision "
            "or a higher learning rate",
            stacklevel=2,
        )


def rounds_stochastically(options: RunOptions, model: CausalLM) -> bool:
    """Whether updates are rounded stochastically; `model` may be on the meta device."""
    return {"on": True, "off": False, "auto": trains_bfloat16(model)}[options.stochastic_rounding]


def describe_update(options: RunOptions, model: CausalLM) -> str:
    """Returns how weights are updated, for the plan of a run."""
    is_stochastic = rounds_stochastically(options, model)
    return f"{options.optimizer} with {'stochastic rounding' if is_stochastic else 'rounding to the nearest'}"


class OptimizerStep(ClippedStep):
    """Updates the weights of a model and their averages, as the options of a run describe it.

        optimizer_step = OptimizerStep(model, options, steps)
        for step in range(1, steps + 1):
            optimizer_step.set_lr(step)
            ...  # forward and backward
            norm = optimizer_step()

    Args:
        steps: number of steps of the run, for the schedule.

    Attributes:
        optimizer: the optimizer.
        skip: skips updates by gradients that are not finite, and counts them.
        ema: the averaged weights; None without.
        lr: learning rate of the step.
    """

    skip: SkipNonFinite

    def __init__(self, model: CausalLM, options: RunOptions, steps: int) -> None:
        self._options = options
        self._factor = schedule(options.schedule, steps, warmup_steps=int(options.warmup * steps))
        is_stochastic = rounds_stochastically(options, model)
        lr, decay = options.lr, options.weight_decay
        optimizer = make_optimizer(
            model, options.optimizer, lr=lr, weight_decay=decay, stochastic_rounding=is_stochastic
        )
        warn_of_rounding(optimizer, options.lr)
        super().__init__(model, optimizer, options.max_grad_norm or None, SkipNonFinite(optimizer))
        if options.updates_in_backward:
            StepInBackward(optimizer, self.skip)
        self.ema = None if options.ema is None else EMA(model, options.ema)
        self.lr = options.lr

    def set_lr(self, step: int) -> None:
        """Sets the learning rate of a step, from 1, before its backward."""
        factor = self._factor(step - 1)
        self.lr = self._options.lr * factor
        set_lr(self.optimizer, factor)

    def finish(self) -> None:
        """Adds the weights to their averages, if there are any."""
        if self.ema is not None:
            self.ema.update()

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """In this context, for evaluating and saving, the model has its averaged weights, if there are any."""
        return contextlib.nullcontext() if self.ema is None else self.ema.swapped()
