"""Elementwise functions, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.math import exp, expm1, fast_exp, fast_log, sigmoids, tanh
from tests.kernels.machine import needs_triton


@kernel
def _exp_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, exp(tl.load(x_ptr + i), True))


@kernel
def _expm1_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, expm1(tl.load(x_ptr + i)))


@kernel
def _log_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.log(tl.load(x_ptr + i)))


@kernel
def _fast_exp_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, fast_exp(tl.load(x_ptr + i)))


@kernel
def _fast_log_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x_minus_1 = tl.load(x_ptr + i)
    tl.store(y_ptr + i, fast_log(1.0 + x_minus_1, x_minus_1))


@kernel
def _tanh_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tanh(tl.load(x_ptr + i)))


@kernel
def _sigmoids_kernel(x_ptr, y_ptr, complement_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sigmoid, complement = sigmoids(tl.load(x_ptr + i), True)
    tl.store(y_ptr + i, sigmoid)
    tl.store(complement_ptr + i, complement)


def launch_on(launcher: Any, x: Tensor, outputs: int = 1) -> list[Tensor]:
    results = [torch.full_like(x, torch.nan) for _ in range(outputs)]
    launcher[len(x) // 1024](x, *results, 1024, num_warps=4)
    return results


@needs_triton
@pytest.mark.parametrize("limit", [1.0, 10.0, 86.0])
def test_errors_are_at_most_2_ulps(limit: float, device: str) -> None:
    x = torch.linspace(-limit, limit, 2**14, device=device)
    sigmoid, complement = launch_on(_sigmoids_kernel, x, 2)
    for y, truth in (
        (*launch_on(_exp_kernel, x), x.double().exp()),
        (*launch_on(_expm1_kernel, x), x.double().expm1()),
        (*launch_on(_tanh_kernel, x), x.double().tanh()),
        (sigmoid, x.double().sigmoid()),
        (complement, (-x).double().sigmoid()),
    ):
        assert ((y.double() - truth) / truth).abs().nan_to_num().max() < 2.5 * 2**-23


@needs_triton
def test_triton_log(device: str) -> None:
    """Kernels use Triton's log for the logarithms of sums."""
    x = torch.logspace(0.0, 5.0, 2**14, device=device)
    (y,) = launch_on(_log_kernel, x)
    truth = x.double().log()
    assert ((y.double() - truth).abs() / truth.clamp(min=1.0)).max() < 1.5 * 2**-23


@needs_triton
def test_fast_exp(device: str) -> None:
    x = torch.linspace(-86.0, 0.0, 2**14, device=device)
    (y,) = launch_on(_fast_exp_kernel, x)
    truth = x.double().exp()
    assert ((y.double() - truth) / truth).abs().max() < 2**-23 * (2 + 86)
    ends = torch.tensor([0.0, -200.0, -torch.inf, torch.nan], device=device).repeat(1024)
    (y,) = launch_on(_fast_exp_kernel, ends)
    assert y[:3].tolist() == [1.0, 0.0, 0.0]
    assert y[3].isnan()


@needs_triton
def test_fast_log(device: str) -> None:
    x = torch.cat(
        (-torch.logspace(-30.0, -1e-4, 2**13, device=device), torch.logspace(-30.0, 5.0, 2**13, device=device))
    )
    x[0] = 0.0
    (y,) = launch_on(_fast_log_kernel, x)
    truth = x.double().log1p()
    assert y[0] == 0
    near = x.abs() < 0.05
    assert ((y.double() - truth) / truth)[near].abs().nan_to_num().max() < 1.5e-6
    # Compared with log(1 + x) for the rounded sum 1 + x.
    truth = (1 + x[~near]).double().log()
    assert ((y[~near].double() - truth).abs() / truth.abs().clamp(min=1.0)).max() < 2.5 * 2**-23


@needs_triton
def test_exp_at_its_limits(device: str) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([0.0, 88.7, 89.0, 1e30, inf, -104.0, -1e30, -inf, nan], device=device).repeat(1024)
    (y,) = launch_on(_exp_kernel, x)
    torch.testing.assert_close(y[:9], x[:9].exp(), atol=1e-37, rtol=1e-6, equal_nan=True)
