"""Launches of kernels whose arguments are NamedTuples."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels.jit import _bind_namespace, jit, kernel, tl
from tests.kernels.machine import needs_triton


class _Strided(NamedTuple):
    ptr: Tensor
    batch_stride: int
    row_stride: int


class _Scale(NamedTuple):
    ptr: Tensor | None
    factor: float


@jit
def _offsets(x, batch, rows, cols):
    return batch * x.batch_stride + rows[:, None] * x.row_stride + cols[None, :]


@kernel
def _scale_kernel(x, y, scale, n_rows, n_cols, SIZE: tl.constexpr):
    batch, rows, cols = tl.program_id(0), tl.arange(0, SIZE), tl.arange(0, SIZE)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    tile = tl.load(x.ptr + _offsets(x, batch, rows, cols), mask=mask, other=0.0) * scale.factor
    if scale.ptr is not None:
        tile *= tl.load(scale.ptr + cols, mask=cols < n_cols, other=0.0)[None, :]
    tl.store(y.ptr + _offsets(y, batch, rows, cols), tile, mask=mask)


def _scaled(x: Tensor, weight: Tensor | None, factor: float) -> Tensor:
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    _scale_kernel[len(x)](
        _Strided(x, *x.stride()[:2]), _Strided(y, *y.stride()[:2]), _Scale(weight, factor), *x.shape[1:], 8, num_warps=4
    )
    return y


@needs_triton
def test_arguments_may_be_named_tuples(device: str) -> None:
    weight = torch.arange(5.0, device=device)
    x = torch.randn(3, 8, 16, device=device)
    for part in (x[:, :7, :5], x[:, 1:, 1:6], x[:, :7, :5]):  # another alignment compiles again
        assert torch.equal(_scaled(part, None, 2.0), part * 2)
        assert torch.equal(_scaled(part, weight, 2.0), part * 2 * weight)
        assert torch.equal(_scaled(part, weight, 3.0), part * 3 * weight)


@needs_triton
def test_a_thread_waits_until_another_has_bound_the_functions_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    begun, go_on = Event(), Event()

    def bind(function: Any) -> str:
        begun.set()
        assert go_on.wait(60)
        return "bound"

    monkeypatch.setattr(triton, "jit", bind)
    namespace: dict[str, Any] = {"tl": None}
    namespace["device_function"] = jit(FunctionType((lambda x: x).__code__, namespace))

    def bound() -> object:
        _bind_namespace(namespace)
        return namespace["device_function"]

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(bound)
        assert begun.wait(60)
        second = threads.submit(bound)
        wait([second], timeout=0.2)
        go_on.set()
        assert first.result() == second.result() == "bound"
    assert namespace["tl"] is triton.language
