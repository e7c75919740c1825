from typing import Any

import pytest
import torch

from ligerzoo.kernels import round_stochastically
from ligerzoo.kernels.stochastic_rounding import FIRST_KEY, reference
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import needs_triton

BF16 = torch.bfloat16
backends = pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])


def rounded(source: torch.Tensor, step: int = 1, backend: Any = "auto", **options: Any) -> torch.Tensor:
    target = torch.zeros(source.shape, dtype=BF16, device=source.device)
    step_tensor = torch.tensor(float(step), device=source.device)
    round_stochastically(source, target, step_tensor, **{"key": FIRST_KEY, "backend": backend, **options})
    return target


@backends
def test_the_expectation_is_the_number_itself(backend: Any, device: str) -> None:
    """20,000 roundings of each number: the mean is within 5 standard errors, and both neighbours occur."""
    ulp = 2.0**-7
    for share in (0.001, 0.1, 0.5, 0.9):
        for scale in (1.0, -1.0, 2.0**-100, -(2.0**60)):
            x = (torch.tensor(1.0 + share * ulp) * scale).item()
            y = rounded(torch.full((20_000,), x, device=device), backend=backend).double() / scale
            assert set(y.unique().tolist()) == {1.0, 1.0 + ulp}
            error = ((y.mean() - x / scale) / ulp).abs().item()
            assert error < 5 * (share * (1 - share) / 20_000) ** 0.5 + 2**-16


@backends
def test_representable_and_special_numbers_do_not_change(backend: Any, device: str) -> None:
    special = [0.0, -0.0, torch.inf, -torch.inf, 1e-40, -3.0, 2.0**-133]
    x = torch.tensor(special, device=device).to(BF16).float().repeat(300)
    y = rounded(x, backend=backend)
    assert torch.equal(y.float().view(torch.int32), x.view(torch.int32))
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000 - 2**32 + 2**31], dtype=torch.int64).to(torch.int32)
    nan = bits.view(torch.float32).to(device).repeat(300)
    nan = nan[nan.isnan()]
    assert nan.numel() >= 900
    assert rounded(nan, backend=backend).isnan().all()


@needs_triton
@pytest.mark.parametrize("shape", [(), (1,), (5, 1001), (0,)])
@pytest.mark.parametrize("key, step, first_group", [
    (FIRST_KEY, 0, 0), (FIRST_KEY, 2**24, 1), (2**62 + 12345, 7, 2**32 - 2000),
])  # fmt: skip
def test_bits_equal_those_of_the_reference(
    shape: tuple[int, ...], key: int, step: int, first_group: int, device: str
) -> None:
    x = torch.randn(shape, device=device)
    expected = torch.zeros(shape, dtype=BF16, device=device)
    reference(x, expected, torch.tensor(step, device=device), key, first_group)
    assert torch.equal(rounded(x, step, "triton", key=key, first_group=first_group), expected)


@backends
def test_a_shard_gets_the_bits_of_the_whole(backend: Any, device: str) -> None:
    x = torch.randn(4000, device=device)
    whole = rounded(x, backend=backend)
    assert torch.equal(rounded(x[1200:], backend=backend, first_group=300), whole[1200:])


@backends
def test_other_keys_and_steps_have_independent_bits(backend: Any, device: str) -> None:
    x = torch.full((10_000,), 1 + 2.0**-8, device=device)  # rounds up with probability 1/2
    draws = [(rounded(x, step, backend, key=FIRST_KEY + key) > 1).double() for key in (0, 1) for step in (1, 2)]
    assert torch.corrcoef(torch.stack(draws)).sub(torch.eye(4, device=device)).abs().max() < 0.05
    assert torch.equal(draws[0], (rounded(x, 1, backend) > 1).double())


@backends
def test_skipping(backend: Any, device: str) -> None:
    x = torch.randn(2000, device=device)
    assert torch.equal(rounded(x, backend=backend, skip=torch.zeros(1, device=device)), rounded(x, backend=backend))
    assert not rounded(x, backend=backend, skip=torch.ones(1, device=device)).any()


@pytest.mark.plain
@pytest.mark.parametrize("skip", [None, torch.zeros(1)])
def test_it_compiles(skip: Any) -> None:
    pytest.importorskip("triton")
    with compiling_for_hopper():
        rounded(torch.randn(1001), backend="triton", skip=skip)


@pytest.mark.parametrize("source, target", [
    (torch.ones(3), torch.ones(3)), (torch.ones(3).double(), torch.ones(3).to(BF16)),
    (torch.ones(3), torch.ones(2).to(BF16)),
])  # fmt: skip
def test_arguments_are_checked(source: torch.Tensor, target: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"^round_stochastically: source is .*; expected fp32 and bf16 tensors of the"):
        round_stochastically(source, target, torch.tensor(1.0), key=FIRST_KEY)
