"""What training `ligerzoo.memory` predicts, on which GPUs, and the arguments of `ligerzoo info` for it.

This module does not import torch, so that the command line starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from ligerzoo.checks import POSITIVE, TEXT, Values, integer, one_of
from ligerzoo.mesh_sizes import MeshSizes
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
        batch_size: rows of a microbatch on one GPU, or on the GPUs of `context` and `tensor` that have the same rows.
        seq_length: tokens of a row.
        gpus: number of GPUs.
        mesh: sizes of the axes of their mesh, as text, see `MeshSizes`. None: all GPUs share weights, gradients and
            optimizer states (FSDP2).
        lora_rank: rank of the updates.
        optimizer: a name in `ligerzoo.optimizer_table.OPTIMIZERS`.
        accumulate: whether gradients accumulate over several microbatches.
    """

    method: Literal["full", "lora"] = _argument(
        "full", "--method", one_of(("full", "lora")), "{full,lora}", "train all weights, or adapters: also --lora-rank"
    )
    batch_size: int = _argument(1, "--batch", _COUNT, "B", "rows of a batch on one GPU")
    seq_length: int = _argument(2048, "--seq", _COUNT, "T", "tokens of a row")
    gpus: int = _argument(1, "--gpus", _COUNT, "N", "GPUs")
    mesh: str | None = None
    lora_rank: int = _argument(16, "--lora-rank", _COUNT, "R", "rank of the adapters")
    optimizer: str = _argument("adamw", "--optimizer", TEXT, "NAME", ", ".join(OPTIMIZERS))
    accumulate: bool = False

    @property
    def sizes(self) -> MeshSizes:
        """The sizes of the axes of the mesh.

        Raises:
            ConfigError: They do not fit the number of GPUs.
        """
        return MeshSizes.parse(self.mesh or "").over(self.gpus)


@dataclass(frozen=True, kw_only=True)
class GPURates:
    """What GPUs and their networks do per second, by their data sheets; see `ligerzoo.memory.step_time`.

    Attributes:
        flops: TFLOP/s of dense products in bf16.
        bandwidth: TB/s of a GPU's memory.
        nvlink: GB/s that a GPU sends to others of its host.
        network: Gb/s that a GPU sends to other hosts.
        gpus_per_host: GPUs of a host, which NVLink connects.
    """

    flops: float = _argument(989, "--gpu-flops", POSITIVE, "TFLOPS", "TFLOP/s of a GPU in bf16")
    bandwidth: float = _argument(3.35, "--gpu-bandwidth", POSITIVE, "TBPS", "TB/s of the memory of a GPU")
    nvlink: float = _argument(450, "--nvlink", POSITIVE, "GBPS", "GB/s that a GPU sends to others of its host")
    network: float = _argument(400, "--network", POSITIVE, "GBITPS", "Gb/s that a GPU sends to other hosts")
    gpus_per_host: int = _argument(8, "--gpus-per-host", _COUNT, "N", "GPUs of a host")
