import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch

from ligerzoo.kernels import dispatch, swiglu
from ligerzoo.kernels.autograd import once_differentiable
from ligerzoo.kernels.dispatch import (
    HOPPER,
    accumulation_dtype,
    as_rows,
    autocast,
    next_power_of_2,
    simulated_gpu,
    uses_triton,
)
from tests.kernels.machine import DTYPES, ON_GPU, needs_triton
from tests.kernels.oracles import numbers


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.int64], ids=str)
def test_dtypes_and_devices_that_triton_supports(dtype: torch.dtype, device: str) -> None:
    fused = (ON_GPU or dispatch.INTERPRETING) and dtype in DTYPES
    x = torch.ones(3, device=device).to(dtype)
    assert uses_triton(x) == fused
    assert uses_triton(torch.ones(3, device=device), x) == fused
    if ON_GPU:
        assert not uses_triton(x, torch.ones(3))


@pytest.mark.plain
def test_a_gpu_is_simulated_in_one_thread() -> None:
    x = torch.empty(3, device="meta")
    with simulated_gpu(HOPPER), ThreadPoolExecutor(1) as other:
        assert uses_triton(x)
        assert not other.submit(uses_triton, x).result()
    assert not uses_triton(x)


@pytest.mark.plain
def test_importing_the_kernels_does_not_import_triton() -> None:
    program = "import sys, ligerzoo.kernels; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


FIRST_FILE = """
from ligerzoo.kernels.jit import jit, kernel, tl

@jit
def twice(x):
    return x + x

@jit
def four_times(x):
    return twice(twice(x))

@kernel
def write(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, twice(tl.load(x_ptr + i)))
"""

SECOND_FILE = """
from first_file import four_times
from ligerzoo.kernels.jit import kernel, tl

@kernel
def write(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, four_times(tl.load(x_ptr + i)))
"""


@needs_triton
def test_kernels_call_device_functions_of_other_files(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first_file.py").write_text("from __future__ import annotations\n" + FIRST_FILE)
    (tmp_path / "second_file.py").write_text("from __future__ import annotations\n" + SECOND_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    import first_file  # type: ignore[import-not-found]
    import second_file  # type: ignore[import-not-found]

    x, y = torch.arange(4.0, device=device), torch.zeros(4, device=device)
    second_file.write[1](x, y, 4)
    assert torch.equal(y, 4 * x)
    first_file.write[1](x, y, 4)
    assert torch.equal(y, 2 * x)


@pytest.mark.gpu
def test_a_launch_finds_the_kernel_compiled_for_its_arguments(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton specializes on dtype, alignment, and integers that are 1, multiples of 16 or beyond 32 bits."""
    source = """
from __future__ import annotations
from ligerzoo.kernels.jit import kernel, tl

@kernel
def write_shifted(x_ptr, y_ptr, shift, big, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i + shift - 1 + ((tl.full((), 0, tl.int64) + big) >> 40)))
"""
    (tmp_path / "shifted_file.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    from shifted_file import write_shifted  # type: ignore[import-not-found]

    data = torch.arange(4096.0, device=device)
    for _ in range(2):
        for dtype in DTYPES:
            for offset in (0, 1):
                for shift in (1, 2, 16, 17):
                    for big in (0, 1, 16, 2**40):
                        for size in (16, 64):
                            x = data.to(dtype)[offset:]
                            y = torch.zeros(size, device=device, dtype=dtype)
                            write_shifted[1](x, y, shift, big, size, num_warps=1)
                            first = shift - 1 + (big >> 40)
                            assert torch.equal(y, x[first : first + size])


@needs_triton
@pytest.mark.parametrize("backend", ["auto", "triton", "torch"])
def test_backend_argument(backend: Any, device: str) -> None:
    assert uses_triton(torch.ones(3, device=device), backend=backend) == (backend != "torch")


def test_unsupported_backends() -> None:
    with pytest.raises(ValueError, match=r'backend="triton" with tensors torch.float64 on cpu; expected fp32'):
        uses_triton(torch.ones(3, dtype=torch.float64), backend="triton")
    with pytest.raises(ValueError, match="backend='cuda'; expected \"auto\""):
        uses_triton(torch.ones(3), backend="cuda")  # type: ignore[arg-type]


@pytest.mark.skipif(not ON_GPU, reason="a CPU runs the references")
def test_plain_tensors_bypass_the_dispatcher(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []
    gate, up = numbers(3, 5, device=device), numbers(3, 5, device=device)

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            recorded.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.profiler.profile(acc_events=True) as profile:
        swiglu(gate, up)
    assert not any("ligerzoo" in event.key for event in profile.key_averages())
    with Recorder():
        swiglu(gate, up)
    assert "ligerzoo.glu_forward.default" in recorded


def test_rows_are_a_view_if_the_strides_allow_it() -> None:
    x = torch.arange(120.0).view(4, 5, 6)
    for view in (x, x[1:], x[..., 2:5], x[0], x[:1, :1].expand(1, 5, 6), x[:, 2], x[0, 0]):
        rows = as_rows(view)
        assert rows.data_ptr() == view.data_ptr()
        assert torch.equal(rows, view.reshape(-1, view.shape[-1]))
    for view in (x.mT, x[..., ::2], x.transpose(0, 1), x[..., :1].expand(4, 5, 6), x[0, 0, ::2]):
        rows = as_rows(view)
        assert rows.stride(-1) == 1
        assert torch.equal(rows, view.reshape(-1, view.shape[-1]))


def test_rows_of_one_column_and_no_rows() -> None:
    assert as_rows(torch.ones(5, 7)[:, :1]).shape == (5, 1)
    assert as_rows(torch.ones(0, 3, 7)).shape == (0, 7)


def test_powers_of_2() -> None:
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 127, 128, 129)] == [1, 1, 2, 4, 4, 8, 128, 128, 256]


def test_accumulation_dtypes() -> None:
    assert [accumulation_dtype(dtype) for dtype in DTYPES] == [torch.float32] * 3
    assert accumulation_dtype(torch.float64) == torch.float64


def test_autocast_casts_like_a_matrix_product(device: str) -> None:
    x = torch.ones(3, device=device)
    assert autocast(x)[0] is x
    with torch.autocast(device, torch.bfloat16):
        expected_dtypes = [torch.nn.functional.linear(t, t).dtype for t in (x, x.half(), x.double())]
        cast = autocast(x, x.half(), x.double(), None)
        assert [t.dtype for t in cast[:3]] == expected_dtypes
        assert cast[3] is None
    meta = x.to("meta")
    assert autocast(meta)[0] is meta


def test_second_derivatives_raise() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @once_differentiable
        def backward(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * dy

    x = torch.tensor([3.0], requires_grad=True)
    assert torch.autograd.grad(Square.apply(x), x)[0].item() == 6.0
    for loss in (Square.apply(x), Square.apply(x) ** 2):  # with an upstream gradient that is constant, or depends on x
        with pytest.raises(RuntimeError, match="differentiated only once"):
            torch.autograd.grad(loss, x, create_graph=True)
