"""Compiles kernels for a Hopper GPU on any machine, without launching them."""

import re
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


@contextmanager
def compiling_for_hopper() -> Iterator[list[Any]]:
    """A context in which operations on CPU tensors run the code for a Hopper GPU, but each launch only compiles its
    kernel. Results are undefined. Yields a list of the compiled kernels."""
    from triton.runtime import driver

    kernels = []

    def compile_only(self: Kernel, programs: int, *arguments: Any, **options: int) -> None:
        compiled = self._jitted.warmup(*arguments, grid=(programs, 1, 1), **options)
        used = compiled.metadata.shared
        assert used <= MAX_SHARED_MEMORY, f"{self.function.__name__} needs {used} B"
        kernels.append(compiled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_file("dispatch"), "INTERPRETING", True)  # enables Triton for CPU tensors
        patch.setattr(kernel_file("loss.ragged_gemm"), "is_hopper", lambda _: True)
        patch.setattr(Kernel, "_launch", compile_only)
        patch.setattr(driver, "_active", _Hopper())
        yield kernels


def compile_both_passes(function: Any, inputs: list[torch.Tensor]) -> list[Any]:
    """Compiles the kernels of the forward and the backward pass, and returns them."""
    with compiling_for_hopper() as kernels:
        outputs = function(*inputs)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if output.requires_grad:
                output.backward(torch.ones_like(output), retain_graph=True)
    return kernels


def layouts_of_sums(compiled: Any) -> list[tuple[str, ...]]:
    """The axis and the layout among threads of each sum of a kernel, which decide the order of its additions."""
    code = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"(?m)^(#\w+) = (#ttg\..*)$", code))
    sums = re.findall(r'(?s)"tt\.(scan|reduce)"\(.*?<\{axis = (\d).*?\}\) : \(([^)]*)\)', code)
    return [(kind, axis, re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), of)) for kind, axis, of in sums]
