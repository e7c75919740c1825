"""Products whose sums are not split: on a GPU by cuBLASLt, and by our kernel where torch does not use it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import linears
from ligerzoo.kernels.row_sums import LowRankTerm, unsplit_linear, unsplit_sum
from tests.covering import covering
from tests.kernels.accuracy import assert_as_exact_as, judge
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.layouts import offset, padded, transposed
from tests.kernels.machine import HALF_DTYPE, kernel_file, needs_hopper, needs_triton
from tests.kernels.oracles import numbers

LAYOUTS = [torch.clone, offset, padded, transposed]
CASES: dict[str, list[Any]] = {
    "rows": [(1,), (2, 1), (65,), (7, 10)],
    "outputs": [1, 64, 65, 72, 130],
    "features": [16, 130, 257],
    "has_bias": [False, True],
    "x_layout": LAYOUTS,
    "weight_layout": LAYOUTS,
}


@pytest.fixture
def addmm_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sums may be split, and `addmm` raises where torch 2.11 to 2.15 may on a GPU. Returns the calls that do not."""
    calls: list[tuple[int, ...]] = []

    def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        dense = all(t.is_contiguous() or t.T.is_contiguous() for t in (x, weight)) and bias.is_contiguous()
        aligned = x.shape[1] % 8 == 0 and all(t.data_ptr() % 16 == 0 for t in (bias, x, weight))
        if min(*x.shape, *weight.shape) == 1 or not (dense and aligned):
            raise RuntimeError("allow_splitk=False requires the cuBLASLt backend")
        calls.append((*x.shape, weight.shape[1]))
        return F.linear(x, weight.T, bias)

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(kernel_file("row_sums"), "would_split", lambda x, weight: True)
    return calls


@needs_triton
@pytest.mark.parametrize("case", covering(CASES))
def test_products_that_torch_does_not_give_to_cublaslt(
    case: dict[str, Any], device: str, addmm_calls: list[tuple[int, ...]]
) -> None:
    rows, outputs, features, has_bias, x_layout, weight_layout = case.values()
    inputs = [x_layout(numbers(*rows, features, dtype=HALF_DTYPE, device=device).detach()).requires_grad_()]
    inputs += [weight_layout(numbers(outputs, features, dtype=HALF_DTYPE, device=device).detach()).requires_grad_()]
    inputs += [numbers(outputs, dtype=HALF_DTYPE, device=device)] * has_bias
    judge(unsplit_linear, F.linear, inputs)


@needs_triton
def test_products_that_cublaslt_computes(device: str, addmm_calls: list[tuple[int, ...]]) -> None:
    x, weight = (numbers(n, 16, dtype=HALF_DTYPE, device=device) for n in (66, 75))
    y = unsplit_linear(x.view(2, 33, 16), weight)
    assert addmm_calls == [(66, 16, 72)]  # the kernel computes the last three
    torch.testing.assert_close(y, F.linear(x, weight).view(2, 33, 75))


@needs_triton
def test_second_derivatives(device: str, addmm_calls: list[tuple[int, ...]]) -> None:
    x, weight = (numbers(n, 16, dtype=HALF_DTYPE, device=device) for n in (5, 1))

    def penalty(function: Callable[..., Tensor]) -> Tensor:
        (dx,) = torch.autograd.grad(function(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.float().square().sum(), weight)[0]

    torch.testing.assert_close(penalty(unsplit_linear), penalty(F.linear), rtol=0.02, atol=0.1)


@needs_triton
def test_a_row_has_the_same_bits_in_every_call(device: str, addmm_calls: list[tuple[int, ...]]) -> None:
    x, weight = numbers(150, 300, dtype=HALF_DTYPE, device=device), numbers(1, 300, dtype=HALF_DTYPE, device=device)
    y = unsplit_linear(x, weight)
    for start, end in ((0, 1), (3, 70), (149, 150)):
        assert torch.equal(unsplit_linear(x[start:end], weight), y[start:end])


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows, outputs, rank", [(1, 70, 16), (3, 7, 3), (70, 130, 40), (65, 7, 70)])
def test_sums_with_a_low_rank_term(
    rows: int, outputs: int, rank: int, has_bias: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, h, bias = (
        numbers(*shape, dtype=HALF_DTYPE, device=device)
        for shape in ((rows, 50), (outputs, 50), (rows, rank + 3), (outputs,))
    )
    h, b, bias = h[:, 2:-1], numbers(outputs, rank, dtype=torch.float32, device=device), bias if has_bias else None

    plain = F.linear(x, weight, bias) + 1.5 * F.linear(h, b.to(h.dtype))
    wide = [None if t is None else t.double() for t in (x, weight, bias, h, b.to(h.dtype))]
    truth = F.linear(*wide[:3]) + 1.5 * F.linear(*wide[3:])  # type: ignore[arg-type]
    monkeypatch.setattr(kernel_file("row_sums"), "_keeps_order", lambda x, weight: True)
    y = unsplit_sum(x, weight, bias, h, b, 1.5)
    assert_as_exact_as(y, plain, truth)


@pytest.mark.plain
@torch.no_grad()
@pytest.mark.parametrize("outputs", [1, 40, 3000])
def test_it_compiles(outputs: int) -> None:
    x, weight = torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(outputs, 4096, dtype=torch.bfloat16)
    with compiling_for_hopper():
        for n, rank in ((1, 24), (65, 16), (65, 130)):
            term = LowRankTerm(x[:, :rank].expand(n, -1), torch.empty(outputs, rank), 2.0)
            kernel_file("row_sums")._ordered_product(x.expand(n, -1), weight, weight[:, 0], term)
            kernel_file("row_sums")._add_low_rank_term(x.expand(n, -1)[:, :outputs], term)
        kernel_file("row_sums")._ordered_product(x, weight, None, LowRankTerm())


# On a Hopper GPU

ROWS = (1, 2, 8, 64, 65, 700, 2047, 2048, 5000, 20000)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("features", [896, 2048, 2049, 2056, 4096, 14336])
@pytest.mark.parametrize("outputs", [1, 2, 8, 63, 64, 65, 130, 512, 1000, 2049])
def test_rows_do_not_depend_on_their_number(outputs: int, features: int, has_bias: bool) -> None:
    x = torch.randn(max(ROWS), features, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, features, device="cuda", dtype=torch.bfloat16) * features**-0.5
    bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16) if has_bias else None
    whole = linears(x, [weight], [bias])[0]
    for rows in ROWS:
        for results in (linears(x[:rows], [weight], [bias])[0], unsplit_linear(x[:rows], weight, bias)):
            assert torch.equal(results, whole[:rows]), f"{rows} rows: {(results != whole[:rows]).sum()} numbers differ"


@needs_hopper
@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rank", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("outputs, features", [(512, 2048), (2048, 2048), (4096, 4096), (1024, 3072), (4096, 14336)])
def test_rows_with_a_low_rank_term_do_not_depend_on_their_number(
    outputs: int, features: int, rank: int, has_bias: bool
) -> None:
    x, weight, h, b = (
        torch.randn(*shape, device="cuda").bfloat16()
        for shape in ((max(ROWS), features), (outputs, features), (max(ROWS), rank), (outputs, rank))
    )
    bias = b[:, 0].contiguous() if has_bias else None
    whole = unsplit_sum(x, weight, bias, h, b, 2.0)
    for rows in ROWS:
        y = unsplit_sum(x[:rows], weight, bias, h[:rows], b, 2.0)
        assert torch.equal(y, whole[:rows]), f"{rows} rows: {(y != whole[:rows]).sum()} numbers differ"


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_random_products(seed: int) -> None:
    """Any layout, alignment and size: no error from torch, and as exact as torch's own product."""
    for draw in range(seed, seed + 20):
        judge_random_product(draw)


def strided(bias: Tensor) -> Tensor:
    return torch.stack([bias, bias], 1)[:, 0]


def expanded(bias: Tensor) -> Tensor:
    return bias[:1].expand(len(bias))


def judge_random_product(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    rows, outputs = pick(1, 2, 3, 64, 65, 700, 2047, 2048), pick(1, 2, 7, 64, 65, 66, 500, 1000)
    features = pick(2049, 2050, 2052, 2056, 4096, 5001)
    x, weight = (
        pick(*LAYOUTS)(torch.randn(n, features, device="cuda").bfloat16()).requires_grad_() for n in (rows, outputs)
    )
    bias = pick(None, pick(torch.clone, offset, strided, expanded)(torch.randn(outputs, device="cuda").bfloat16()))
    y = unsplit_linear(x, weight, bias)
    expected = F.linear(x, weight, bias)
    truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_as_exact_as(y.detach(), expected.detach(), truth.detach())
    upstream = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, weight], upstream)
    for actual, reference, exact in zip(
        gradients,
        torch.autograd.grad(expected, [x, weight], upstream),
        torch.autograd.grad(truth, [x, weight], upstream.double()),
        strict=True,
    ):
        assert_as_exact_as(actual, reference, exact)
