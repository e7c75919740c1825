"""The setting of training whose memory `ligerzoo.memory` predicts, and the arguments of `ligerzoo info` for it.

This module does not import torch, so that the command line starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from ligerzoo.checks import TEXT, Values, integer, one_of
from ligerzoo.optimizer_table import OPTIMIZERS

T = TypeVar("T")

_COUNT = integer(1, 2**31 - 1)


class Argument(NamedTuple):
    """An argument of the command line: its flag, its values, and the name of the value in the help."""

    flag: str
    values: Values
    metavar: str
    help: str


def _argument(default: T, flag: str, values: Values, metavar: str, help: str) -> T:
    return field(default=default, metadata={"argument": Argument(flag, values, metavar, f"{help} (default {default})")})


@dataclass(frozen=True, kw_only=True)
class TrainingSetting:
    """What to train, and how.

    Attributes:
        method: "full", or "lora": `ligerzoo.adapters.add_lora` with its defaults, on all linear layers and experts of
            the blocks.
        batch_size: rows of a microbatch on one GPU.
        seq_length: tokens of a row.
        gpus: GPUs that share weights, gradients and optimizer states (FSDP2).
        lora_rank: rank of the updates.
        optimizer: a name in `ligerzoo.optimizer_table.OPTIMIZERS`.
        accumulate: whether gradients accumulate over several microbatches.
    """

    method: Literal["full", "lora"] = _argument(
        "full", "--method", one_of(("full", "lora")), "{full,lora}", "train all weights, or adapters"
    )
    batch_size: int = _argument(1, "--batch", _COUNT, "B", "rows of a batch on one GPU")
    seq_length: int = _argument(2048, "--seq", _COUNT, "T", "tokens of a row")
    gpus: int = _argument(1, "--gpus", _COUNT, "N", "GPUs that share the weights, by FSDP2")
    lora_rank: int = _argument(16, "--lora-rank", _COUNT, "R", "rank of the adapters")
    optimizer: str = _argument("adamw", "--optimizer", TEXT, "NAME", ", ".join(OPTIMIZERS))
    accumulate: bool = False
