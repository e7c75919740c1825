"""Results of benchmarks whose providers measure named workloads: JSON files that several runs fill."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.measure import compact_json, environment
from benchmarks.processes import Json


def select(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that match one of the patterns, such as `llama_8b_*`; those of no test without patterns."""
    if not patterns:
        return [name for name in names if "tiny" not in name]
    if unknown := [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)]:
        raise SystemExit(f"--workloads: got {' '.join(unknown)}; expected names or patterns of {', '.join(names)}")
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


class WorkloadResults:
    """A JSON file of workloads, written after each measurement.

    Args:
        path: of the file. Its measurements are kept.
        workloads: names of all workloads, in the order of the file.
        providers: names of all providers, in the order of the file.
        facts: returns what the report needs to know about a workload.
    """

    def __init__(
        self, path: Path, workloads: Sequence[str], providers: Sequence[str], facts: Callable[[str], Json]
    ) -> None:
        self._path, self._names, self._providers, self._facts = path, workloads, providers, facts
        self._workloads = read_workloads(path) if path.exists() else {}

    def add(self, workload: str, provider: str, result: Json) -> None:
        """Adds a provider's result."""
        described = json.loads(compact_json({"environment": environment(), **self._facts(workload)}))  # as in the file
        self._put(workload, {**described, "providers": {provider: result}})

    def merge(self, *paths: Path) -> None:
        """Adds the results of other files."""
        for path in paths:
            for name, workload in read_workloads(path).items():
                self._put(name, workload)

    def _put(self, name: str, workload: Json) -> None:
        """Adds providers to a workload, and drops earlier ones unless all else is equal."""
        earlier = self._workloads.get(name, {"providers": {}})
        is_same = {**earlier, "providers": None} == {**workload, "providers": None}
        found = {**(earlier["providers"] if is_same else {}), **workload["providers"]}
        providers = {provider: found[provider] for provider in self._providers if provider in found}
        self._workloads[name] = {**workload, "providers": providers}
        self._write()

    def _write(self) -> None:
        ordered = {name: self._workloads[name] for name in self._names if name in self._workloads}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(compact_json({"workloads": ordered}, depth=3) + "\n", encoding="utf-8")
        partial.replace(self._path)


def read_workloads(path: Path) -> dict[str, Json]:
    workloads: dict[str, Json] = json.loads(path.read_text(encoding="utf-8"))["workloads"]
    return workloads
