"""Imported by `ligerzoo train --import`: each process writes the samples that it trains, with their step, to a file.

The environment variable SAMPLES is the directory of the files.
"""

import os
from pathlib import Path
from typing import Any

from ligerzoo.train.log import RunLog

log_step = RunLog.step


def log_and_record(self: RunLog, step: int, **values: Any) -> None:
    log_step(self, step, **values)
    with Path(os.environ["SAMPLES"], f"{os.environ.get('RANK', 0)}.txt").open("a", encoding="utf-8") as file:
        trained = [batch for batch in values["batches"] if batch.trained_tokens]
        file.writelines(f"{step} {source}\n" for batch in trained for source in batch.sources)


RunLog.step = log_and_record  # type: ignore[method-assign]
