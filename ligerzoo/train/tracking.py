"""Sends the log to TensorBoard, Trackio or Weights & Biases, if they are installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ligerzoo.errors import ConfigError
from ligerzoo.train import processes

Report = Callable[[Mapping[str, Any]], object]


def check_tracker(name: str | None, output: Path) -> None:
    """Refuses a tracker whose package is not installed. Sets TRACKIO_DIR, which Trackio reads once.

    Raises:
        ConfigError: The package is not installed.
    """
    if name is not None and processes.is_main():
        if name == "trackio":
            os.environ.setdefault("TRACKIO_DIR", str(output.resolve() / "trackio"))
        _import(name)


def open_tracker(name: str | None, output: Path, options: Mapping[str, object]) -> Report | None:
    """Returns a function that sends an object of the log to a tracker.

    Args:
        name: "tensorboard", which writes to OUTPUT/tensorboard; "trackio", which writes to OUTPUT/trackio, or to the
            directory of the variable TRACKIO_DIR; "wandb"; or None for no tracker.
        options: options of the run, which the latter two show.

    Raises:
        ConfigError: The package is not installed.
    """
    if name is None or not processes.is_main():
        return None
    opened = _import(name)
    match name:
        case "tensorboard":
            return _open_tensorboard(opened, output)
        case "trackio":
            return _open_trackio(opened, output, options)
    return _open_wandb(opened, output, options)


def _import(name: str) -> Callable[..., Any]:
    """Returns what opens a tracker: `SummaryWriter`, `trackio.init` or `wandb.init`."""
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter
        init: Callable[..., Any] = import_module(name).init
        return init
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


def _open_trackio(init: Callable[..., Any], output: Path, options: Mapping[str, object]) -> Report:
    name = output.resolve().name
    resume = "allow" if options.get("resume") else "never"
    no_sampling = {"auto_log_cpu": False, "auto_log_gpu": False}
    run = init("ligerzoo", name=name, config=dict(options), resume=resume, **no_sampling)
    return lambda entry: run.log(_numbers(entry), step=entry["step"])


def _numbers(entry: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if isinstance(value, int | float) and name != "step"}
