import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import adamw_update_fp8
from ligerzoo.kernels.adamw_fp8 import SCALED, decode, encode, encode_root, reference, scale_count
from ligerzoo.kernels.fp8 import FP8
from ligerzoo.kernels.stochastic_rounding import FIRST_KEY, words_like
from tests.covering import covering
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import needs_triton

BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS: dict[str, list[Any]] = {
    "dtype": [FP32, BF16],
    "gradient_dtype": [FP32, BF16],
    "shape": [(5, 1001), (256,), (7,), (), (3, 0)],
    "step": [1, 2, 100, 10_000],
    "betas": [(0.9, 0.999), (0.9, 0.95), (0.0, 0.0)],
    "weight_decay": [0.0, 0.1],
    "key": [FIRST_KEY, FIRST_KEY + 98],
    "skip": [None, 0.0, 1.0],
}
LARGEST_GAP = 1.125
"""The largest ratio of two neighbouring numbers of e4m3, from 2^-6."""


def inputs(case: dict[str, Any], device: str) -> list[Tensor]:
    """Returns the parameter, the gradient, both moments with their scales, the step and lr."""
    torch.manual_seed(1)
    parameter, gradient, m = (torch.randn(case["shape"], device=device) for _ in range(3))
    words = words_like(parameter, FIRST_KEY, torch.ones((), device=device), 0)
    moments = (*encode(m, words), *encode_root(torch.rand(case["shape"], device=device), words))
    step = torch.tensor(float(case["step"]), device=device)
    lr = torch.tensor(0.01, device=device)
    return [parameter.to(case["dtype"]), gradient.to(case["gradient_dtype"]), *moments, step, lr]


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])
@pytest.mark.parametrize("case", covering(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], backend: Any, device: str) -> None:
    tensors = inputs(case, device)
    before = [t.clone() for t in tensors]
    p, g = (t.double() for t in before[:2])
    beta1, beta2 = case["betas"]
    m = beta1 * decode(*before[2:4]).double() + (1 - beta1) * g
    v = beta2 * decode(*before[4:6]).double().square() + (1 - beta2) * g * g
    update = m / (1 - beta1 ** case["step"]) / ((v / (1 - beta2 ** case["step"])).sqrt() + 1e-8)
    expected = p - 0.01 * case["weight_decay"] * p - 0.01 * update

    skip = None if case["skip"] is None else torch.tensor(case["skip"], device=device)
    options = {name: case[name] for name in ("betas", "weight_decay", "key")}
    adamw_update_fp8(*tensors, **options, skip=skip, backend=backend)
    unchanged = range(8) if case["skip"] else (1, 6, 7)
    assert all(torch.equal(tensors[i].float(), before[i].float()) for i in unchanged)
    if not case["skip"]:
        ulp = 2e-6 if case["dtype"] == FP32 else 2**-7
        torch.testing.assert_close(tensors[0].double(), expected, rtol=ulp, atol=1e-6)
        assert_near(decode(*tensors[2:4]), m, tensors[3])
        assert_near(decode(*tensors[4:6]), v.sqrt(), tensors[5])
        largest = tensors[3].new_zeros(len(tensors[3]) * SCALED)
        largest[: m.numel()] = m.float().abs().flatten()
        ratio = largest.view(-1, SCALED).amax(1) / tensors[3]
        assert ((ratio >= 128) & (ratio < 256)).all()
        assert (tensors[3].log2() % 1 == 0).all()


def assert_near(stored: Tensor, truth: Tensor, scales: Tensor) -> None:
    """Asserts that numbers are stored as one of their two neighbours in e4m3, at the scales of their blocks."""
    scale = scales.repeat_interleave(SCALED)[: truth.numel()].view(truth.shape).double()
    distance = (stored.double() - truth).abs()
    assert (distance <= ((LARGEST_GAP - 1) * truth.abs()).clamp_min(scale * 2.0**-9) * (1 + 1e-5)).all()


@needs_triton
@pytest.mark.parametrize("stochastic", [True, False])
def test_the_random_bits_are_those_of_the_reference(stochastic: bool, device: str) -> None:
    case = {"dtype": BF16, "gradient_dtype": BF16, "shape": (5, 1001), "step": 3}
    tensors = inputs(case, device)
    expected = [t.clone() for t in tensors]
    adamw_update_fp8(*tensors, key=FIRST_KEY + 2, stochastic=stochastic, backend="triton")
    reference(*expected, (0.9, 0.999), 1e-8, 0.0, FIRST_KEY + 2, stochastic)
    for actual, reference_result in zip(tensors, expected, strict=True):
        if stochastic or actual.dtype != BF16:  # the interpreter truncates to bf16
            assert (actual.float() == reference_result.float()).double().mean() > 0.995


@pytest.mark.parametrize("exponent", [-50, -20, 0, 20])
@pytest.mark.parametrize("below_largest", [0, 7, 14, 16])
def test_codes_are_right_in_expectation(exponent: int, below_largest: int) -> None:
    """m itself, and v, whose root is stored: for normal and subnormal numbers of e4m3, in all blocks."""
    x = torch.full((400 * SCALED,), 1.3 * 2.0 ** (exponent - below_largest))
    x[::SCALED] = 2.0**exponent
    others = torch.arange(len(x)) % SCALED != 0
    words = words_like(x, FIRST_KEY, torch.ones(()), 0)
    for sign in (1, -1):
        mean = decode(*encode(sign * x, words))[others].double().mean() / (sign * x[1])
        assert abs(mean - 1) < (0.002 if below_largest < 13 else 0.02)
    root = decode(*encode_root(x.double().square().float(), words))
    if below_largest < 13:
        assert abs(root[others].double().square().mean() / x[1].double().square() - 1) < 0.004
    else:  # a root does not become 0
        assert (root > 0).all()
        assert (root[others].double().square().mean() / x[1].double().square()) > 0.98


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])
def test_the_parameter_and_its_moments_have_independent_bits(backend: Any, device: str) -> None:
    """All are between two numbers of their formats, so each is rounded up with a probability of about 1/2."""
    p = torch.full((40 * SCALED,), 1.0, dtype=BF16, device=device)
    moments = [torch.zeros_like(p, dtype=FP8), p.new_ones(40, dtype=FP32)] * 2
    states = [t.clone() for t in moments]
    half = 1 + 2.0**-4
    gradient = torch.full_like(p, half, dtype=FP32)
    step, lr = torch.ones((), device=device), torch.tensor(-(2.0**-8), device=device)
    adamw_update_fp8(p, gradient, *states, step, lr, key=FIRST_KEY, betas=(0.0, 0.0), eps=0.0, backend=backend)
    draws = torch.stack([(t > 1).double() for t in (p, decode(*states[:2]), decode(*states[2:]))])
    assert draws.mean(1).sub(0.5).abs().max() < 0.05
    assert torch.corrcoef(draws).sub(torch.eye(3, device=device)).abs().max() < 0.05


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_an_infinite_moment_does_not_reach_its_neighbours(value: float, backend: Any, device: str) -> None:
    results = []
    for outlier in (0.0, value):
        tensors = inputs({"dtype": FP32, "gradient_dtype": FP32, "shape": (2 * SCALED,), "step": 1}, device)
        for step in range(1, 4):
            tensors[1][7] = outlier if step == 1 else 0.0
            tensors[6].fill_(step)
            adamw_update_fp8(*tensors, key=FIRST_KEY, backend=backend)
        results.append(torch.cat([tensors[0][:7], tensors[0][8:]]))
    assert torch.equal(*results)


def test_zeros_remain_zeros() -> None:
    zeros = torch.zeros(300)
    words = words_like(zeros, FIRST_KEY, torch.ones(()), 0)
    for codes, scales in (encode(zeros, words), encode_root(zeros, words)):
        assert not decode(codes, scales).any()
        assert (scales > 0).all()


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])
def test_a_second_moment_follows_the_gradients_in_expectation(backend: Any, device: str) -> None:
    """With beta2 = 0.999, one update changes v by 0.1 %, and neighbouring codes differ by a quarter."""
    p = torch.zeros(2048, device=device)
    g = torch.full_like(p, 0.01)
    g[::SCALED] = 1.0
    states = [*(torch.zeros_like(p, dtype=FP8), p.new_ones(scale_count(p))) * 2]
    states = [t.clone() for t in states]
    others = torch.arange(len(p), device=device) % SCALED != 0
    for factor, steps, expected in ((1.0, 20, 1.0), (0.0, 20, 0.98**20)):
        for step in range(1, steps + 1):
            t, lr = torch.tensor(float(step + 100 * (factor == 0)), device=device), torch.zeros((), device=device)
            adamw_update_fp8(
                p, factor * g, *states, t, lr, key=FIRST_KEY, betas=(0.9, 0.98 if factor == 0 else 0.0), backend=backend
            )
        v = decode(*states[2:])[others].double().square() / 1e-4
        assert abs(v.mean().item() / expected - 1) < 0.05


@pytest.mark.parametrize("change, message", [
    ({"exp_avg": torch.zeros(3, 4)}, r"exp_avg is \(3, 4\) torch.float32; expected \(3, 4\) torch.float8_e4m3fn"),
    ({"root": torch.zeros(12, dtype=FP8)}, r"root is \(12,\) torch.float8_e4m3fn; expected \(3, 4\)"),
    ({"root_scales": torch.ones(2)}, r"root_scales is \(2,\) torch.float32; expected \(1,\)"),
    ({"gradient": torch.ones(3)}, r"gradient is \(3,\)"),
    ({"key": 3}, "key=3; expected"),
    ({"betas": (0.9, 1.0)}, "beta2=1.0; expected"),
    ({"eps": math.inf}, "eps=inf; expected"),
])  # fmt: skip
def test_messages(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "parameter": torch.ones(3, 4), "gradient": torch.ones(3, 4), "exp_avg": torch.zeros(3, 4, dtype=FP8),
        "exp_avg_scales": torch.ones(1), "root": torch.zeros(3, 4, dtype=FP8), "root_scales": torch.ones(1),
        "step": torch.ones(()), "lr": torch.ones(()), "key": FIRST_KEY,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^adamw_update_fp8: {message}"):
        adamw_update_fp8(**{**arguments, **change})


@pytest.mark.plain
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_compiles(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    tensors = inputs({"dtype": dtype, "gradient_dtype": dtype, "shape": (5, 1001), "step": 3}, "cpu")
    with compiling_for_hopper() as kernels:
        adamw_update_fp8(*tensors, key=FIRST_KEY)
    assert len(kernels) == 1
    assert "mul.ftz" not in kernels[0].asm["ptx"]  # the smallest codes are subnormal numbers
