"""Checks a device that a user names, and knows where bfloat16 is slow."""

import torch

from ligerzoo.errors import ConfigError


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
        raise ConfigError(
            "no such device", where=where, got=device, expected=" or ".join(["cpu", *gpus]),
            remedy=None if gpus else "A GPU needs a torch that is built for it, and its driver.",
        ) from error  # fmt: skip
    return chosen


def hint_of_dtype(dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns a line for the user if a device emulates a dtype: bfloat16 on a CPU without units for it."""
    if dtype != torch.bfloat16 or device.type != "cpu":
        return None
    units = [has_units for name, has_units in torch.cpu.get_capabilities().items() if "bf16" in name]
    if not units or any(units):
        return None
    return "This CPU has no units for bfloat16: --dtype float32 is several times faster, and takes twice the memory."
