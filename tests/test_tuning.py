"""Faster tuning of Triton kernels, without a GPU."""

from typing import Any

import pytest
import torch

from benchmarks.tuning import compile_in_parallel
from tests.kernels.compiling import compiling_for_hopper

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402


def fill(out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, BLOCK), 0.0)


def test_all_configurations_are_compiled_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler import CompiledKernel
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(Autotuner, "prune_configs", Autotuner.prune_configs)  # restores it
    compiled = []

    def bench(call: Any, quantiles: Any) -> list[float]:
        [(kernels, *_)] = function.device_caches.values()
        compiled.append(sum(isinstance(kernel, CompiledKernel) for kernel in kernels.values()))
        return [1.0]

    compile_in_parallel()
    function = JITFunction(fill)
    blocks = (16, 32, 3)  # 3 fails: expected powers of 2
    tune = triton.autotune([triton.Config({"BLOCK": block}) for block in blocks], key=[], do_bench=bench)
    with compiling_for_hopper():
        tune(function).run(torch.empty(32), grid=(1,), warmup=True)
    compile_in_parallel.cache_clear()
    assert compiled == [2, 2, 2]
