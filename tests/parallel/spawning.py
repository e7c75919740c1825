"""Runs a function in several processes with a gloo process group."""

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PROCESSES = 2


def _process(rank: int, directory: str, processes: int, work: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=processes)
    try:
        work(rank)
    finally:
        dist.destroy_process_group()


def on_all_processes(work: Callable[[int], None], processes: int = PROCESSES) -> None:
    """Calls `work(rank)` in each process; `work` must be picklable."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as directory:
        mp.set_forkserver_preload([__name__, "ligerzoo.parallel"])  # imports torch once for all tests
        mp.start_processes(  # type: ignore[no-untyped-call]
            _process, (directory, processes, work), processes, start_method="forkserver"
        )
