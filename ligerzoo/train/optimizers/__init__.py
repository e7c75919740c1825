"""Optimizers, learning-rate schedules, gradient clipping and weight averaging, each usable alone in any loop."""

from ligerzoo.exports import renamed
from ligerzoo.optimizer_table import OPTIMIZER_NAMES
from ligerzoo.train.optimizers.ema import EMA
from ligerzoo.train.optimizers.fp8_adamw import Fp8AdamW
from ligerzoo.train.optimizers.gradients import SkipNonFinite, clip_grad_norm
from ligerzoo.train.optimizers.groups import names_without_decay, parameter_groups
from ligerzoo.train.optimizers.in_backward import StepInBackward
from ligerzoo.train.optimizers.low_bit import low_bit_adamw
from ligerzoo.train.optimizers.make import make_optimizer
from ligerzoo.train.optimizers.muon import Muon, muon_groups, orthogonalize
from ligerzoo.train.optimizers.resolution import second_moment_is_stuck, share_unchanged
from ligerzoo.train.optimizers.schedules import Schedule, ScheduleName, schedule, set_lr
from ligerzoo.train.optimizers.stochastic_adamw import StochasticAdamW

__all__ = [
    "EMA",
    "OPTIMIZER_NAMES",
    "Fp8AdamW",
    "Muon",
    "Schedule",
    "ScheduleName",
    "SkipNonFinite",
    "StepInBackward",
    "StochasticAdamW",
    "clip_grad_norm",
    "low_bit_adamw",
    "make_optimizer",
    "muon_groups",
    "names_without_decay",
    "orthogonalize",
    "parameter_groups",
    "schedule",
    "second_moment_is_stuck",
    "set_lr",
    "share_unchanged",
]

__getattr__ = renamed(__name__)
