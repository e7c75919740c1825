"""Devices: the check of one that a user names, and copies from and to it without a host sync."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ligerzoo.errors import ConfigError

T = TypeVar("T")


def available_device(device: str | torch.device | None, *, where: str = "argument device") -> torch.device:
    """Returns the device after allocating an empty tensor on it, torch's default device if None.

    Args:
        device: the device or its name. The meta device is available too.
        where: the argument or option, for the error message.

    Raises:
        ConfigError: the name is not a device, or this machine has none of that name.
    """
    try:
        chosen = torch.get_default_device() if device is None else torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:  # depends on the backend
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        expected = " or ".join(["cpu", *gpus])
        remedy = None if gpus else "A GPU needs a torch that is built for it, and its driver."
        raise ConfigError("no such device", where=where, got=device, expected=expected, remedy=remedy) from error
    return chosen


def emulated_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that a device emulates, several times slower than float32: bfloat16 on CPUs without units."""
    if device.type != "cpu":
        return ()
    units = [has_units for name, has_units in torch.cpu.get_capabilities().items() if "bf16" in name]
    return () if not units or any(units) else (torch.bfloat16,)


def loads_as_float32(stored: torch.dtype) -> str:
    """Returns a line for the user: weights are loaded in float32, because the device emulates the stored dtype."""
    name = str(stored).removeprefix("torch.")
    return f"This CPU has no units for {name}: the weights are loaded as float32. --dtype {name} keeps them."


def hint_of_dtype(dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns a line for the user if a device emulates a dtype that was chosen."""
    if dtype not in emulated_dtypes(device):
        return None
    return "This CPU has no units for bfloat16: --dtype float32 is several times faster, and takes twice the memory."


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on the device. A copy from the CPU does not wait for the GPU, except in compiled code."""
    is_upload = x.device.type == "cpu" and device.type == "cuda" and not torch.compiler.is_compiling()
    return x.pin_memory().to(device, non_blocking=True) if is_upload else x.to(device)


def upload(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Returns integers, or equally long lists of them, as an int64 tensor on the device."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)


class DelayedReads(Generic[T]):
    """Copies of tensors of the last steps, which the host reads later, so that a GPU always has work.

    Args:
        device: device of the tensors.
        lag: number of steps that the device may be ahead of the host. Always 0 on a CPU.

    Attributes:
        lag: as given, or 0.
    """

    def __init__(self, device: torch.device, lag: int) -> None:
        self.lag = lag if device.type == "cuda" else 0
        self._steps: deque[tuple[T, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, label: T, x: Tensor) -> None:
        """Starts to copy the tensor of a step, which the label names."""
        copy = x.to("cpu", non_blocking=True, copy=True)  # pinned
        event = None
        if x.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._steps.append((label, copy, event))

    def pop(self, *, waits: bool) -> Iterator[tuple[T, Any]]:
        """Yields label and values of all steps but the last `lag` ones, or of all: then it waits for them."""
        while len(self._steps) > (0 if waits else self.lag):
            label, copy, event = self._steps.popleft()
            if event is not None:
                event.synchronize()
            yield label, copy.tolist()

    def clear(self) -> None:
        """Drops all steps."""
        self._steps.clear()
