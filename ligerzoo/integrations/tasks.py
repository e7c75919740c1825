"""Tasks of lm-evaluation-harness on a model. Needs lm-eval and transformers, which `[integrations]` installs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from ligerzoo.errors import LigerzooError, did_you_mean
from ligerzoo.integrations.transformers import wrap
from ligerzoo.models import CausalLM


def run_tasks(
    model: CausalLM,
    tokenizer: str | Path,
    tasks: Sequence[str],
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    task_directory: str | Path | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns the results of tasks by name, as lm-eval reports them: metrics such as "acc,none" and their errors.

    Args:
        model: the model.
        tokenizer: directory or hub id of the tokenizer, which transformers loads.
        tasks: names of tasks or groups of lm-eval.
        batch_size: requests at a time.
        max_length: the most tokens of a request; None for the model's.
        task_directory: directory with YAML files of further tasks.
        limit: largest number of records of each task; None for all.

    Raises:
        LigerzooError: a task is unknown, or nothing was evaluated.
    """
    manager = _find_tasks(tasks, task_directory)
    options = {"batch_size": batch_size, "device": str(model.device), "max_length": max_length}
    evaluated = HFLM(wrap(model.eval()), tokenizer=AutoTokenizer.from_pretrained(tokenizer), **options)
    results = simple_evaluate(evaluated, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False)
    if results is None:
        raise LigerzooError("lm-eval returned no results", where="--tasks", got=", ".join(tasks))
    found: dict[str, dict[str, Any]] = results["results"]
    return found


def _find_tasks(names: Sequence[str], directory: str | Path | None) -> TaskManager:
    """Returns a manager that knows all tasks. lm-eval's own are read only if needed, which takes seconds."""
    if directory is not None:
        manager = TaskManager(include_path=str(directory), include_defaults=False)
        if all(map(manager.match_tasks, [[name] for name in names])):
            return manager
    manager = TaskManager(include_path=None if directory is None else str(directory))
    for name in names:
        if not manager.match_tasks([name]):
            remedy = did_you_mean(name, manager.all_tasks)
            raise LigerzooError("unknown task", where="--tasks", got=repr(name), remedy=remedy)
    return manager
