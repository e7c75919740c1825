"""A run of `ligerzoo train` of which one process is killed, and which half as many continue.

    python -m benchmarks.killed_run --gpus 4
    python -m benchmarks.killed_run --gpus 4 --cpu

torchrun starts the command with a small model and as many processes as GPUs. When the run has logged some steps, one of
its processes gets SIGKILL. Measured is the time until all others have ended, torchrun too. The same command with
`--resume` on half as many processes then trains the rest of the epoch. The samples of the steps that were saved, and of
those after, must be all samples, each once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.processes import Json, below, error_in, kill_all, module_command, run_module
from ligerzoo.train.log import read_log
from ligerzoo.train.run_checkpoint import newest_checkpoint

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "ligerzoo/demo/assets/tiny-python-llama"


class Size(NamedTuple):
    """Of a run: its samples, the rows of a step of all processes, their tokens, and the steps before it is killed."""

    samples: int
    rows: int
    tokens: int
    steps: int


LARGE, SMALL = Size(4096, 16, 256, 30), Size(160, 8, 128, 3)


def killed_run(count: int, limit: float, environment: Mapping[str, str], size: Size = LARGE) -> Json:
    """Returns how long the other processes needed to end, and how many samples were lost or repeated.

    Args:
        count: number of processes.
        limit: seconds for both runs.
        environment: of torchrun; without a visible GPU they run on the CPU.
        size: of the runs.
    """
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        data, output, errors = directory / "data.jsonl", directory / "run", directory / "errors.txt"
        data.write_text("".join(f"{json.dumps(sample(number))}\n" for number in range(size.samples)), encoding="utf-8")
        environment = {**environment, "SAMPLES": name, "PYTHONPATH": os.pathsep.join([str(ROOT), *_path(environment)])}
        with errors.open("w") as file:
            command = module_command(command_line(data, output, count, size), count)
            run = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=file)
        try:
            while steps_of(output) < size.steps:
                if run.poll() is not None or time.monotonic() > deadline:
                    return {"error": f"{steps_of(output)} steps: {error_in(errors.read_text())}"}
                time.sleep(0.02)
            every = below(run.pid)
            trainers = [pid for pid in every if is_trainer(pid)]
            os.kill(random.choice(trainers), signal.SIGKILL)
            begin = time.monotonic()
            run.wait(max(0.0, deadline - begin))
            while any(is_running(pid) for pid in every):
                time.sleep(0.01)
            ended = time.monotonic() - begin
        except subprocess.TimeoutExpired:
            return {"error": "the other processes did not end"}
        finally:
            kill_all(run.pid)
            run.wait()
        saved = newest_checkpoint(output)
        done = 0 if saved is None else int(saved.name.partition("-")[2])
        found = {"killed_after": steps_of(output), "saved": done, "ended_s": ended, "processes": len(trainers)}
        before = trained(directory, last=done)
        continued = count // 2
        left = deadline - time.monotonic()
        _, failure = run_module(command_line(data, output, continued, size), continued, left, environment)
        if failure:
            return {**found, "error": failure}
        times = Counter(before + trained(directory))
        return {
            **found,
            "resumed_on": continued,
            "steps": steps_of(output),
            "samples": len(times),
            "lost": size.samples - len(times),
            "repeated": sum(number > 1 for number in times.values()),
        }


def _path(environment: Mapping[str, str]) -> list[str]:
    return [path for path in [environment.get("PYTHONPATH", "")] if path]


def sample(number: int) -> Json:
    source = random.Random(number)
    words = [f"value_{source.randrange(100)}" for _ in range(source.randrange(2, 20))]
    return {"prompt": f"def function_{number}():\n", "completion": f"    return {' + '.join(words)}\n"}


def command_line(data: Path, output: Path, processes: int, size: Size) -> list[str]:
    return [
        "ligerzoo", "train", str(MODEL), "--data", str(data), "--output", str(output), "--resume",
        "--import", "benchmarks.recorded_samples", "--dtype", "float32", "--too-long", "truncate",
        "--seq-length", str(size.tokens), "--batch-size", "1", "--accumulate", str(size.rows // processes),
        "--save-every", "2", "--lr", "1e-4",
    ]  # fmt: skip


def steps_of(output: Path) -> int:
    """Returns the number of steps in the log."""
    return len(read_log(output / "log.jsonl"))


def is_trainer(pid: int) -> bool:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"train" in arguments and b"torch.distributed.run" not in arguments


def is_running(pid: int) -> bool:
    """Returns whether a process has not ended, not even as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def trained(directory: Path, last: int | None = None) -> list[str]:
    """Returns the samples that all processes have trained, up to a step, and deletes their files."""
    found = []
    for file in directory.glob("*.txt"):
        if not file.stem.isdigit():
            continue
        lines = [line.split(" ", 1) for line in file.read_text(encoding="utf-8").splitlines()]
        found += [source for step, source in lines if last is None or int(step) <= last]
        file.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), metavar="N", help="default: all")
    parser.add_argument("--limit", type=float, default=300, help="seconds")
    parser.add_argument("--cpu", action="store_true", help="on the CPU")
    arguments = parser.parse_args()
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ} | ({"CUDA_VISIBLE_DEVICES": ""} if arguments.cpu else {})
    size = SMALL if arguments.cpu else LARGE
    print(json.dumps(killed_run(arguments.gpus, arguments.limit, environment, size)))


if __name__ == "__main__":
    main()
