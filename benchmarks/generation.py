"""Generation: tokens per second, time to the first token, and sampling against the update in GRPO.

    python -m benchmarks.generation --workloads 'llama_8b_*' --providers ligerzoo 'ligerzoo exact'
    python -m benchmarks.generation --workloads first_token_8b grpo_8b
    python -m benchmarks.generation --merge results/of/another/machine.json

Compares our `generate`, fast and exact, with that of transformers, eager and with a static cache and torch.compile, and
with our layers under torch.compile. Each provider runs in a separate process, which measures all workloads of a model.
The file of results is written after each measurement. A measurement replaces that of the same workload and provider; it
drops those of the workload that were measured with another GPU or other versions of packages.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from tqdm import tqdm

from benchmarks import decoding, first_token, grpo
from benchmarks.measure import compact_json
from benchmarks.processes import Json, measured_apart
from benchmarks.row import OURS
from benchmarks.workloads import WorkloadResults, select

WORKLOADS: tuple[str, ...] = (*decoding.WORKLOADS, *first_token.WORKLOADS, *grpo.WORKLOADS)
PROVIDERS = tuple(decoding.PROVIDERS)


def facts(workload: str) -> Json:
    """What the report needs to know about a workload."""
    if workload in first_token.WORKLOADS:
        model, prompt = first_token.WORKLOADS[workload]
        return {"model": model, "prompt": prompt}
    if workload in grpo.WORKLOADS:
        return vars(grpo.WORKLOADS[workload])
    found = decoding.WORKLOADS[workload]
    return {**vars(found), **decoding.limit(found)}


matching = partial(select, names=WORKLOADS)
Results = partial(WorkloadResults, workloads=WORKLOADS, providers=PROVIDERS, facts=facts)


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
    providers = [provider for provider in arguments.providers if provider in first_token.PROVIDERS]
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = (arguments.checkpoints or Path(temporary)).resolve() / config
        for provider in providers:
            first_token.write_checkpoint(checkpoint, config)
            calls, limit = arguments.calls, arguments.limit
            yield name, provider, first_token.measure(provider, checkpoint, prompt, calls, limit)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", default=[], help=f"names or patterns of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS), help="default: all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/generation.json"))
    parser.add_argument("--calls", type=int, default=2, help="measured calls, after a first one; default: 2")
    parser.add_argument(
        "--limit", type=float, default=150.0, help="seconds that a provider may take for a workload; default: 150"
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", default=[], help="add the results of files; measure nothing"
    )
    parser.add_argument(
        "--checkpoints", type=Path, help="directory that keeps the checkpoints of first_token; default: a temporary one"
    )
    arguments = parser.parse_args(argv)

    results = Results(arguments.out)
    if arguments.merge:
        results.merge(*arguments.merge)
        return
    for workload, provider, result in tqdm(measured(arguments), unit="measurement"):
        results.add(workload, provider, result)
        tqdm.write(f"{workload}, {provider}: {compact_json(result, 0)}")


if __name__ == "__main__":
    main()
