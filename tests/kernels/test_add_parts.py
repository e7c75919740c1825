from typing import Any

import pytest
import torch

from ligerzoo.kernels.add_parts import add_parts, reference
from tests.kernels.machine import DTYPES, ROUNDED_DTYPES, needs_triton

backends = pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])


@backends
@pytest.mark.parametrize("out_dtype", [*ROUNDED_DTYPES, torch.float64])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(
    "count, length, scale", [(1, 5, 1.0), (2, 4097, 0.5), (3, 1, -2.0), (5, 9001, 1 / 3), (2, 0, 1.0)]
)
def test_sums_are_rounded_once(
    count: int, length: int, scale: float, dtype: torch.dtype, out_dtype: torch.dtype, backend: Any, device: str
) -> None:
    """The error is that of a sum in fp32 or fp64, and of rounding to the dtype of the output."""
    if torch.float64 in (dtype, out_dtype):
        backend = "auto"  # no kernel has fp64
    parts = torch.randn(count, length + 3, device=device).to(dtype)[:, :length]
    out = torch.full((length,), torch.nan, dtype=out_dtype, device=device)
    add_parts(parts, out, scale, backend=backend)
    expected, sizes = scale * parts.double().sum(0), abs(scale) * parts.double().abs().sum(0)
    working = torch.float64 if dtype == torch.float64 else torch.float32
    bound = count * torch.finfo(working).eps * sizes + torch.finfo(out_dtype).eps / 2 * expected.abs() * 1.001
    assert ((out.double() - expected).abs() <= bound + torch.finfo(out_dtype).smallest_normal * 2**-9).all()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_equal_those_of_the_reference(dtype: torch.dtype, device: str) -> None:
    for count, length in [(2, 4096), (3, 5001), (8, 77)]:
        parts = torch.randn(count, length, device=device).to(dtype)
        got, expected = torch.empty(2, length, device=device)
        add_parts(parts, got, 1 / count, backend="triton")
        reference(parts, expected, 1 / count)
        assert torch.equal(got, expected)


def test_errors() -> None:
    for parts, out in [((3,), ()), ((2, 3), (2,)), ((0, 3), (3,))]:
        with pytest.raises(ValueError, match=r"add_parts: parts is .* expected \(P, n\) with P > 0, and \(n,\)"):
            add_parts(torch.zeros(parts), torch.zeros(out))
