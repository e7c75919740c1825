"""The processes of a run: started by torchrun, one per device.

torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without them a run is one process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ligerzoo.device import available_device
from ligerzoo.dtensors import background_group
from ligerzoo.errors import ConfigError, LigerzooError

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_NAMES = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Processes:
    """This process among those of a run.

    Attributes:
        rank: index of this process, from 0.
        count: number of processes.
        local_rank: index of this process on its host.
        device: the device of this process.
    """

    rank: int
    count: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0


def read_environment() -> dict[str, int] | None:
    """Returns RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them; None if no such variable is set.

    Raises:
        ConfigError: Some variables of torchrun are missing, not numbers, or inconsistent.
    """
    given = {name: os.environ[name] for name in _NAMES if name in os.environ}
    if not given.keys() & set(_NUMBERS):
        return None
    remedy = "Start all processes with torchrun, or unset these variables to run one process."
    if missing := [name for name in _NAMES if name not in given]:
        what, got = "variables of torchrun are missing", ", ".join(f"{name}={value}" for name, value in given.items())
        expected = f"{' and '.join(missing)} as well"
        raise ConfigError(what, where="environment", got=got, expected=expected, remedy=remedy)
    numbers = {}
    for name in _NUMBERS:
        if not given[name].isascii() or not given[name].isdigit():
            where, expected = f"environment variable {name}", "an integer, 0 or more"
            raise ConfigError("not a number", where=where, got=repr(given[name]), expected=expected, remedy=remedy)
        numbers[name] = int(given[name])
    for name in ("RANK", "LOCAL_RANK"):
        if numbers[name] >= numbers["WORLD_SIZE"]:
            where, expected = f"environment variable {name}", f"less than WORLD_SIZE, {numbers['WORLD_SIZE']}"
            raise ConfigError("not a rank", where=where, got=numbers[name], expected=expected, remedy=remedy)
    return numbers


def start_processes(device: str | torch.device | None = None, *, timeout: timedelta | None = None) -> Processes:
    """Joins the process group that torchrun's environment describes, and selects the device of this process.

    Without torchrun's variables there is one process and no process group. A group that is initialized already is used.

    Args:
        device: "cuda" or "cpu". Default: "cuda" if there is a GPU. On GPUs, process i of a host gets GPU i.
        timeout: how long a collective may wait for other processes. Default: torch's, 10 minutes with NCCL.

    Raises:
        ConfigError: The environment is inconsistent, or the host has fewer GPUs than processes.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    numbers = read_environment()
    if numbers is None and not dist.is_initialized():
        return Processes(0, 1, 0, available_device(device))
    kind = torch.device(device).type
    if numbers is None:
        numbers = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    own = torch.device(kind)
    if kind == "cuda":
        if numbers["LOCAL_RANK"] >= torch.cuda.device_count():
            what, where = "more processes than GPUs on this host", "environment variable LOCAL_RANK"
            expected = f"less than {torch.cuda.device_count()}, the number of GPUs"
            remedy = "Start torchrun with a smaller --nproc-per-node."
            raise ConfigError(what, where=where, got=numbers["LOCAL_RANK"], expected=expected, remedy=remedy)
        own = torch.device("cuda", numbers["LOCAL_RANK"])
        torch.cuda.set_device(own)
    if not dist.is_initialized():
        _warn_of_restarts()
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo", timeout=timeout, device_id=own if kind == "cuda" else None
        )
    if (dist.get_rank(), dist.get_world_size()) != (numbers["RANK"], numbers["WORLD_SIZE"]):
        what = "the process group differs from torchrun's environment"
        got = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        expected = f"rank {numbers['RANK']} of {numbers['WORLD_SIZE']}"
        raise ConfigError(what, where="torch.distributed", got=got, expected=expected)
    return Processes(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"], own)


def _warn_of_restarts() -> None:
    """Warns that processes which torchrun starts again may read the addresses of those before them, and wait forever.

    Its agents keep one store for all attempts (PyTorch issue 135712).
    """
    restarts, shares = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("MAX_RESTARTS", "USE_AGENT_STORE"))
    if restarts not in (None, "0") and shares == "True" and os.environ.get("RANK") == "0":
        warnings.warn(
            f"torchrun --max-restarts {restarts}: processes that it starts again may wait for those before them; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun",
            stacklevel=3,
        )


def stop_processes() -> None:
    """Leaves the process group. Does nothing without one."""
    global _control
    _control = None
    if dist.is_initialized():
        dist.destroy_process_group()


def default_device_type() -> str:
    """Returns the device type of meshes: "cuda" with NCCL, else "cpu".

    Raises:
        ConfigError: The process group is missing.
    """
    if not dist.is_initialized():
        remedy = "Start the script with torchrun and call ligerzoo.parallel.start_processes() first."
        raise ConfigError("no process group", where="torch.distributed", remedy=remedy)
    return "cuda" if "nccl" in str(dist.get_backend()) else "cpu"


def default_mesh() -> DeviceMesh:
    """Returns a one-dimensional mesh of all processes, on their GPUs with NCCL, else on CPUs.

    Raises:
        ConfigError: The process group is missing.
    """
    return init_device_mesh(default_device_type(), (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns the device of this process in a mesh."""
    kind = mesh.device_type
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


Value = TypeVar("Value")

_control: tuple[Any, Any] | None = None


def control_group() -> Any:
    """Returns a gloo group of all processes, for messages on the CPU. All processes must call it the first time.

    Messages to and from GPUs would wait for the kernels that were launched before. A thread that saves behind the
    training has its own group.
    """
    global _control
    if (group := background_group.get()) is not None:
        return group
    world = dist.group.WORLD
    if _control is None or _control[0] is not world:
        _control = world, world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return _control[1]


def is_main_process() -> bool:
    """Returns whether this is the process that prints and writes files: rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier(what: str, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Waits until all processes have called it. Does not wait for GPUs.

    Args:
        what: what the processes wait for, for the error message.
        timeout: how long to wait.

    Raises:
        LigerzooError: A process did not arrive in time; the main process's error says which.
    """
    if not dist.is_initialized():
        return
    try:
        dist.monitored_barrier(control_group(), timeout=timeout, wait_all_ranks=True)
    except RuntimeError as error:
        where, got = f"barrier {what!r}", str(error).splitlines()[0]
        expected = f"all {dist.get_world_size()} processes within {timeout}"
        remedy = "The output of the missing process says why it stopped."
        raise LigerzooError(
            "a process did not arrive", where=where, got=got, expected=expected, remedy=remedy
        ) from error


def gather_objects(value: Value) -> list[Value]:
    """Returns the values of all processes, by rank. They are pickled, so pass small ones of Python's own types."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=control_group())
    return values


@contextmanager
def failing_together(what: str) -> Iterator[None]:
    """Raises in all processes if the block raises in one of them. No block may contain a collective after an error.

    Args:
        what: what the block does, for the error message of the other processes.

    Raises:
        LigerzooError: In the processes whose own block succeeded.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        failure = error
    failures = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(failures):
        if message is not None:
            raise LigerzooError(f"rank {rank} failed", where=what, got=message)


def items_per_process(count: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """Returns the mean of a number over all processes, 0-d fp32, without a host sync.

    FSDP2 and DDP average gradients over the processes. With this as `num_items_in_batch`, the average is that of the
    whole batch, whatever the share of each process: sum over r of (loss sum_r / mean count) / processes.

    Args:
        count: this process's number of labels that are not ignored, in all microbatches of the step.
        device: the device of the result; default: that of `count`, if it is a tensor.
    """
    total = torch.as_tensor(count, device=device).to(torch.float32, copy=True)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total
