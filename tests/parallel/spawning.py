"""Runs a function in several processes with a process group."""

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PROCESSES = 2
PRELOADED = [
    __name__,
    "pytest",
    "torch._dynamo",
    "ligerzoo.parallel",
    "ligerzoo.generate",
    "ligerzoo.train.recipes.sft",
]
"""Modules that take seconds to import: the server imports them once, and all processes are forked from it."""


def _process(rank: int, directory: str, processes: int, backend: str, work: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{directory}/rendezvous", rank=rank, world_size=processes)
    try:
        work(rank)
    finally:
        dist.destroy_process_group()


def on_all_processes(work: Callable[[int], None], processes: int = PROCESSES, backend: str = "gloo") -> None:
    """Calls `work(rank)` in each process, with "nccl" on its GPU; `work` must be picklable."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as directory:
        mp.set_forkserver_preload(PRELOADED)
        mp.start_processes(  # type: ignore[no-untyped-call]
            _process, (directory, processes, backend, work), processes, start_method="forkserver"
        )
