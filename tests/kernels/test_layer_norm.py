from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import layer_norm
from ligerzoo.kernels.dispatch import multiprocessors
from ligerzoo.kernels.layer_norm import reference
from tests.kernels.accuracy import judge
from tests.kernels.machine import ROUNDED_DTYPES, kernel_file, on_gpu_too
from tests.kernels.op_recorder import Recorder, launch_nothing
from tests.kernels.oracles import numbers

SHAPES = on_gpu_too(
    [(7,), (3, 7), (5, 127), (2, 3, 130), (2, 2, 3, 64)],
    [(3, 4095), (2, 16384), (2, 65536), (2, 65537), (20_000, 64), (5_000, 127), (1_000, 4096), (4, 100, 8, 80)],
)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_sizes(has_bias: bool, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, *vectors = (numbers(*s, dtype=dtype, device=device) for s in (shape, *([shape[-1:]] * (1 + has_bias))))
    bias = [] if has_bias else [None]
    judge(
        lambda *tensors: layer_norm(*tensors, *bias),
        lambda *tensors: reference(*tensors, *bias, 1e-5),
        [x, *vectors],
    )


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 1)], ids=str)
def test_a_single_column(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """A single column equals its mean. The exact gradients are 0; the computed ones are the rounding of one product."""
    x, weight, bias = (numbers(*s, dtype=dtype, device=device) for s in (shape, (1,), (1,)))
    y = layer_norm(x, weight, bias)
    assert torch.equal(y, bias.expand_as(x))
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), dy := torch.randn_like(y))
    rounding = torch.finfo(torch.float32).eps / 1e-5**0.5
    assert dx.abs().max().item() <= rounding * (dy * weight).abs().max().item()
    assert dweight.abs().item() <= rounding * (dy * x).abs().sum().item()
    torch.testing.assert_close(dbias, dy.flatten(0, -2).sum(0) if dy.dim() > 1 else dy)


@pytest.mark.parametrize("x_dtype, weight_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_mixed_dtypes(x_dtype: torch.dtype, weight_dtype: torch.dtype, device: str) -> None:
    x, *vectors = (numbers(*s, dtype=d, device=device) for s, d in (((5, 33), x_dtype), *[((33,), weight_dtype)] * 2))
    assert layer_norm(x, *vectors).dtype == torch.promote_types(x_dtype, weight_dtype)
    judge(layer_norm, partial(reference, eps=1e-5), [x, *vectors])


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_the_reference_equals_torch(dtype: torch.dtype, device: str) -> None:
    x, *vectors = (numbers(*shape, dtype=dtype, device=device) for shape in ((5, 33), (33,), (33,)))
    assert torch.equal(layer_norm(x, *vectors, 1e-3, backend="torch"), F.layer_norm(x, (33,), *vectors, 1e-3))


def test_a_mean_far_from_zero(device: str) -> None:
    """The variance is not computed as a difference of two large numbers."""
    x = (numbers(5, 130, device=device) + 1000).detach().requires_grad_()
    vectors = [numbers(130, device=device) for _ in range(2)]
    judge(layer_norm, partial(reference, eps=1e-5), [x, *vectors])


@pytest.mark.parametrize("shape", [(2100, 16), (11, 4000)], ids=str)
def test_backward_programs_process_several_blocks(
    shape: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_file("tiling"), "multiprocessors", lambda _: 1)
    inputs = [numbers(*s, device=device) for s in (shape, shape[-1:], shape[-1:])]
    judge(layer_norm, partial(reference, eps=1e-5), inputs)


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_before_tokens(batch: int, device: str) -> None:
    x = numbers(batch, 3, 2, 80, device=device).detach().transpose(1, 2).requires_grad_()
    judge(layer_norm, partial(reference, eps=1e-5), [x, *(numbers(80, device=device) for _ in range(2))])


def test_a_non_finite_row_does_not_affect_others(device: str) -> None:
    x, weight, bias = numbers(5, 33, device=device), numbers(33, device=device), numbers(33, device=device)
    with torch.no_grad():
        x[1, 3], x[2, 5], x[4] = torch.nan, torch.inf, 7.0
    y = layer_norm(x, weight, bias)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert torch.equal(y[4], bias)
    for t in (y, dx):
        assert t[[1, 2]].isnan().all()
        assert t[[0, 3, 4]].isfinite().all()


def test_rows_too_long_for_the_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = numbers(3, 65, device=device), numbers(65, device=device)
    monkeypatch.setattr(kernel_file("tiling"), "MAX_COLUMNS", 64)
    assert torch.equal(layer_norm(x, weight), reference(x, weight, None, 1e-5))
    launch_nothing(monkeypatch, "layer_norm")
    with pytest.raises(ValueError, match=r'backend="triton" with x \(3, 65\); expected at most 64 columns'):
        layer_norm(x, weight, backend="triton")


def test_frozen_inputs_allocate_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "layer_norm")
    launch_nothing(monkeypatch, "tiling")
    x, weight, bias = numbers(300, 64, device=device), numbers(64, device=device), numbers(64, device=device)

    def allocated_in_backward(*inputs: Tensor) -> int:
        y = layer_norm(*inputs)
        upstream = torch.ones_like(y)
        with Recorder() as recorder:
            torch.autograd.grad(y, [t for t in inputs if t.requires_grad], upstream)
        return sum(recorder.allocated)

    programs = kernel_file("tiling").persistent_programs(300, 128, multiprocessors(x))
    dx, vector = 300 * 64 * 4, (programs + 1) * 64 * 4
    assert allocated_in_backward(x, weight.detach(), bias.detach()) == dx
    assert allocated_in_backward(x.detach(), weight, bias.detach()) == vector
    assert allocated_in_backward(x.detach(), weight.detach(), bias) == vector
    assert allocated_in_backward(x, weight, bias) == dx + 2 * vector


@pytest.mark.parametrize("shape", [(32,), (1, 33), ()])
def test_vectors_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"layer_norm: weight has shape .*; expected \(33,\)"):
        layer_norm(torch.ones(5, 33), torch.ones(shape))
    with pytest.raises(ValueError, match=r"layer_norm: bias has shape .*; expected \(33,\)"):
        layer_norm(torch.ones(5, 33), torch.ones(33), torch.ones(shape))


def test_a_bias_of_the_wrong_dtype() -> None:
    with pytest.raises(ValueError, match=r"layer_norm: bias has dtype torch.float16; expected torch.float32"):
        layer_norm(torch.ones(5, 33), torch.ones(33), torch.ones(33, dtype=torch.float16))
