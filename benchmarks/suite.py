"""Command line of a suite: measures its rows one after the other, writes the results, prints a line for each row."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.measure import save_result, sustained
from benchmarks.row import OURS, Machine, Row, measure_row, reason, verdicts

Size = Callable[[int], int]


NOMINAL_FLOPS = {"NVIDIA H200": 750e12}
"""FLOP/s that compute-bound floors assume. Measured rates of a large bf16 GEMM vary by a fifth between GPUs, with the
length of the run and with the matrices' values, so that a fixed rate makes runs comparable."""


def measure_machine(device: str, size: Size) -> Machine:
    """Measures the bandwidth of a 1 GiB copy and the FLOP/s of an 8192 x 8192 bf16 GEMM, for seconds each."""
    n = size(8192)
    source = torch.empty(8, n, n, dtype=torch.bfloat16, device=device).zero_()
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    seconds = 2.0 if device == "cuda" else 0.01
    copy, product = (
        sustained(seconds, function, device=device) for function in (lambda: target.copy_(source), lambda: a @ b)
    )
    measured = 2 * n**3 / product * 1e3
    nominal = NOMINAL_FLOPS.get(torch.cuda.get_device_name(), measured) if device == "cuda" else measured
    return Machine(2 * source.nbytes / copy * 1e3, nominal, measured)


def measure_suite(
    rows: Sequence[Row], *, out: Path, what: str, device: str, size: Size, seconds: float, patience: float
) -> None:
    """Measures the rows one after the other and writes the results after each, so that a crash loses one row only."""
    machine = measure_machine(device, size)
    rates = {
        "copy_tb_s": machine.bytes_per_second / 1e12,
        "floor_tflop_s": machine.flops_per_second / 1e12,
        "bf16_tflop_s": machine.measured_flops_per_second / 1e12,
    }
    results: dict[str, dict[str, Any]] = {}
    for row in (progress := tqdm(rows, unit="row")):
        progress.set_description(row.name)
        try:
            result = measure_row(row, device=device, machine=machine, seconds=seconds, patience=patience)
            result["goals"] = verdicts(row.goal, result, results)
        except Exception as error:
            result = {"name": row.name, "error": reason(error)}
        results[row.name] = result
        raw = {"what": what, "rates": rates, "rows": list(results.values())}
        save_result(out, raw, {"rates": rates, "rows": [compact_row(result) for result in results.values()]})
    for result in results.values():
        print(summary(result))


def compact_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row's result that `benchmarks.report` reads."""
    if "error" in result:
        return {"name": result["name"], "error": result["error"]}
    kept = ("forward_ms", "forward_backward_ms", "extra_mib")
    providers = {
        name: {key: entry[key] for key in kept if key in entry}
        for name, entry in result["providers"].items()
        if "error" not in entry and (name == OURS or not name.startswith(OURS))
    }
    compact = {key: result[key] for key in ("op", "shape", "variant")} | {"providers": providers}
    compact["floor"] = {key: result["floor"][key] for key in kept if key in result["floor"]}
    if ratios := error_ratios(result["providers"]):
        worst = max(ratios, key=lambda name: ratios[name])
        compact["largest error, ligerzoo / eager"] = {worst: ratios[worst]}
    return compact


def error_ratios(providers: Mapping[str, Any]) -> dict[str, float]:
    """Our error over eager torch's, by output and gradient. Skips losses: the error of one number is luck."""
    ours, eager = (providers.get(name, {}).get("errors", {}) for name in (OURS, "eager"))
    return {name: error / eager[name] for name, error in ours.items() if name != "loss" and eager.get(name)}


def summary(result: Mapping[str, Any]) -> str:
    """Returns one line about a row, for the terminal."""
    if "error" in result:
        return f"{result['name']}: {result['error']}"
    parts = []
    for direction, comparison in result["comparison"].items():
        ours, ratio = result["providers"][OURS].get(f"{direction}_ms"), comparison["ours / fastest peer"]
        against = "" if ratio is None else f" ({ratio:.2f} x {comparison['fastest peer']})"
        parts.append(f"{direction} {'-' if ours is None else f'{ours:.3f} ms'}{against}")
    missed = [verdict["goal"] for verdict in result["goals"] if not verdict["met"]]
    absent = [f"{name}: {entry['error']}" for name, entry in result["providers"].items() if "error" in entry]
    return "; ".join([f"{result['name']}: {', '.join(parts)}", *(f"MISSED {goal}" for goal in missed), *absent])


def suite_command(
    rows: Callable[[Size], Iterable[Row]], *, what: str, out: Path, seconds: float, argv: Sequence[str] | None = None
) -> None:
    """Parses the command line and measures the suite."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--only", metavar="NAME", default="", help="measure only rows whose name contains NAME")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny shapes, short timings: checks that everything runs")
    parser.add_argument("--patience", type=float, default=45.0, help="seconds a provider may compile and tune for")
    arguments = parser.parse_args(argv)

    def size(n: int) -> int:
        return max(min(n, 48), n // 64) if arguments.quick else n

    measure_suite(
        [row for row in rows(size) if arguments.only in row.name],
        out=arguments.out,
        what=what,
        device=arguments.device,
        size=size,
        seconds=0.01 if arguments.quick else seconds,
        patience=arguments.patience,
    )
