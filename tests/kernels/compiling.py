"""Compiles kernels for a Hopper GPU on any machine, without launching them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ligerzoo.kernels.jit import Kernel
from tests.kernels.machine import kernel_file

MAX_SHARED_MEMORY = 232448  # bytes per program on a Hopper GPU


class _Hopper:
    """The part of Triton's driver that a compilation uses.

    The device index -1 exists on no machine, so kernels compiled this way are never launched.
    """

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
    compiled = self._jitted.warmup(*arguments, grid=(programs, 1, 1), **options)
    assert compiled.metadata.shared <= MAX_SHARED_MEMORY, f"{self.function.__name__} needs {compiled.metadata.shared} B"


@contextmanager
def compiling_for_hopper() -> Iterator[None]:
    """A context in which operations on CPU tensors run the code for a Hopper GPU, but each launch only compiles its
    kernel. Results are undefined."""
    from triton.runtime import driver

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_file("dispatch"), "INTERPRETING", True)  # enables Triton for CPU tensors
        patch.setattr(kernel_file("loss.ragged_gemm"), "is_hopper", lambda _: True)
        patch.setattr(Kernel, "_launch", _compile)
        patch.setattr(driver, "_active", _Hopper())
        yield


def compile_both_passes(function: Any, inputs: list[torch.Tensor]) -> None:
    """Compiles the kernels of the forward and the backward pass."""
    with compiling_for_hopper():
        outputs = function(*inputs)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if output.requires_grad:
                output.backward(torch.ones_like(output), retain_graph=True)
