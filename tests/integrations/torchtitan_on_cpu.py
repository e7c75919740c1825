"""Runs torchtitan's command on CPUs, with gloo: `torchrun -m tests.integrations.torchtitan_on_cpu ARGUMENTS`.

torchtitan supports accelerators only. This gives it the CPU as one, and nothing else.
"""

import json
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


def prepare() -> None:
    """Makes the CPU the accelerator. Call it before torchtitan is imported."""
    functions = {
        "get_device_name": lambda *args: "cpu",
        "get_device_properties": lambda *args: SimpleNamespace(total_memory=2**30),
        "reset_peak_memory_stats": lambda *args: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda *args: {},
    }
    for name, function in functions.items():
        setattr(torch.cpu, name, function)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.set_num_threads(1)


def record(losses: list[dict[str, float]]) -> Any:
    """Appends the metrics of each step to a list."""
    from torchtitan.components.metrics import MetricsProcessor

    def log(self: Any, step: int, loss: float, _: float, norm: float, **extra: object) -> None:
        losses.append({"step": step, "loss": loss, "norm": norm})

    return mock.patch.object(MetricsProcessor, "log", log)


def main() -> None:
    """Trains as `torchtitan.train` does, and writes the losses to the file in LOSSES."""
    prepare()
    from torchtitan import train, trainer

    losses: list[dict[str, float]] = []
    waits_for_a_gpu = mock.patch.object(trainer.dist_utils, "set_pg_timeouts")
    with record(losses), waits_for_a_gpu, mock.patch.object(trainer.time, "sleep"):
        train.main()
    if os.environ["RANK"] == "0":
        with open(os.environ["LOSSES"], "w") as file:
            json.dump(losses, file)


if __name__ == "__main__":
    main()
