from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from ligerzoo.kernels import add_rms_norm, residual_rms_norm, rms_norm
from ligerzoo.kernels.dispatch import multiprocessors
from ligerzoo.kernels.rms_norm import add_reference, reference
from tests.kernels.accuracy import assert_as_exact_as, assert_equal, judge
from tests.kernels.machine import DTYPES, HALF_DTYPE, ROUNDED_DTYPES, kernel_file, on_gpu_too
from tests.kernels.op_recorder import Recorder, launch_nothing
from tests.kernels.operations import GEMMA
from tests.kernels.oracles import numbers

SHAPES = on_gpu_too(
    [(1,), (7,), (1, 1), (3, 7), (5, 127), (2, 3, 130), (2, 2, 3, 64), (2, 3, 2, 80)],
    [(3, 4095), (2, 16384), (2, 65536), (2, 65537), (20_000, 64), (5_000, 127), (1_000, 4096)]
    + [(4, 100, 8, head_dim) for head_dim in (64, 80, 128, 256)],
)

EPS = 0.1  # with a small eps the gradient of a single column would be rounding noise

OLMO2 = {"round_before_scale": False}
every_order = pytest.mark.parametrize("options", [{}, GEMMA, OLMO2], ids=["llama", "gemma", "olmo2"])


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_order
def test_sizes(options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, weight = numbers(*shape, dtype=dtype, device=device), numbers(shape[-1], dtype=dtype, device=device)
    judge(partial(rms_norm, eps=EPS, **options), partial(reference, eps=EPS, **options), [x, weight])


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_of_sums(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, residual = (numbers(*shape, dtype=dtype, device=device) for _ in range(2))
    weight = numbers(shape[-1], dtype=dtype, device=device)
    judge(partial(add_rms_norm, eps=EPS), partial(add_reference, eps=EPS), [x, residual, weight])


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_without_a_weight(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, residual = (numbers(*shape, dtype=dtype, device=device) for _ in range(2))
    judge(partial(rms_norm, eps=EPS), lambda x: F.rms_norm(x, x.shape[-1:], eps=EPS), [x])
    judge(partial(add_rms_norm, eps=EPS), partial(add_reference, weight=None, eps=EPS), [x, residual])


@pytest.mark.parametrize("round_before_scale", [False, True])
def test_no_weight_equals_a_weight_of_ones(round_before_scale: bool, device: str) -> None:
    x, ones = numbers(5, 130, dtype=HALF_DTYPE, device=device), torch.ones(130, dtype=HALF_DTYPE, device=device)
    y, expected = (rms_norm(x, weight, round_before_scale=round_before_scale) for weight in (None, ones))
    upstream = torch.randn_like(y)
    assert_equal([y, *torch.autograd.grad(y, x, upstream)], [expected, *torch.autograd.grad(expected, x, upstream)])


@pytest.mark.parametrize("function", [rms_norm, lambda x, **options: add_rms_norm(x, x, **options)])
def test_an_offset_without_a_weight_raises(function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"rms_norm: weight_offset=1.0 without a weight; expected 0.0, or a weight"):
        function(torch.ones(5, 33), weight_offset=1.0)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@every_order
def test_add_rms_norm_normalizes_the_rounded_sum(options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    x, residual, weight = (numbers(*shape, dtype=dtype, device=device) for shape in ((5, 130), (5, 130), (130,)))
    normalized, summed = add_rms_norm(x, residual, weight, **options)
    assert torch.equal(normalized, rms_norm(summed, weight, **options))


@pytest.mark.parametrize(
    "module, options", [(LlamaRMSNorm, {}), (Gemma2RMSNorm, GEMMA), (Olmo2RMSNorm, OLMO2)], ids=str
)
def test_rounding_orders_match_transformers(
    module: type[torch.nn.Module], options: dict[str, Any], device: str
) -> None:
    dtype = HALF_DTYPE
    x, weight = numbers(5, 257, dtype=dtype, device=device, scale=3.0), numbers(257, dtype=dtype, device=device)
    norm = module(257, eps=1e-6)

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, x)

    judge(partial(rms_norm, **options), theirs, [x, weight])
    assert torch.equal(rms_norm(x, weight, backend="torch", **options), theirs(x, weight))


@pytest.mark.parametrize("x_dtype, weight_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_mixed_dtypes(x_dtype: torch.dtype, weight_dtype: torch.dtype, device: str) -> None:
    x, weight = numbers(5, 33, dtype=x_dtype, device=device), numbers(33, dtype=weight_dtype, device=device)
    assert rms_norm(x, weight).dtype == torch.promote_types(x_dtype, weight_dtype)
    assert rms_norm(x, weight, round_before_scale=False).dtype == x_dtype
    for options in ({}, GEMMA):
        judge(partial(rms_norm, **options), partial(reference, eps=1e-6, **options), [x, weight])


@pytest.mark.parametrize(
    "x_dtype, residual_dtype", [(torch.float16, torch.float32), (torch.float32, torch.bfloat16), DTYPES[1:]], ids=str
)
def test_sums_of_mixed_dtypes(x_dtype: torch.dtype, residual_dtype: torch.dtype, device: str) -> None:
    x, residual = (numbers(5, 33, dtype=dtype, device=device) for dtype in (x_dtype, residual_dtype))
    assert add_rms_norm(x, residual, torch.ones(33, device=device))[1].dtype == torch.float32
    judge(add_rms_norm, partial(add_reference, eps=1e-6), [x, residual, numbers(33, device=device)])


def heads_of_a_fused_projection(*shape: int, device: str) -> Tensor:
    batch, tokens, heads, head_dim = shape
    qkv = numbers(batch, tokens, 3 * heads, head_dim, device=device)
    return qkv[:, :, heads:-heads]


def heads_before_tokens(*shape: int, device: str) -> Tensor:
    batch, tokens, heads, head_dim = shape
    return numbers(batch, heads, tokens, head_dim, device=device).transpose(1, 2)


@pytest.mark.parametrize("upstream", [torch.clone, lambda dy: dy.transpose(1, 2).contiguous().transpose(1, 2)])
@pytest.mark.parametrize("make", [heads_of_a_fused_projection, heads_before_tokens])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads(batch: int, make: Callable[..., Tensor], upstream: Callable[[Tensor], Tensor], device: str) -> None:
    x = make(batch, 3, 2, 80, device=device).detach().requires_grad_()
    judge(rms_norm, partial(reference, eps=1e-6), [x, numbers(80, device=device)], upstream)


@pytest.mark.parametrize("batch, make", [(1, heads_before_tokens), (2, heads_of_a_fused_projection)])
def test_heads_are_not_copied(
    batch: int, make: Callable[..., Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_nothing(monkeypatch, "rms_norm")
    x, weight = make(batch, 5, 3, 64, device=device), torch.ones(64, device=device)
    with Recorder() as forward:
        y = rms_norm(x, weight)
    upstream = make(batch, 5, 3, 64, device=device)
    with Recorder() as backward:
        torch.autograd.grad(y, x, upstream)
    heads = batch * 5 * 3
    assert (forward.allocated, backward.allocated) == ([heads * 64 * 4, heads * 4], [heads * 64 * 4])


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES[1:], ids=str)
def test_normalized_values_are_rounded_before_the_scale(dtype: torch.dtype, device: str) -> None:
    """Rounds before the scale as Llama does, or after it, in forward and backward."""
    x, weight = numbers(1, 33, dtype=dtype, device=device), torch.ones(33, device=device).requires_grad_()
    y = rms_norm(x, weight)
    (dweight,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert y.dtype == dweight.dtype == torch.float32
    assert torch.equal(y, y.to(dtype).float())
    assert torch.equal(dweight, y[0])
    (dweight,) = torch.autograd.grad(rms_norm(x, weight, round_before_scale=False), weight, torch.ones_like(x))
    assert not torch.equal(dweight, y[0])
    torch.testing.assert_close(dweight, y[0], rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("options", [GEMMA, OLMO2], ids=["gemma", "olmo2"])
def test_only_the_product_is_rounded(options: dict[str, Any], device: str) -> None:
    dtype = HALF_DTYPE
    x, weight = numbers(5, 257, dtype=dtype, device=device), numbers(257, dtype=dtype, device=device)
    truth = reference(x.double(), weight.double(), 1e-6, **options)
    info = torch.finfo(dtype)
    rtol, atol = 0.51 * info.eps, info.smallest_normal * info.eps
    torch.testing.assert_close(rms_norm(x, weight, **options).double(), truth, rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", [(2100, 16), (11, 4000)], ids=str)
def test_backward_programs_process_several_blocks(
    shape: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_file("tiling"), "multiprocessors", lambda _: 1)
    x, weight = numbers(*shape, device=device), numbers(shape[-1], device=device)
    judge(rms_norm, lambda x, weight: reference(x, weight, 1e-6), [x, weight])


@pytest.mark.parametrize("scale", [1e-6, 1e4])
@pytest.mark.parametrize("eps", [1e-5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_squares_outside_the_range_of_fp16(scale: float, eps: float, dtype: torch.dtype, device: str) -> None:
    x, weight = numbers(5, 33, dtype=dtype, device=device, scale=scale), numbers(33, dtype=dtype, device=device)
    judge(lambda x, weight: rms_norm(x, weight, eps), lambda x, weight: reference(x, weight, eps), [x, weight])


def test_a_non_finite_row_does_not_affect_others(device: str) -> None:
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


def test_the_reference_equals_torch(device: str) -> None:
    x, weight = (t.double() for t in (numbers(5, 33, device=device), numbers(33, device=device)))
    torch.testing.assert_close(reference(x, weight, 1e-3), F.rms_norm(x, (33,), weight, 1e-3), rtol=1e-13, atol=1e-13)


def test_rows_too_long_for_the_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = numbers(3, 65, device=device), numbers(65, device=device)
    monkeypatch.setattr(kernel_file("tiling"), "MAX_COLUMNS", 64)
    assert torch.equal(rms_norm(x, weight), reference(x, weight, 1e-6))
    assert torch.equal(add_rms_norm(x, x, weight)[0], reference(x + x, weight, 1e-6))
    launch_nothing(monkeypatch, "rms_norm")
    with pytest.raises(ValueError, match=r'backend="triton" with x \(3, 65\); expected at most 64 columns'):
        rms_norm(x, weight, backend="triton")


def test_frozen_inputs_allocate_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "rms_norm")
    launch_nothing(monkeypatch, "tiling")
    x, weight = numbers(300, 64, device=device), numbers(64, device=device)

    def allocated_in_backward(x: Tensor, weight: Tensor) -> list[int]:
        y = rms_norm(x, weight)
        upstream = torch.ones_like(y)
        with Recorder() as recorder:
            torch.autograd.grad(y, [t for t in (x, weight) if t.requires_grad], upstream)
        return recorder.allocated

    programs = kernel_file("tiling").persistent_programs(300, 128, multiprocessors(x))
    dx, dweight = [300 * 64 * 4], [64 * 4, programs * 64 * 4]
    assert allocated_in_backward(x, weight.detach()) == dx
    assert allocated_in_backward(x.detach(), weight) == dweight
    assert allocated_in_backward(x, weight) == dx + dweight


def test_gradients_of_both_summands_share_no_memory(device: str) -> None:
    x, residual, weight = numbers(5, 33, device=device), numbers(5, 33, device=device), numbers(33, device=device)
    outputs = add_rms_norm(x, residual, weight)
    torch.autograd.backward(outputs, [torch.randn_like(t) for t in outputs])
    assert torch.equal(x.grad, residual.grad)
    before = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, before)


def test_summands_with_other_uses(device: str) -> None:
    """Autograd then accumulates into the gradients of both summands, which are one tensor at first."""

    def with_other_uses(add_rms_norm: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
        def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            branch, stream = x * 2, residual * 3
            normalized, summed = add_rms_norm(branch, stream, weight)
            again, twice = add_rms_norm(normalized, summed, weight)
            both, _ = add_rms_norm(twice, twice, weight)
            return again, both, branch * 5, stream * 7, x * residual

        return run

    inputs = [numbers(5, 33, device=device), numbers(5, 33, device=device), numbers(33, device=device)]
    judge(with_other_uses(add_rms_norm), with_other_uses(partial(add_reference, eps=1e-6)), inputs)


@pytest.mark.parametrize("used", [0, 1])
def test_a_single_result_used(used: int, device: str) -> None:
    inputs = [numbers(5, 33, device=device), numbers(5, 33, device=device), numbers(33, device=device)]
    inputs[2].requires_grad_(used == 0)
    judge(lambda *inputs: add_rms_norm(*inputs)[used], lambda *inputs: add_reference(*inputs, 1e-6)[used], inputs)


def test_a_sum_of_frozen_summands_is_frozen(device: str) -> None:
    x, weight = torch.ones(5, 33, device=device), numbers(33, device=device)
    normalized, summed = add_rms_norm(x, x, weight)
    assert (normalized.requires_grad, summed.requires_grad) == (True, False)


@pytest.mark.parametrize("function", [rms_norm, lambda x, weight: add_rms_norm(x, x, weight)])
@pytest.mark.parametrize("weight_shape", [(32,), (1, 33), ()])
def test_a_weight_of_the_wrong_shape(weight_shape: tuple[int, ...], function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape .*; expected \(33,\)"):
        function(torch.ones(5, 33), torch.ones(weight_shape))


@pytest.mark.parametrize("residual_shape", [(33,), (1, 33), (5, 1)])
def test_a_residual_of_the_wrong_shape(residual_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"add_rms_norm: residual has shape .*; expected \(5, 33\)"):
        add_rms_norm(torch.ones(5, 33), torch.ones(residual_shape), torch.ones(33))


@pytest.mark.parametrize("round_before_scale", [False, True])
def test_the_offset_is_added_in_fp32(round_before_scale: bool, device: str) -> None:
    """A sum in half precision would lose small weights."""
    x, weight = numbers(5, 64, dtype=torch.float16, device=device), numbers(64, device=device, scale=0.01).half()
    options: dict[str, Any] = {"weight_offset": 1.0, "round_before_scale": round_before_scale}
    truth = rms_norm(x.double(), weight.double(), **options)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    wide = wide.half().float() if round_before_scale else wide
    expected = (wide * (1.0 + weight.float())).half()
    for backend in ("auto", "torch"):
        actual = rms_norm(x, weight, **options, backend=backend)
        assert_as_exact_as(actual.detach(), expected.detach(), truth.detach())
        assert (actual != expected).float().mean() < 0.05


@pytest.mark.parametrize("used", [0, 1])
def test_residual_of_which_one_output_is_used(used: int, device: str) -> None:
    inputs = [numbers(3, 5, 33, device=device), numbers(33, device=device).detach()]

    def one(x: Tensor, weight: Tensor) -> Tensor:
        return residual_rms_norm(x, weight)[used]

    def reference_one(x: Tensor, weight: Tensor) -> Tensor:
        return (reference(x, weight, 1e-6), x.clone())[used]

    judge(one, reference_one, inputs)


def test_the_kernel_adds_the_gradient_of_the_residual(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "rms_norm")
    x = torch.ones(2, 3, 8, device=device, requires_grad=True)
    normalized, residual = residual_rms_norm(x)
    assert residual.data_ptr() == x.data_ptr()
    upstream = torch.ones_like(x)
    with Recorder() as recorder:
        torch.autograd.grad([normalized, residual], x, [upstream, upstream])
    assert recorder.allocated == [2 * 3 * 8 * 4]
    assert not {"add", "add_"} & {*recorder.names}


def test_the_residual_of_a_frozen_input_is_frozen(device: str) -> None:
    x, weight = torch.randn(3, 33, device=device), numbers(33, device=device)
    normalized, residual = residual_rms_norm(x, weight)
    assert normalized.requires_grad
    assert residual is x
