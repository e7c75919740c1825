"""Runs of several hosts: a dead process ends the others, SIGTERM saves, and a scheduler starts the run again."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
import yaml

from ligerzoo.errors import CheckpointError
from ligerzoo.parallel import liveness
from ligerzoo.train import processes
from ligerzoo.train.log import RunLog, read_log
from ligerzoo.train.run_checkpoint import newest_checkpoint
from ligerzoo.train.run_state import RunState
from ligerzoo.train.trained_state import TrainedState
from tests.parallel import spawning
from tests.train.test_elastic import compare, recorded, samples
from tests.train.test_resume import environment
from tests.train.tiny_run import arguments, options, train

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

# One process dies


def start(work: Callable[[int], None], count: int, directory: str) -> list[Any]:
    """Starts processes with a process group, which nothing ends together."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(spawning.PRELOADED)
    args = [(rank, directory, count, "gloo", work) for rank in range(count)]
    started = [context.Process(target=spawning._process, args=one) for one in args]
    for process in started:
        process.start()
    return started


def dying(rank: int, given: dict[str, Any], is_stuck: bool) -> None:
    """Trains; process 1 dies in step 2, in which process 0 waits in a collective, or forever."""
    liveness.GRACE = 0.5
    log_step = RunLog.step

    def logged(self: RunLog, step: int, **values: Any) -> None:
        if step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2 and is_stuck:
            time.sleep(1000)
        log_step(self, step, **values)

    RunLog.step = logged  # type: ignore[method-assign]
    with open(f"{given['output']}-{rank}.txt", "w") as file:
        os.dup2(file.fileno(), 2)
        train(given)


@pytest.mark.parametrize("is_stuck", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_dead_process_ends_the_others(checkpoint: Path, data: Path, tmp_path: Path, is_stuck: bool) -> None:
    """With one line that names it, also if they would wait forever."""
    given = options(checkpoint, data, tmp_path / "run", batch_size=1)
    with tempfile.TemporaryDirectory() as directory:
        started = start(partial(dying, given=given, is_stuck=is_stuck), 2, directory)
        started[1].join(60)
        died = time.monotonic()
        started[0].join(60)
        assert time.monotonic() - died < 10
    assert started[1].exitcode == -signal.SIGKILL
    assert started[0].exitcode == 1
    assert (
        "rank 1: a process of the run has died, so all end. Its output says why."
        in Path(f"{given['output']}-0.txt").read_text()
    )


def test_storage_that_is_not_shared(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "gather", lambda own: [tmp_path / "checkpoint-2"])  # what the main process sees
    with pytest.raises(
        CheckpointError, match=r"checkpoint-2: is not on this host; got .*Choose an output directory on"
    ):
        train(options(checkpoint, data, tmp_path / "run", resume=True))


def continuing(rank: int, given: dict[str, Any], killed: tuple[int, int, float] | None = None) -> None:
    """Trains. A process of this rank kills itself these seconds after it has begun to save a step."""
    save = RunState.save

    def saving(self: RunState, step: int, trained: TrainedState) -> None:
        if killed is not None and killed[:2] == (rank, step):
            threading.Timer(killed[2], os.kill, (os.getpid(), signal.SIGKILL)).start()
        save(self, step, trained)

    RunState.save = saving  # type: ignore[method-assign]
    with open(os.devnull, "w") as file:
        os.dup2(file.fileno(), 2)
        recorded(given)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20])
def test_kills_at_random_moments(checkpoint: Path, data: Path, tmp_path: Path, kills: int) -> None:
    """Of one of four processes, half of them while it saves. The others end, and the run continues on 2 or 8.

    Together, both have trained each sample in its step, and none twice.
    """
    source, shared = random.Random(0), {"batch_size": 1, "max_steps": 8, "save_every": 2, "keep": 1, "resume": True}
    whole = options(checkpoint, data, tmp_path / "whole", **shared, accumulate=2)
    begin = time.monotonic()
    spawning.on_all_processes(partial(continuing, given=whole), 4)
    seconds = time.monotonic() - begin
    steps: list[int] = []
    endings, unfinished, number = [], 0, 0
    while len(steps) < kills:
        number += 1
        given = {**whole, "output": str(tmp_path / f"killed-{number}")}
        victim, is_saving = source.randrange(4), number % 4 < 2
        killed = (victim, source.choice((2, 4, 6)), source.uniform(0, 0.2)) if is_saving else None
        with tempfile.TemporaryDirectory() as directory:
            started = start(partial(continuing, given=given, killed=killed), 4, directory)
            if is_saving:
                started[victim].join(20 * seconds)
            else:
                time.sleep(source.uniform(0, seconds))
                started[victim].kill()
            died = time.monotonic()
            for process in started:
                process.join(60)
                assert process.exitcode is not None
            ended = time.monotonic() - died
        output, last = Path(given["output"]), newest_checkpoint(Path(given["output"]))
        done = 0 if last is None else int(last.name.partition("-")[2])
        before = [line for line in samples(given["output"], after=0) if int(line.split()[0]) <= done]
        for file in tmp_path.glob(f"killed-{number}-samples-*"):
            file.unlink()
        if (output / "config.json").exists():
            continue  # the run had ended
        endings.append(ended)
        steps.append(done)
        unfinished += any(path.is_dir() and path != last for path in output.glob("*"))
        count = (2, 8)[len(steps) % 2]
        spawning.on_all_processes(partial(continuing, given={**given, "accumulate": 8 // count}), count)
        compare(given["output"], whole["output"], after=done, to_the_bit=False)
        assert sorted(before + samples(given["output"], after=done)) == samples(whole["output"], after=0)
    assert len(set(steps)) > 2, steps
    print(f"{kills} kills after steps {steps}, {unfinished} of them with a part of a checkpoint")
    print(f"the other processes ended within {max(endings):.1f} s")


# Two agents of torchrun


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for_port(port: int) -> None:
    """Waits until a process listens on a port."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)


class Hosts:
    """Agents of torchrun on this machine, each for one host."""

    def __init__(
        self,
        given: dict[str, Any],
        directory: Path,
        hosts: int,
        processes_per_host: int,
        nodes: str = "",
        restarts: int = 0,
    ) -> None:
        port, log = free_port(), directory / f"{Path(given['output']).name}.txt"
        local, agents = environment() | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}, []
        local["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with log.open("a") as file:
            for _ in range(hosts):
                torchrun = [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes or f"{hosts}"),
                    *("--nproc-per-node", f"{processes_per_host}", "--rdzv-id", "run"),
                    *(
                        "--rdzv-backend",
                        "c10d",
                        "--rdzv-endpoint",
                        f"127.0.0.1:{port}",
                        "--max-restarts",
                        f"{restarts}",
                    ),
                    *("-m", "ligerzoo", *arguments(given)),
                ]
                agents.append(subprocess.Popen(torchrun, env=local, cwd=directory, stdout=file, stderr=file))
                wait_for_port(port)  # the first one has the rendezvous
        self.agents, self.output, self.log = agents, Path(given["output"]), log

    @classmethod
    def of(cls, agents: list[Any], output: Path, log: Path) -> "Hosts":
        """Returns hosts that other commands have started."""
        hosts = cls.__new__(cls)
        hosts.agents, hosts.output, hosts.log = agents, output, log
        return hosts

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in [pid for agent in self.agents for pid in below(agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait()

    def wait_for(self, steps: int, seconds: float = 180) -> None:
        """Waits until the log has this number of lines."""
        end = time.monotonic() + seconds
        while len(read_log(self.output / "log.jsonl")) < steps:
            assert all(agent.poll() is None for agent in self.agents), self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def trainers(self) -> list[int]:
        """Returns the ids of the processes that train."""
        every = [pid for agent in self.agents for pid in below(agent.pid)]
        arguments = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in every}
        return [
            pid
            for pid, given in arguments.items()
            if given[1:4] == [b"-m", b"ligerzoo", b"train"] or b"-u" in given[:2]
        ]

    def join(self, seconds: float) -> list[int]:
        """Returns the exit codes of the agents."""
        return [agent.wait(seconds) for agent in self.agents]


def below(pid: int) -> list[int]:
    """Returns the ids of a process and of the processes that it has started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [pid, *(one for child in listed for one in below(int(child)))]


@pytest.mark.slow
def test_two_hosts_stop_by_sigterm_and_start_again(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """As a scheduler that preempts a job and queues it again: the same command continues the run."""
    given = options(checkpoint, data, tmp_path / "run", batch_size=1, max_steps=40, resume=True)
    with Hosts(given, tmp_path, 2, 1) as hosts:
        hosts.wait_for(2)
        hosts.agents[1].send_signal(signal.SIGTERM)  # of one host
        assert all(hosts.join(60))
    stopped = newest_checkpoint(tmp_path / "run")
    assert stopped is not None
    text = hosts.log.read_text()
    assert text.count(f"--resume continues from {stopped}") == 1, text  # the main process
    with Hosts(given, tmp_path, 2, 1) as hosts:
        assert hosts.join(180) == [0, 0], hosts.log.read_text()
    assert train({**given, "output": str(tmp_path / "whole"), "batch_size": 2}) == 0
    columns = ("step", "tokens", "trained_tokens")
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("run", "whole")]
    assert [[entry[name] for name in columns] for entry in logs[0]] == [[e[name] for name in columns] for e in logs[1]]


@pytest.mark.slow
def test_a_host_dies_and_the_other_one_goes_on(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Its agent and its process are killed; torchrun starts the other host again, which continues the run alone."""
    given = options(checkpoint, data, tmp_path / "run", batch_size=1, max_steps=60, save_every=2, resume=True)
    with Hosts(given, tmp_path, 2, 1, nodes="1:2", restarts=1) as hosts:
        hosts.wait_for(5)
        for pid in below(hosts.agents[1].pid):
            os.kill(pid, signal.SIGKILL)
        hosts.agents.pop().wait()
        hosts.wait_for(60)  # torchrun itself may wait five minutes for the agent that is lost
    assert re.search(r"rank [01]: a process of the run has died", hosts.log.read_text()), hosts.log.read_text()
    assert [entry["step"] for entry in read_log(tmp_path / "run" / "log.jsonl")] == [*range(1, 61)]


# The scripts of docs/several-hosts.md

STUBS = {
    "torchrun": 'exec {python} -m torch.distributed.run "$@"',
    "python": 'exec {python} "$@"',
    "ssh": 'shift; exec bash -c "$*"',
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > requeued; else echo 127.0.0.1; fi',
    "srun": """
export SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!); done
code=0
for task in "${{tasks[@]}}"; do wait "$task"; one=$?; if [ $one -gt $code ]; then code=$one; fi; done
exit $code
""",
}


def files_of_the_page(directory: Path, checkpoint: Path, options: str) -> dict[str, str]:
    """Returns the files of the page for this machine: two hosts of one process, and a small model."""
    port = str(free_port())
    replaced = {
        "meta-llama/Llama-3.1-8B": str(checkpoint), "/shared": str(directory), "--accumulate 4": "",
        "--nproc-per-node 8": "--nproc-per-node 1", "--resume": f"{options} --resume",
        "host-0:29500": f"127.0.0.1:{port}", "ligerzoo-host-0-0.ligerzoo:29500": f"127.0.0.1:{port}", "29500": port,
    }  # fmt: skip
    text = (Path(__file__).parents[2] / "docs" / "several-hosts.md").read_text()
    for name, value in sorted(replaced.items(), key=lambda item: -len(item[0])):
        text = text.replace(name, value)
    blocks = re.findall(r"^```(?:sh|yaml)\n((?:#![^\n]*\n)?# (\S+)\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    return {name: block for block, name in blocks}


def commands(name: str, files: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Returns the shell scripts that a launcher starts, with their environments."""
    match name:
        case "ssh":
            return [(files["start.sh"], {})]
        case "slurm":
            return [(files["train.sbatch"], {"SLURM_JOB_NODELIST": "host-[0-1]", "SLURM_JOB_ID": "7"})]
        case "skypilot":
            shared = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\nb"}
            run = yaml.safe_load(files["train.yaml"])["run"]
            return [(run, {**shared, "SKYPILOT_NODE_RANK": str(rank)}) for rank in range(2)]
        case _:
            (job,) = yaml.safe_load(files["jobset.yaml"])["spec"]["replicatedJobs"]
            (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
            assert container["command"] == ["bash", "-c"]
            return [(container["args"][0], {"JOB_COMPLETION_INDEX": str(rank)}) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ssh", "slurm", "skypilot", "kubernetes"])
def test_the_page_of_several_hosts(checkpoint: Path, data: Path, tmp_path: Path, launcher: str) -> None:
    """Starts, is preempted by SIGTERM, which saves, and starts again as a scheduler does."""
    shutil.copy(data, tmp_path / "train.jsonl")
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{text.format(python=sys.executable)}\n")
        (stubs / name).chmod(0o755)
    files = files_of_the_page(tmp_path, checkpoint, "--max-steps 40 --seq-length 64 --dtype float32 --device cpu")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    local = environment() | {"GLOO_SOCKET_IFNAME": "lo", "PATH": f"{stubs}:{os.environ['PATH']}"}
    codes: list[list[int]] = []
    for is_first in (True, False):
        with (tmp_path / "output.txt").open("a") as file:
            started = [
                subprocess.Popen(["bash", "-c", script], env=local | extra, cwd=tmp_path, stdout=file, stderr=file)
                for script, extra in commands(launcher, files)
            ]
        hosts = Hosts.of(started, tmp_path / "run", tmp_path / "output.txt")
        with hosts:
            if is_first:
                hosts.wait_for(2)
                for pid in hosts.trainers():
                    os.kill(pid, signal.SIGTERM)
            codes.append(hosts.join(240))
    text = (tmp_path / "output.txt").read_text()
    assert codes[1] == [0] * len(started), text
    assert "--resume continues from" in text
    assert [entry["step"] for entry in read_log(tmp_path / "run" / "log.jsonl")] == [*range(1, 41)]
    if launcher == "slurm":
        assert codes[0] == [130]
        assert (tmp_path / "requeued").read_text() == "7\n"
