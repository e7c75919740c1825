"""Sends the log to TensorBoard or Weights & Biases, if they are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ligerzoo.errors import ConfigError
from ligerzoo.train import processes

Report = Callable[[Mapping[str, Any]], object]


def check_tracker(name: str | None) -> None:
    """Refuses a tracker whose package is not installed.

    Raises:
        ConfigError: The package is not installed.
    """
    if name is not None and find_spec(name) is None:
        raise ConfigError(
            f"the package {name} is not installed", where="option tracker", remedy=f"Run `pip install {name}`."
        )


def open_tracker(name: str | None, output: Path, options: Mapping[str, Any]) -> Report | None:
    """Returns a function that sends an object of the log to a tracker.

    Args:
        name: "tensorboard", which writes to OUTPUT/tensorboard; "wandb"; or None for no tracker.
        output: directory of the run.
        options: options of the run, which wandb shows.
    """
    if name is None or not processes.is_main():
        return None
    return _open_tensorboard(output) if name == "tensorboard" else _open_wandb(output, options)


def _open_tensorboard(output: Path) -> Report:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(output / "tensorboard")

    def report(entry: Mapping[str, Any]) -> None:
        for name, value in _numbers(entry).items():
            writer.add_scalar(name, value, entry["step"])
        writer.flush()

    return report


def _open_wandb(output: Path, options: Mapping[str, Any]) -> Report:
    import wandb

    run = wandb.init(dir=output, name=output.resolve().name, config=dict(options))
    return lambda entry: run.log(_numbers(entry), step=entry["step"])


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if isinstance(value, int | float) and name != "step"}
