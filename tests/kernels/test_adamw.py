import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import adamw_update
from ligerzoo.kernels.adamw import reference
from ligerzoo.kernels.stochastic_rounding import FIRST_KEY
from tests.covering import covering, long_cases
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import INTERPRETING, needs_triton

BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS: dict[str, list[Any]] = {
    "dtype": [FP32, BF16],
    "gradient_dtype": [FP32, BF16],
    "state_dtype": [FP32, BF16],
    "shape": [(3, 1001), (7,), ()],
    "step": [1, 2, 100, 10_000],
    "betas": [(0.9, 0.999), (0.9, 0.95), (0.0, 0.0)],
    "weight_decay": [0.0, 0.1],
    "key": [FIRST_KEY, FIRST_KEY + 98],
    "first_group": [0, 1, 2**33],
    "skip": [None, 0.0, 1.0],
}


def inputs(case: dict[str, Any], device: str) -> list[Tensor]:
    """Returns the parameter, the gradient, both moments, the step and lr."""
    torch.manual_seed(1)
    parameter, gradient, m = (torch.randn(case["shape"], device=device) for _ in range(3))
    v = torch.rand(case["shape"], device=device)
    m, v = m.to(case["state_dtype"]), v.to(case["state_dtype"])
    step = torch.tensor(float(case["step"]), device=device)
    lr = torch.tensor(0.01, device=device)
    return [parameter.to(case["dtype"]), gradient.to(case["gradient_dtype"]), m, v, step, lr]


def exact(tensors: list[Tensor], case: dict[str, Any]) -> list[Tensor]:
    """Returns the updated parameter and moments, computed in fp64."""
    p, g, m, v, t, lr = (x.double() for x in tensors)
    beta1, beta2 = case["betas"]
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
    return [p - lr * case["weight_decay"] * p - lr * update, m, v]


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two bf16 numbers around fp64 numbers: towards zero and away from it."""
    towards = (x.float().view(torch.int32) & -65536).view(FP32)
    away = (towards.view(torch.int32) + 65536).view(FP32)
    return towards, away


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])
@pytest.mark.parametrize("case", covering(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], backend: Any, device: str) -> None:
    tensors = inputs(case, device)
    before, expected = [t.clone() for t in tensors], exact(tensors, case)
    skip = None if case["skip"] is None else torch.tensor(case["skip"], device=device)
    options = {name: case[name] for name in ("betas", "weight_decay", "key", "first_group")}
    adamw_update(*tensors, **options, skip=skip, backend=backend)
    assert all(torch.equal(tensors[i], before[i]) for i in (1, 4, 5))
    updated = [tensors[0], *tensors[2:4]]
    if case["skip"]:
        assert all(map(torch.equal, updated, (before[0], *before[2:4])))
        return
    for actual, truth in zip(updated, expected, strict=True):
        if actual.dtype == FP32:
            torch.testing.assert_close(actual.double(), truth, rtol=2e-6, atol=1e-7)
        else:
            towards, away = neighbours(truth)
            is_near_neighbour = (truth - actual).abs() <= truth.abs() * 1e-6 + 1e-7  # fp32 error across a bf16 number
            assert ((actual == towards) | (actual == away) | is_near_neighbour).all()
            if actual.numel() > 1000:
                assert 0.3 < (actual == towards).double().mean() < 0.7


@needs_triton
@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=str)
def test_the_random_bits_are_those_of_the_reference(state_dtype: torch.dtype, device: str) -> None:
    case = {"dtype": BF16, "gradient_dtype": BF16, "state_dtype": state_dtype, "shape": (5, 1001), "step": 3}
    tensors = inputs(case, device)
    expected = [t.clone() for t in tensors]
    adamw_update(*tensors, key=FIRST_KEY + 2, first_group=5, backend="triton")
    reference(*expected, (0.9, 0.999), 1e-8, 0.0, FIRST_KEY + 2, 5)
    for actual, reference_result in zip(tensors, expected, strict=True):
        assert (actual == reference_result).double().mean() > (0.999 if actual.dtype == BF16 else 0.9)
        torch.testing.assert_close(actual, reference_result)


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])
def test_the_parameter_and_its_moments_have_independent_bits(backend: Any, device: str) -> None:
    """All are halfway between two bf16 numbers, so each is rounded up with probability 1/2."""
    p, m, v = (torch.full((10_000,), 1.0, dtype=BF16, device=device) for _ in range(3))
    half = 1 + 2.0**-8
    gradient = torch.full_like(p, half, dtype=FP32)
    step = torch.ones((), device=device)
    lr = torch.tensor(-(2.0**-8) * math.sqrt(1 + half**2) / half, device=device)
    adamw_update(p, gradient, m, v, step, lr, betas=(0.0, 0.5), eps=0.0, key=FIRST_KEY, backend=backend)
    draws = torch.stack([(t > 1).double() for t in (p, m, v)])
    assert draws.mean(1).sub(0.5).abs().max() < 0.05
    assert torch.corrcoef(draws).sub(torch.eye(3, device=device)).abs().max() < 0.05


@needs_triton
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_without_a_key_it_rounds_to_the_nearest(dtype: torch.dtype, device: str) -> None:
    if INTERPRETING and dtype == BF16:
        pytest.skip("the interpreter truncates to bf16")
    case = {"dtype": dtype, "gradient_dtype": dtype, "state_dtype": FP32, "shape": (5, 1001), "step": 3}
    tensors = inputs({**case}, device)
    truth = exact(tensors, {"betas": (0.9, 0.999), "weight_decay": 0.0})[0]
    adamw_update(*tensors, backend="triton")
    torch.testing.assert_close(tensors[0].double(), truth, rtol=2e-6 if dtype == FP32 else 2**-8, atol=1e-7)


@needs_triton
def test_bias_corrections_do_not_cancel(device: str) -> None:
    """With a gradient of 1 in all steps, the update is lr / (1 + eps), for any beta."""
    for step in (1, 3, 30, 300, 10_000):
        for beta in (0.5, 0.9, 0.999, 0.99999):
            p = torch.zeros(8, device=device)
            m = torch.full_like(p, 1 - beta ** (step - 1))
            step_tensor, lr = torch.tensor(float(step), device=device), torch.tensor(1.0, device=device)
            adamw_update(p, torch.ones_like(p), m, m.clone(), step_tensor, lr, betas=(beta, beta), eps=0.0)
            corrected = -math.expm1(step * math.log(beta))
            m_after = m.double()
            expected = -(m_after / corrected) / (m_after / corrected).sqrt()
            torch.testing.assert_close(p.double(), expected, rtol=3e-6, atol=0)


def test_strided_tensors_and_views(device: str) -> None:
    case = {"dtype": BF16, "gradient_dtype": BF16, "state_dtype": BF16, "shape": (6, 10), "step": 3}
    tensors = inputs(case, device)
    expected = [t.clone() for t in tensors]
    adamw_update(*expected, key=FIRST_KEY)
    strided = [t.t().clone(memory_format=torch.contiguous_format).t() if t.dim() else t for t in tensors]
    assert not strided[0].is_contiguous()
    adamw_update(*strided, key=FIRST_KEY)
    for actual, of_contiguous in zip(strided, expected, strict=True):
        torch.testing.assert_close(actual, of_contiguous, rtol=2**-7, atol=0)


def test_an_update_is_visible_to_autograd(device: str) -> None:
    weight = torch.ones(4, device=device, requires_grad=True)
    loss = (weight * weight).sum()
    m, v, one = torch.zeros(4, device=device), torch.zeros(4, device=device), torch.ones((), device=device)
    adamw_update(weight, torch.ones(4, device=device), m, v, one, one)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.plain
@pytest.mark.parametrize("case", long_cases({name: OPTIONS[name] for name in (
    "dtype", "gradient_dtype", "state_dtype", "key", "first_group", "skip")}), ids=str)  # fmt: skip
@pytest.mark.parametrize("is_stochastic", [False, True])
def test_it_compiles(case: dict[str, Any], is_stochastic: bool) -> None:
    pytest.importorskip("triton")
    tensors = inputs({**case, "shape": (5, 1001), "step": 2}, "cpu")
    skip = None if case["skip"] is None else torch.tensor(case["skip"])
    key = case["key"] if is_stochastic else None
    with compiling_for_hopper():
        adamw_update(*tensors, key=key, first_group=case["first_group"], skip=skip, backend="triton")


@pytest.mark.parametrize("arguments, message", [
    ({"gradient": torch.ones(3)}, r"parameter is \(2,\), gradient \(3,\), .*; expected the same shape"),
    ({"betas": (1.0, 0.9)}, "beta1=1.0; expected a number from 0 to 1, not 1"),
    ({"eps": -1.0}, "eps=-1.0; expected 0 or a positive number"),
    ({"key": 3}, "key=3; expected an integer, 4294967296 or more"),
    ({"step": torch.tensor(3)}, "step has dtype torch.int64; expected a floating-point dtype"),
])  # fmt: skip
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    valid = {name: torch.ones(2) for name in ("parameter", "gradient", "exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match=f"^adamw_update: {message}"):
        adamw_update(**{**valid, "step": torch.tensor(1.0), "lr": torch.tensor(0.1), **arguments})
