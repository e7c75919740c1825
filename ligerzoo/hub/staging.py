"""Copies weights from memory-mapped files to a GPU."""

from itertools import cycle

import torch
from torch import Tensor

_BUFFER_BYTES = 32 * 2**20


class Staging:
    """Copies tensors to a GPU through two pinned buffers: all cores fill one while the GPU reads the other.

    A copy straight from a memory-mapped file goes through a buffer of the driver, which a single core fills.

    Args:
        device: the GPU. Copies run on its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = cycle([_pinned_buffer(), _pinned_buffer()])

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy on the GPU, which may not have finished yet."""
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (x.view(-1).view(torch.uint8) for x in (tensor.contiguous(), copied))
        for start in range(0, len(source), _BUFFER_BYTES):
            part = source[start : start + _BUFFER_BYTES]
            buffer, is_read = next(self._buffers)
            is_read.synchronize()
            filled = buffer[: len(part)].copy_(part)
            target[start : start + len(part)].copy_(filled, non_blocking=True)
            is_read.record(torch.cuda.current_stream(self._device))
        return copied


def _pinned_buffer() -> tuple[Tensor, torch.cuda.Event]:
    """A buffer, and the event that the GPU has read it."""
    buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    return buffer, torch.cuda.Event()  # type: ignore[no-untyped-call]
