"""Sends the log to TensorBoard or Weights & Biases, if they are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    if name is not None and processes.is_main():
        _import(name)


def open_tracker(name: str | None, output: Path, options: Mapping[str, object]) -> Report | None:
    """Returns a function that sends an object of the log to a tracker.

    Args:
        name: "tensorboard", which writes to OUTPUT/tensorboard; "wandb"; or None for no tracker.
        options: options of the run, which wandb shows.

    Raises:
        ConfigError: The package is not installed.
    """
    if name is None or not processes.is_main():
        return None
    opened = _import(name)
    return _open_tensorboard(opened, output) if name == "tensorboard" else _open_wandb(opened, output, options)


def _import(name: str) -> Callable[..., Any]:
    """Returns what opens a tracker: `SummaryWriter` or `wandb.init`."""
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter
        from wandb import init

        return init  # type: ignore[no-any-return]
    except ImportError as error:
        raise ConfigError(
            f"the package {name} is not installed", where="option tracker", remedy=f"Run `pip install {name}`."
        ) from error


def _open_tensorboard(summary_writer: Callable[..., Any], output: Path) -> Report:
    writer = summary_writer(output / "tensorboard")

    def report(entry: Mapping[str, object]) -> None:
        for name, value in _numbers(entry).items():
            writer.add_scalar(name, value, entry["step"])
        writer.flush()

    return report


def _open_wandb(init: Callable[..., Any], output: Path, options: Mapping[str, object]) -> Report:
    run = init(dir=output, name=output.resolve().name, config=dict(options))
    return lambda entry: run.log(_numbers(entry), step=entry["step"])


def _numbers(entry: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if isinstance(value, int | float) and name != "step"}
