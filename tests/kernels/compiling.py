"""Compiles kernels for a Hopper GPU on any machine, without launching them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ligerzoo.kernels.jit import Kernel
from tests.kernels.machine import kernel_file


class _Hopper:
    """As much of Triton's driver as a compilation asks for. No machine has a device of this number, so that what was
    compiled here is never launched."""

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return 9, 0


def _compile(self: Kernel, programs: int, *arguments: Any, **options: int) -> None:
    self._jitted.warmup(*arguments, grid=(programs, 1, 1), **options)


@contextmanager
def compiling_for_hopper() -> Iterator[None]:
    """Within it, operations on CPU tensors take the way they take on a Hopper GPU, but each launch only compiles its
    kernel. Results are undefined."""
    from triton.runtime import driver

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_file("dispatch"), "INTERPRETING", True)  # as there, Triton serves tensors on a CPU
        patch.setattr(kernel_file("loss.ragged_gemm"), "is_hopper", lambda _: True)
        patch.setattr(Kernel, "_launch", _compile)
        patch.setattr(driver, "_active", _Hopper())
        yield


def compile_both_passes(function: Any, inputs: list[torch.Tensor]) -> None:
    """Compiles what the forward and the backward pass launch."""
    with compiling_for_hopper():
        outputs = function(*inputs)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if output.requires_grad:
                output.backward(torch.ones_like(output), retain_graph=True)
