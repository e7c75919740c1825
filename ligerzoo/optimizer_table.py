"""The optimizers by name: what makes them, and the memory that they take. This module does not import torch.

A new optimizer is a row here, and its file in `ligerzoo.train.optimizers`. `make_optimizer`, the option `--optimizer`,
the memory plan and the checks before training read the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ligerzoo.errors import LigerzooError, did_you_mean

_SCALES = 4 / 256, 4 / 128
"""Bytes per number for an fp32 scale of each 256 numbers (8 bits, fp8) or 128 (4 bits)."""


class OptimizerRow(NamedTuple):
    """An optimizer.

    Attributes:
        maker: the function that makes it, FILE:NAME in `ligerzoo.train.optimizers`. Its arguments are `params`, `lr`,
            `betas`, `eps`, `weight_decay`, and the options of the optimizer. None if its memory can be predicted only.
        tensors: states of the dtype of the parameter.
        quantized: bytes per number of quantized states. An optimizer that has some updates whole weights only.
        temporaries: bytes per number of the parameter that is updated; torchao has both moments in fp32.
        groups: the function that returns the parameter groups of a model, given the weight decay. A group whose entry
            "muon" is False has the states of AdamW.
    """

    maker: str | None
    tensors: int = 0
    quantized: float = 0
    temporaries: int = 0
    groups: str = "groups:parameter_groups"


OPTIMIZERS = {
    "adamw": OptimizerRow("stochastic_adamw:adamw", 2),
    "adamw-8bit": OptimizerRow("low_bit:adamw_8bit", 0, 2 * (1 + _SCALES[0]), 2 * 4),
    "adamw-4bit": OptimizerRow("low_bit:adamw_4bit", 0, 2 * (0.5 + _SCALES[1]), 2 * 4),
    "adamw-fp8": OptimizerRow("fp8_adamw:Fp8AdamW", 0, 2 * (1 + _SCALES[0])),
    "muon": OptimizerRow("muon:Muon", 1, groups="muon:muon_groups"),
    "sgd": OptimizerRow(None),  # of torch, in a loop of your own
}

OPTIMIZER_NAMES = tuple(name for name, row in OPTIMIZERS.items() if row.maker)
"""The names that `make_optimizer` accepts."""

LOW_BIT = tuple(name for name, row in OPTIMIZERS.items() if row.quantized)
"""Optimizers with quantized states, which update whole weights only."""


def imported(function: str) -> Callable[..., Any]:
    """Returns a function of the table, given as FILE:NAME."""
    file, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"ligerzoo.train.optimizers.{file}"), name)
    return found


def check_optimizer(optimizer: str, gpus: int = 1, names: Collection[str] = OPTIMIZERS) -> None:
    """Raises LigerzooError if an optimizer is unknown, or cannot update weights that this many GPUs share."""
    if optimizer not in names:
        got, expected, remedy = repr(optimizer), ", ".join(names), did_you_mean(optimizer, names)
        raise LigerzooError("unknown optimizer", where="optimizer", got=got, expected=expected, remedy=remedy)
    if gpus > 1 and optimizer in LOW_BIT:
        expected = ", ".join(name for name in names if name not in LOW_BIT)
        raise LigerzooError("cannot update sharded weights", where="optimizer", got=optimizer, expected=expected)
