"""Runs a recipe: joins the processes, locks the output directory and opens the checkpoints of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ligerzoo import parallel
from ligerzoo.parallel import failing_together
from ligerzoo.train import processes
from ligerzoo.train.output_lock import locked_output
from ligerzoo.train.run_options import RunOptions
from ligerzoo.train.run_state import RunState, refuse_output

Options = TypeVar("Options", bound=RunOptions)


def run_together(
    train: Callable[[Options, RunState, torch.device], int], options: Options, *, may_change: Collection[str]
) -> int:
    """Joins the processes of torchrun, if any, and leaves them after the run, unless they had been joined before.

    Args:
        train: what each process does. Returns the exit code.
        options: options of the run. `device` is that of a single process, or "cuda" or "cpu" for several; None for a
            GPU if there is one.
        may_change: names of options that may change when the run is resumed.
    """
    was_joined = dist.is_initialized()
    own = parallel.start_processes(options.device)
    try:
        with opened_run(options, may_change) as run:
            return train(options, run, own.device)
    finally:
        if not was_joined:
            parallel.stop_processes()


@contextmanager
def opened_run(options: RunOptions, may_change: Collection[str]) -> Iterator[RunState]:
    """Opens the checkpoints of a run, whose directory the main process locks. A dry run writes nothing and needs none.

    Raises:
        CheckpointError: Another run uses the directory; see also `RunState`.
    """
    output, lock = Path(options.output), None
    with ExitStack() as stack:
        with failing_together(f"opening {output}"):
            refuse_output(output)
            if processes.is_main() and not options.dry_run:
                lock = stack.enter_context(locked_output(output))
        yield RunState(output, options, may_change=may_change, lock=lock)
