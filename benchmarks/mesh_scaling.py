"""Training on one, two, four and more GPUs of a host: tokens per second of a GPU, and what was predicted.

    python -m benchmarks.mesh_scaling                     # all GPUs of the machine; about 8 minutes on four
    python -m benchmarks.mesh_scaling --only experts large --providers ligerzoo --profile
    python -m benchmarks.mesh_scaling --tiny --gpus 4 --out tiny.json     # four processes on a CPU

The cases, by importance:

    dense    Llama-3-8B, all weights, 1 x 8192 tokens a GPU, on 1, 2, 4, ... GPUs; transformers + liger-kernel with
             FSDP2 in its fastest setting that fits: gradients summed in bf16, all blocks recomputed, none, and also
             weights gathered until backward
    long     Llama-3-8B, all weights, one text of 32,768 tokens for each GPU, with `context`
    experts  Qwen3-30B-A3B, 1 x 8192 tokens a GPU, all weights and LoRA of rank 16, with `expert` and without
    large    the shape of Llama-3-70B, LoRA of rank 16, 1 x 4096 tokens, with `shard` and with `tensor`
    killed   `ligerzoo train`: one of its processes is killed, and half as many continue; see `benchmarks.killed_run`

Models are whole and have random weights, which are initialized in shards. As in `ligerzoo train`, our AdamW has bf16
states and rounds bf16 weights stochastically, and backward recomputes what `ligerzoo.memory.plan_training` plans, whose
memory and time are the prediction. A step has no clipping of gradients; its time is that of the slowest process, and
the memory that of the fullest GPU.

Each case runs in new processes with a time limit. Cases that need few GPUs run side by side, each on its own. A case
starts only if the remaining time suffices for it. The file is written after each case; rows in it that are not measured
again stay.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks import sharded_training
from benchmarks.decoding import clean_up
from benchmarks.killed_run import LARGE, SMALL, killed_run
from benchmarks.measure import save_result
from benchmarks.mesh_models import MODELS, build
from benchmarks.meshes import OURS, PEER, TINY, TINY_EXPERTS, earlier_rows
from benchmarks.processes import Json, run_module
from benchmarks.sharded_training import LLAMA_8B, Training, Variant, liger, without_profiles
from ligerzoo.adapters import add_lora
from ligerzoo.errors import LigerzooError
from ligerzoo.memory import Recompute, TrainingSetting, plan_training
from ligerzoo.memory.allocator import let_segments_grow
from ligerzoo.memory.mesh_plan import MeshPlan
from ligerzoo.parallel import (
    gather_objects,
    initialize_sharded,
    keep_gathered,
    parallelize,
    start_processes,
    stop_processes,
)
from ligerzoo.train.optimizer_step import trains_bfloat16
from ligerzoo.train.optimizers import make_optimizer

RANK = 16
TINY_SHAPES: dict[str, Json] = {
    "8B": {**TINY, "num_hidden_layers": 3},
    "30B-A3B": {**TINY_EXPERTS, "num_hidden_layers": 2},
    "70B": {**TINY, "num_hidden_layers": 4},
}
RECOMPUTED, KEPT, GATHERED = "all blocks recomputed", "nothing recomputed", "and weights gathered until backward"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and on how many GPUs.

    Attributes:
        name: of the case, see the module.
        gpus: their number.
        seconds: that its processes usually take; a case may take twice as long.
        model: name of its shape.
        mesh: sizes of its axes; "" on one GPU.
        method: what trains.
        length: tokens of the row of a GPU, or of the GPUs that divide it.
        provider: who trains.
        gib: memory of a GPU for which the step is planned: NCCL and fragments need the rest, 74 did not fit 80 GB.
        steps: that are measured, after two; one after one if it is one.
    """

    name: str
    gpus: int
    seconds: float = 45.0
    model: str = "8B"
    mesh: str = ""
    method: Literal["full", "lora"] = "full"
    length: int = 8192
    provider: str = OURS
    gib: float = 68.0
    steps: int = 3

    def facts(self) -> Json:
        keys = ("name", "provider", "gpus", "mesh", "method", "model", "length")
        return {"case" if key == "name" else key: getattr(self, key) for key in keys}

    @property
    def rows_divided(self) -> int:
        """Processes that have the same row."""
        sizes = self.setting.sizes
        return sizes.context * sizes.tensor

    @property
    def setting(self) -> TrainingSetting:
        return TrainingSetting(
            method=self.method, seq_length=self.length, gpus=self.gpus, mesh=self.mesh or None, lora_rank=RANK
        )


def all_cases(gpus: int) -> list[Case]:
    """Returns the cases of a machine, by importance; many GPUs first, so that the others can run side by side."""
    counts = [1 << power for power in reversed(range(gpus.bit_length())) if 1 << power <= gpus]
    dense = [
        Case(name="dense", gpus=count, mesh=f"shard={count}" if count > 1 else "", provider=provider, gib=76.0)
        for count in counts
        for provider in (OURS, PEER)
    ]
    if gpus < 2:
        return dense
    most, together = counts[0], f"shard={counts[0]} expert={counts[0]}"
    experts, large = partial(Case, name="experts", model="30B-A3B"), partial(Case, name="large", model="70B")
    return [
        *dense,
        Case(name="long", gpus=most, mesh=f"context={most}", length=32768 * most, steps=1, seconds=80),
        *(experts(gpus=most, mesh=together, method=method) for method in ("full", "lora")),
        *(large(gpus=most, mesh=f"{axis}={most}", method="lora", length=4096) for axis in ("shard", "tensor")),
        Case(name="killed", gpus=most, seconds=60),
        *(experts(gpus=most, mesh=f"shard={most}", method=method) for method in ("full", "lora")),
    ]


def made_tiny(case: Case) -> Case:
    return replace(case, length=64 * case.rows_divided, seconds=200)


def shape_of(case: Case, tiny: bool) -> Json:
    return MODELS[case.model] | (TINY_SHAPES[case.model] if tiny else {})


def predict(case: Case, tiny: bool) -> MeshPlan | str:
    """Returns the step that fits, or why none does."""
    try:
        plan = plan_training(build(shape_of(case, tiny), dtype_of(tiny)), case.setting, case.gib)
    except LigerzooError as error:
        return str(error)
    least = min(step.peak for step in plan.uniform.values())
    return plan.step or f"does not fit: needs {least / 2**30:.1f} of {case.gib:g} GiB with everything recomputed"


def dtype_of(tiny: bool) -> torch.dtype:
    return torch.float32 if tiny else torch.bfloat16


# In the processes of a case


def work(task: Json) -> None:
    """Trains in this process; the first process prints a line of JSON for each setting."""
    case, tiny = Case(**task["case"]), task["tiny"]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1 if tiny else 8)
    try:
        processes = start_processes(sharded_training.DEVICE)
        plan, device = task["plan"], processes.device
        is_ours = case.provider == OURS
        for row in ours(case, plan, tiny, device, task["trace"]) if is_ours else theirs(case, tiny, device):
            if processes.is_main:
                print(json.dumps(row), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # others may wait for this process, and it for them
    stop_processes()


def ours(case: Case, plan: Json, tiny: bool, device: torch.device, trace: str | None) -> Iterator[Json]:
    """Trains as planned, and profiles a step if its trace has a path."""
    torch.manual_seed(0)
    model = build(shape_of(case, tiny), dtype_of(tiny), "meta" if case.gpus > 1 else device)
    if case.method == "lora":
        add_lora(model, RANK)
    if case.gpus > 1:
        parallelize(model, case.mesh)
        initialize_sharded(model)
    model.model.activation_plan = levels_of(plan)
    if plan["keeps_gathered"]:
        keep_gathered(model)
    optimizer = make_optimizer(model, "adamw", lr=1e-5, stochastic_rounding=trains_bfloat16(model))
    training = training_of(case, model, optimizer)
    row = measured(case, training, tiny)
    yield row if trace is None else {**row, "profile": training.profile(Path(trace))}


def theirs(case: Case, tiny: bool, device: torch.device) -> Iterator[Json]:
    """Trains in the peer's settings, from the one with the least memory to the one with the most."""
    torch.manual_seed(0)
    config = sharded_training.TINY if tiny else LLAMA_8B
    training = training_of(case, liger(config, Variant("", reduce_dtype=None), dtype_of(tiny), device))
    training.recompute(True)
    yield {"recomputed": RECOMPUTED, **measured(case, training, tiny)}
    training.recompute(False)
    yield {"recomputed": KEPT, **measured(case, training, tiny)}
    if case.gpus > 1:
        training.model.set_reshard_after_forward(False)  # type: ignore[operator]
        yield {"recomputed": f"{KEPT}, {GATHERED}", **measured(case, training, tiny)}


def training_of(case: Case, model: Any, optimizer: torch.optim.Optimizer | None = None) -> Training:
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(1 + rank // case.rows_divided)
    return Training(model, case.length, model.config.vocab_size, optimizer)


def measured(case: Case, training: Training, tiny: bool) -> Json:
    clean_up()
    ms = training.milliseconds(case.steps, warmup=min(2, case.steps))
    found = {"ms": ms, "host_ms": training.host_ms, "tokens_per_s": case.length / case.rows_divided / ms * 1e3}
    losses = gather_objects(training.loss.item())
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"losses: got {losses}; expected finite numbers")
    peak = 0.0 if tiny else torch.cuda.max_memory_allocated() / 2**30
    return {**found, "peak_gib": max(gather_objects(peak)), "loss": losses[0]}


# In the process that starts them


def run_case(
    case: Case, plan: MeshPlan | str | None, gpus: Sequence[int], limit: float, tiny: bool, trace: str | None
) -> Json:
    """Runs a case on some GPUs, and returns its row.

    Args:
        case: what to train.
        plan: of our step, or the error of planning it; None for other cases.
        gpus: their indices.
        limit: seconds.
        tiny: whether models are tiny, on a CPU.
        trace: path for the trace of one of our steps; None for none.
    """
    if isinstance(plan, str):
        return {**case.facts(), "error": plan}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    own = [] if tiny else [visible[gpu] if any(visible) else str(gpu) for gpu in gpus]
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}
    if case.name == "killed":
        return {**case.facts(), **killed_run(case.gpus, limit, environment, SMALL if tiny else LARGE)}
    figures = {} if plan is None else predicted_figures(plan)
    task = {"case": asdict(case), "plan": figures, "tiny": tiny, "trace": trace}
    command = ["benchmarks.mesh_scaling", "--worker", json.dumps(task)]
    output, failure = run_module(command, case.gpus, limit, environment)
    settings = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    row = case.facts() | figures
    if not settings:
        return {**row, "error": failure or "no result"}
    others = {one["recomputed"]: one["tokens_per_s"] for one in settings if "recomputed" in one}
    row |= max(settings, key=lambda one: one["tokens_per_s"])
    row |= {"settings": others} if others else {}
    return {**row, "stopped": failure} if failure else row


def predicted_figures(plan: MeshPlan) -> Json:
    levels = [[name, len(list(group))] for name, group in groupby(level.name for level in plan.activations.levels)]
    return {
        "predicted_ms": 1e3 * plan.time.seconds,
        "predicted_gib": plan.activations.step.peak / 2**30,
        "levels": levels,
        "keeps_gathered": plan.activations.keeps_gathered,
    }


def levels_of(row: Json) -> tuple[Recompute, ...]:
    """Returns what backward recomputed of each block."""
    return tuple(Recompute[name] for name, count in row["levels"] for _ in range(count))


def run_all(
    cases: Sequence[Case], gpus: int, deadline: float, run: Callable[[Case, Sequence[int], float], Json]
) -> Iterator[Json]:
    """Runs cases in their order, side by side on different GPUs, and yields their rows as they end.

    Args:
        cases: what to run.
        gpus: number of GPUs.
        deadline: of `time.monotonic`.
        run: returns the row of a case, given the GPUs and the seconds that it may take.
    """
    free, running = set(range(gpus)), dict[Future[Json], list[int]]()

    def ended() -> Iterator[Json]:
        for one in wait(running, return_when=FIRST_COMPLETED).done:
            free.update(running.pop(one))
            yield one.result()

    with ThreadPoolExecutor(max_workers=max(1, gpus)) as threads:
        for case in cases:
            while len(free) < case.gpus:
                yield from ended()
            left = deadline - time.monotonic()
            if left < case.seconds:
                yield {**case.facts(), "skipped": f"needs {case.seconds:.0f} of {left:.0f} s"}
                continue
            own = sorted(free)[: case.gpus]
            free.difference_update(own)
            running[threads.submit(run, case, own, min(2 * case.seconds, left))] = own
        while running:
            yield from ended()


def compared(rows: list[Json]) -> list[Json]:
    """Adds to each row its share of the tokens/s of one GPU, and its speed over the peer's."""
    for row in rows:
        same = [one for one in rows if one["case"] == row["case"] and "ms" in one]
        if "ms" not in row:
            continue
        for one in same:
            if one["provider"] == row["provider"] and one["gpus"] == 1:
                row["share"] = row["tokens_per_s"] / one["tokens_per_s"]
            if one["provider"] == PEER and one["gpus"] == row["gpus"] and row["provider"] == OURS:
                row["over_peer"] = row["tokens_per_s"] / one["tokens_per_s"]
    return rows


def identity(row: Json) -> tuple[Any, ...]:
    """What a row measures."""
    return row["case"], row["provider"], row["gpus"], row["mesh"], row["method"]


def main() -> None:
    names = list(dict.fromkeys(case.name for case in all_cases(2)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="cases")
    parser.add_argument("--providers", nargs="+", default=[OURS, PEER], choices=[OURS, PEER])
    parser.add_argument("--counts", nargs="+", type=int, metavar="N", help="numbers of GPUs (default: 1, 2, 4, ...)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to use (default: all; 2 processes with --tiny)")
    parser.add_argument("--seconds", type=float, default=470, help="time of the whole run (default: 470)")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU, to try the benchmark")
    parser.add_argument("--profile", action="store_true", help="also profile a step of ours, next to --out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mesh_scaling.json"))
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="results whose rows stay (default: --out)")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
        return
    let_segments_grow()  # as `ligerzoo train` does
    deadline, tiny = time.monotonic() + arguments.seconds, arguments.tiny
    gpus = arguments.gpus or (2 if tiny else torch.cuda.device_count())
    order = [
        case
        for case in (made_tiny(case) if tiny else case for case in all_cases(gpus))
        if case.name in arguments.only
        and case.provider in arguments.providers
        and case.gpus in (arguments.counts or [case.gpus])
    ]
    planned = [case for case in order if case.provider == OURS and case.name != "killed"]
    rows = earlier_rows(arguments.earlier or arguments.out)
    workers = max(1, min(len(planned), (os.cpu_count() or 1) // 4))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        plans = {case: pool.submit(predict, case, tiny) for case in planned}

        def run(case: Case, own: Sequence[int], limit: float) -> Json:
            name = f".{case.name}.{case.mesh.replace(' ', '.')}.{case.method}.trace.json.gz"
            trace = str(arguments.out.with_suffix(name)) if arguments.profile else None
            return run_case(case, plans[case].result() if case in plans else None, own, limit, tiny, trace)

        found = run_all(order, gpus, deadline, run)
        for row in tqdm(found, total=len(order), unit="case"):
            tqdm.write(json.dumps(row))
            if "skipped" in row:
                continue
            rows = [one for one in rows if identity(one) != identity(row)] + [row]
            rows = compared(sorted(rows, key=lambda one: (names.index(one["case"]), one["gpus"], one["method"])))
            save_result(arguments.out, {"what": __doc__, "rows": rows}, {"rows": without_profiles(rows)})


if __name__ == "__main__":
    main()
