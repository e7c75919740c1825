"""Copies from the host to the device without a host sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on the device."""
    is_upload = x.device.type == "cpu" and device.type == "cuda"
    return x.pin_memory().to(device, non_blocking=True) if is_upload else x.to(device)


def upload(values: Sequence[Any], device: torch.device) -> Tensor:
    """Returns integers, or equally long lists of them, as an int64 tensor on the device."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)
