import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import rms_norm
from ligerzoo.kernels.rms_norm import reference
from tests.kernels.helpers import DTYPES, Recorder, judge, kernel_file, launch_nothing, numbers, on_gpu_too

SHAPES = on_gpu_too(
    [(1,), (7,), (1, 1), (3, 7), (5, 127), (2, 3, 130), (2, 2, 3, 64)],
    [(3, 4095), (2, 16384), (2, 65536), (2, 65537), (20_000, 64), (5_000, 127), (1_000, 4096)],
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, weight = numbers(*shape, dtype=dtype, device=device), numbers(shape[-1], dtype=dtype, device=device)
    judge(rms_norm, lambda x, weight: reference(x, weight, 1e-6), [x, weight])


@pytest.mark.parametrize("x_dtype, weight_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_mixed_dtypes(x_dtype: torch.dtype, weight_dtype: torch.dtype, device: str) -> None:
    x, weight = numbers(5, 33, dtype=x_dtype, device=device), numbers(33, dtype=weight_dtype, device=device)
    assert rms_norm(x, weight).dtype == torch.promote_types(x_dtype, weight_dtype)
    judge(rms_norm, lambda x, weight: reference(x, weight, 1e-6), [x, weight])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_normalized_numbers_are_rounded_before_the_product(dtype: torch.dtype, device: str) -> None:
    """As Llama's checkpoints were trained, in both directions."""
    x, weight = numbers(1, 33, dtype=dtype, device=device), torch.ones(33, device=device).requires_grad_()
    y = rms_norm(x, weight)
    (dweight,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert y.dtype == dweight.dtype == torch.float32
    assert torch.equal(y, y.to(dtype).float())
    assert torch.equal(dweight, y[0])


@pytest.mark.parametrize("shape", [(2100, 16), (11, 4000)], ids=str)
def test_each_program_of_the_backward_kernel_walks_several_blocks(
    shape: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_file("rms_norm"), "multiprocessors", lambda _: 1)
    x, weight = numbers(*shape, device=device), numbers(shape[-1], device=device)
    judge(rms_norm, lambda x, weight: reference(x, weight, 1e-6), [x, weight])


@pytest.mark.parametrize("scale", [1e-6, 1e4])
@pytest.mark.parametrize("eps", [1e-5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scales_at_which_the_square_leaves_fp16(scale: float, eps: float, dtype: torch.dtype, device: str) -> None:
    x, weight = numbers(5, 33, dtype=dtype, device=device, scale=scale), numbers(33, dtype=dtype, device=device)
    judge(lambda x, weight: rms_norm(x, weight, eps), lambda x, weight: reference(x, weight, eps), [x, weight])


def test_a_row_that_is_not_finite_stays_alone(device: str) -> None:
    x, weight = numbers(5, 33, device=device), numbers(33, device=device)
    with torch.no_grad():
        x[1, 3], x[2, 5], x[4] = torch.nan, torch.inf, 0.0
    y = rms_norm(x, weight)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert y[1].isnan().all()
    assert y[2, 5].isnan()
    assert dx[[1, 2]].isnan().any(-1).all()
    assert torch.equal(y[4], torch.zeros_like(y[4]))
    for t in (y, dx):
        assert t[[0, 3, 4]].isfinite().all()


def test_the_reference_is_rms_normalization(device: str) -> None:
    x, weight = (t.double() for t in (numbers(5, 33, device=device), numbers(33, device=device)))
    torch.testing.assert_close(reference(x, weight, 1e-3), F.rms_norm(x, (33,), weight, 1e-3), rtol=1e-13, atol=1e-13)


def test_rows_too_long_for_a_program(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = numbers(3, 65, device=device), numbers(65, device=device)
    monkeypatch.setattr(kernel_file("rms_norm"), "_MAX_COLUMNS", 64)
    assert torch.equal(rms_norm(x, weight), reference(x, weight, 1e-6))


def test_a_frozen_weight_costs_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "rms_norm")
    x, weight = numbers(300, 64, device=device), numbers(64, device=device)

    def made_in_backward(weight: Tensor) -> list[int]:
        y = rms_norm(x, weight)
        upstream = torch.ones_like(y)
        with Recorder() as recorder:
            torch.autograd.grad(y, x, upstream)
        return recorder.made

    dx = 300 * 64 * 4
    assert made_in_backward(weight.detach()) == [dx]
    assert sum(made_in_backward(weight)) > dx


@pytest.mark.parametrize("weight_shape", [(32,), (1, 33), ()])
def test_a_weight_of_another_shape(weight_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"weight has shape .*; expected \(33,\)"):
        rms_norm(torch.ones(5, 33), torch.ones(weight_shape))
