"""Checks a device that a user names."""

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
