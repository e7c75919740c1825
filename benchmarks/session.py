"""Runs benchmarks and tests on the GPUs of a machine that is there for a limited time.

    python -m benchmarks.session --list
    python -m benchmarks.session --seconds 500 --out session.json
    python -m benchmarks.session --jobs sharded 'training_*' --seconds 500 --out session.json
    python -m benchmarks.session --unpack session.json

A job that uses all GPUs runs alone. The others run side by side, one on each GPU, in the order of the list. A job
starts only if its limit fits into the remaining time, and is stopped at its limit: by an interrupt first, so that
pytest prints what failed. The file has the end of each job's output and the results that it wrote. It is replaced every
few seconds, so that little is lost if the machine is. `--unpack` writes the results to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import encoders, training
from benchmarks.measure import compact_json
from benchmarks.workloads import select

RESULTS = Path("benchmarks/results")
PEER = "'transformers + liger-kernel'"
FLEX_PEER = "'transformers + liger-kernel, FlexAttention'"
PYTEST = "pytest -v -n 14 --dist worksteal -p no:benchmark -p no:cacheprovider --timeout 100 -rfE --tb short"
"""With a line for each test, so that failures are known if pytest is stopped."""
OUTPUT = 20_000
"""Characters of a job's output that are kept, from its end."""

MERGED = {"training.json": training.Results, "encoders.json": encoders.Results}
"""Files that several jobs fill."""


@dataclass(frozen=True)
class Job:
    """A command.

    Attributes:
        seconds: limit of its time.
        command: a module and its arguments, for `python -m`. "{out}" is the file for its results, "{gpus}" the number
            of GPUs.
        result: name of the file in benchmarks/results that it writes; empty for none.
        all_gpus: it needs all GPUs of the machine, at least two.
        with_fla: it measures flash-linear-attention or mamba-ssm too, which are in the directory that `--fla` names.
            The path of other jobs lacks them: transformers would use them in the tests, whose tolerances they exceed.
    """

    seconds: float
    command: str
    result: str = ""
    all_gpus: bool = False
    with_fla: bool = False


def training_job(seconds: float, workload: str, providers: str = f"ligerzoo {PEER}", *, with_fla: bool = False) -> Job:
    command = f"benchmarks.training --workloads {workload} --providers {providers} --out {{out}}"
    return Job(seconds, command, "training.json", with_fla=with_fla)


def suite_job(seconds: float, name: str, arguments: str = "", *, with_fla: bool = False) -> Job:
    return Job(seconds, f"benchmarks.{name} --out {{out}} {arguments}", f"{name}.json", with_fla=with_fla)


def mesh_job(seconds: float, name: str, arguments: str) -> Job:
    earlier = f"--earlier {RESULTS}/{name}.json"
    return Job(seconds, f"benchmarks.{name} --out {{out}} {earlier} {arguments}", f"{name}.json", all_gpus=True)


JOBS = {
    "sharded": Job(
        280,
        "torch.distributed.run --nproc-per-node {gpus} -m benchmarks.sharded_training --profile --out {out}",
        "sharded_training.json",
        all_gpus=True,
    ),
    "mesh_scaling": mesh_job(490, "mesh_scaling", "--gpus {gpus} --seconds 470"),
    "meshes": mesh_job(300, "meshes", "--only dense experts --providers ligerzoo"),
    "tests_kernels": Job(240, f"{PYTEST} -m 'not thorough' tests/kernels tests/layers tests/losses tests/memory"),
    "training_8b_1x8192": training_job(90, "llama_8b_1x8192"),
    "training_8b_2x8192": training_job(90, "llama_8b_2x8192"),
    "training_8b_4x8192": training_job(100, "llama_8b_4x8192"),
    "delta_rule": suite_job(420, "delta_rule", "--patience 200", with_fla=True),
    "exact_updates": suite_job(240, "exact_updates"),
    "packed_attention": suite_job(120, "packed_attention"),
    "delta_launches": Job(200, "benchmarks.recurrence_launches --out {out}", "delta_launches.json"),
    "state_space": suite_job(150, "state_space", "--patience 60", with_fla=True),
    "delta_channels": suite_job(150, "delta_channels", "--patience 130", with_fla=True),
    "ssd_launches": Job(
        150, "benchmarks.recurrence_launches --shape Nemotron-H-8B --out {out}", "ssd_launches.json", with_fla=True
    ),
    "attention_sinks": suite_job(90, "attention_sinks"),
    "latent_attention": suite_job(120, "latent_attention"),
    "latent_decoding": suite_job(40, "latent_decoding"),
    "training_qwen3_30b_lora": training_job(90, "qwen3_30b_a3b_lora_1x8192", "ligerzoo"),
    "training_qwen3_5_4b": training_job(120, "qwen3_5_4b_1x8192", with_fla=True),
    "training_gemma4_e4b_1x4096": training_job(120, "gemma4_e4b_1x4096"),
    "training_gemma4_e4b_1x8192": training_job(120, "gemma4_e4b_1x8192"),
    "training_gemma4_e4b_flex": training_job(120, "'gemma4_e4b_*'", FLEX_PEER),
    "training_nemotron_nano_lora": training_job(120, "nemotron_nano_30b_lora_1x8192", "ligerzoo"),
    "large_heads": suite_job(120, "large_heads"),
    "training_gpt_oss_20b": training_job(100, "gpt_oss_20b_1x8192", "ligerzoo"),
    "tests_train": Job(100, f"{PYTEST} tests/train/test_on_gpu.py tests/train/test_captured_step.py"),
    "tests_models": Job(300, f"{PYTEST} -m 'not thorough' tests/models tests/generate tests/vision tests/parallel"),
    "tests_memory": Job(60, "pytest -p no:benchmark -p no:cacheprovider tests/generate/test_memory.py"),
    "loading_gpt_oss_20b": Job(
        120,
        "benchmarks.loading --checkpoint gpt-oss-20b --providers 'raw safetensors' ligerzoo --rounds 2 --out {out}",
        "loading_gpt_oss_20b.json",
    ),
    "memory": suite_job(180, "memory"),
    "training_1b": training_job(90, "llama_1b_8x2048"),
    "small_models": suite_job(120, "small_models"),
    "contrastive": suite_job(150, "contrastive", "--patience 25"),
    **{
        f"encoders_{name}": suite_job(170, "encoders", f"--workloads {workloads}")
        for name, workloads in {
            "mlm": "modernbert_large_mlm",
            "embedding": "modernbert_large_embedding",
            "encoding": "modernbert_large_encoding bert_base_encoding",
            "bert": "bert_base_mlm bert_base_embedding",
        }.items()
    },
}


class Session:
    """Runs jobs, and writes the file of results.

    Args:
        jobs: by name, in order.
        gpus: number of GPUs; 0: jobs run one after the other on the CPU.
        deadline: of `time.monotonic`.
        out: the file.
        fla: directory of flash-linear-attention and mamba-ssm; None without.
    """

    def __init__(self, jobs: dict[str, Job], gpus: int, deadline: float, out: Path, fla: Path | None = None) -> None:
        self._waiting, self._gpus, self._deadline, self._out = dict(jobs), gpus, deadline, out
        self._fla = fla
        self._found: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._progress = tqdm(total=len(jobs), unit="job")

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            self._directory = Path(directory)
            for name in [name for name, job in self._waiting.items() if job.all_gpus]:
                self._run(name, self._waiting.pop(name), None)
            threads = [threading.Thread(target=self._work, args=(gpu,)) for gpu in range(max(1, self._gpus))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _work(self, gpu: int) -> None:
        """Runs the next job on this GPU until none is left."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                job = self._waiting.pop(name)
            self._run(name, job, gpu if self._gpus else None)

    def _run(self, name: str, job: Job, gpu: int | None) -> None:
        left = self._deadline - time.monotonic()
        if job.seconds > left or (job.all_gpus and self._gpus < 2):
            why = f"needs {job.seconds:.0f} s of {left:.0f}" if job.seconds > left else "needs several GPUs"
            self._report(name, {"skipped": why}, is_last=True)
            return
        log, result = self._directory / f"{name}.log", self._directory / f"{name}.json"
        arguments = shlex.split(job.command.format(out=result, gpus=self._gpus))
        environment = dict(os.environ)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        if job.with_fla and self._fla is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(self._fla)]))
        begin = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments], stdout=file, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            while process.poll() is None and time.monotonic() - begin < job.seconds:
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    self._report(name, found_by(job, log, result), is_last=False)
            is_late = process.poll() is None
            stop(process)
        ended = {"exit": "stopped at its limit" if is_late else process.returncode, "s": time.monotonic() - begin}
        self._report(name, ended | found_by(job, log, result), is_last=True)

    def _report(self, name: str, found: dict[str, Any], *, is_last: bool) -> None:
        with self._lock:
            self._found[name] = found
            partial = self._out.with_suffix(".partial")
            partial.write_text(json.dumps(self._found, indent=1), encoding="utf-8")
            partial.replace(self._out)
            if is_last:
                self._progress.update()
                lines = found.get("output", "").strip().splitlines()[-1:]
                shown = {key: value for key, value in found.items() if key in ("exit", "s", "skipped")}
                self._progress.write(f"{name}: {shown} {''.join(lines)[:200]}")


def found_by(job: Job, log: Path, result: Path) -> dict[str, Any]:
    """What a job has written until now."""
    output = log.read_text(encoding="utf-8", errors="replace")
    found: dict[str, Any] = {"output": output[-OUTPUT:]}
    if failed := sorted(set(re.findall(r"(?m)(?:FAILED|ERROR) (tests/.+?)(?: - .*)?\s*$", output))):
        found["failed"] = failed
    if job.result and result.exists():
        found["result"] = {job.result: json.loads(result.read_text(encoding="utf-8"))}
    return found


def stop(process: subprocess.Popen[bytes], grace: float = 15.0) -> None:
    """Ends a process with all that it started, after an interrupt."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def unpack(path: Path, directory: Path = RESULTS) -> None:
    """Writes the results of a session to files; those of several jobs are merged into one file."""
    for name, found in json.loads(path.read_text(encoding="utf-8")).items():
        for file, result in found.get("result", {}).items():
            print(f"{name}: {directory / file}")
            if file in MERGED:
                with tempfile.TemporaryDirectory() as temporary:
                    part = Path(temporary) / file
                    part.write_text(json.dumps(result), encoding="utf-8")
                    MERGED[file](directory / file).merge(part)
            else:
                (directory / file).write_text(compact_json(result) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the jobs and their limits")
    parser.add_argument("--jobs", nargs="+", metavar="NAME", default=["*"], help="names or patterns; default: all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time of the session; default: 3600")
    parser.add_argument("--out", type=Path, default=Path("session.json"))
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="write the results of a session; run nothing")
    parser.add_argument(
        "--fla", type=Path, metavar="DIR", help="directory of flash-linear-attention and mamba-ssm, for their jobs"
    )
    arguments = parser.parse_args(argv)
    if arguments.unpack:
        unpack(arguments.unpack)
        return
    names = select(arguments.jobs, tuple(JOBS))
    if arguments.list:
        for name in names:
            print(f"{JOBS[name].seconds:4.0f} s  {name:24} {JOBS[name].command}")
        return
    deadline = time.monotonic() + arguments.seconds
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    jobs = {name: JOBS[name] for name in names}
    Session(jobs, torch.cuda.device_count(), deadline, arguments.out, arguments.fla).run()


if __name__ == "__main__":
    main()
