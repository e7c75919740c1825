"""Generation: tokens per second, time to the first token, and sampling against the update in GRPO.

    python -m benchmarks.generation --workloads 'llama_8b_*'
    python -m benchmarks.generation --workloads first_token_8b grpo_8b

Compares our `generate` with that of transformers, eager and with a static cache and torch.compile, and with our layers
under torch.compile. Each provider runs in a separate process, which measures all workloads of a model. A run replaces
its workloads in the file of results and keeps the others: name all providers of a workload in one run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path

from tqdm import tqdm

from benchmarks import decoding, first_token, grpo
from benchmarks.measure import compact_json, environment
from benchmarks.processes import Json, measured_apart
from benchmarks.row import OURS

WORKLOADS: tuple[str, ...] = (*decoding.WORKLOADS, *first_token.WORKLOADS, *grpo.WORKLOADS)
PROVIDERS = tuple(decoding.PROVIDERS)


def matching(patterns: Sequence[str]) -> list[str]:
    """The workloads whose names match one of the patterns, such as `llama_8b_*`; those of no test without patterns."""
    if not patterns:
        return [name for name in WORKLOADS if "tiny" not in name]
    if unknown := [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in WORKLOADS)]:
        raise SystemExit(f"--workloads: got {' '.join(unknown)}; expected names or patterns of {', '.join(WORKLOADS)}")
    return [name for name in WORKLOADS if any(fnmatch(name, pattern) for pattern in patterns)]


class Results:
    """A JSON file of workloads, written after each measurement."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._workloads = json.loads(path.read_text(encoding="utf-8"))["workloads"] if path.exists() else {}
        self._of_this_run: set[str] = set()

    def add(self, workload: str, provider: str, result: Json) -> None:
        """Adds a provider's result. The first of a workload in this run drops the results of earlier runs."""
        if workload not in self._of_this_run:
            self._of_this_run.add(workload)
            self._workloads[workload] = {"environment": environment(), **facts(workload), "providers": {}}
        self._workloads[workload]["providers"][provider] = result
        ordered = {name: self._workloads[name] for name in WORKLOADS if name in self._workloads}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(compact_json({"workloads": ordered}, depth=3) + "\n", encoding="utf-8")


def facts(workload: str) -> Json:
    """What the report needs to know about a workload."""
    if workload in first_token.WORKLOADS:
        model, prompt = first_token.WORKLOADS[workload]
        return {"model": model, "prompt": prompt}
    if workload in grpo.WORKLOADS:
        return vars(grpo.WORKLOADS[workload])
    found = decoding.WORKLOADS[workload]
    return {**vars(found), **decoding.limit(found)}


def measured(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Json]]:
    """Yields (workload, provider, result)."""
    names = matching(arguments.workloads)
    decodings = [name for name in names if name in decoding.WORKLOADS]
    for model, group in groupby(decodings, lambda name: decoding.WORKLOADS[name].model):
        workloads = list(group)
        for provider in arguments.providers:
            start = decoding.Start(provider, model, arguments.calls)
            for name, result in measured_apart(start, workloads, arguments.limit):
                yield name, provider, result
    for name in names:
        if name in first_token.WORKLOADS:
            yield from first_tokens(name, arguments)
        if name in grpo.WORKLOADS and OURS in arguments.providers:
            step = grpo.Start(grpo.WORKLOADS[name].model, arguments.calls)
            for _, result in measured_apart(step, [name], arguments.limit):
                yield name, OURS, result


def first_tokens(name: str, arguments: argparse.Namespace) -> Iterator[tuple[str, str, Json]]:
    """Times to the first token of the providers that load a checkpoint."""
    config, prompt = first_token.WORKLOADS[name]
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = (arguments.checkpoints or Path(temporary)).resolve() / config
        first_token.write_checkpoint(checkpoint, config)
        for provider in arguments.providers:
            if provider in first_token.PROVIDERS:
                calls, limit = arguments.calls, arguments.limit
                yield name, provider, first_token.measure(provider, checkpoint, prompt, calls, limit)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", default=[], help=f"names or patterns of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS), help="default: all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/generation.json"))
    parser.add_argument("--calls", type=int, default=3, help="measured calls, after a first one")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that a provider may take for a workload")
    parser.add_argument(
        "--checkpoints", type=Path, help="directory that keeps the checkpoints of first_token; default: a temporary one"
    )
    arguments = parser.parse_args(argv)

    results = Results(arguments.out)
    for workload, provider, result in tqdm(measured(arguments), unit="measurement"):
        results.add(workload, provider, result)
        tqdm.write(f"{workload}, {provider}: {compact_json(result, 0)}")


if __name__ == "__main__":
    main()
