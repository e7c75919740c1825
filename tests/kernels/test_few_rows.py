from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import few_rows, linear_glu, linears
from ligerzoo.kernels.few_rows import MAX_ROWS
from ligerzoo.kernels.linears import compute_linears, glu_reference, reference
from tests.covering import covering, long_cases
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import HALF_DTYPE, ROUNDED_DTYPES, needs_triton, on_gpu_too
from tests.kernels.oracles import numbers

SHAPES: dict[str, list[Any]] = {
    "dtype": [dtype for dtype in ROUNDED_DTYPES if dtype.itemsize == 2],
    "rows": [(), (1,), (1, 1), (3,), (2, 1), (17, 1), (33,), (4, 16)],
    "features": on_gpu_too([16, 300, 512], [1000, 4096]),
    "bias": [False, True],
    "strided": [False, True],
    "int8": [False, True],
}
LINEARS = {**SHAPES, "outputs": [(5,), (64, 16), (70, 33, 8), (3, 3, 3)]}
GLUS = {**SHAPES, "outputs": [5, 70], "activation": ["silu", "gelu", "gelu_tanh", "quick_gelu"]}


class Inputs(NamedTuple):
    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    scales: list[Tensor] | None


def inputs(case: dict[str, Any], sizes: list[int], device: str) -> Inputs:
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return numbers(*shape, dtype=case["dtype"], device=device).detach()

    features = case["features"]
    x = draw(*case["rows"], 2 * features)[..., :features] if case["strided"] else draw(*case["rows"], features)
    weights, scales = [draw(size, features) for size in sizes], None
    if case["int8"]:
        weights = [torch.randint(-128, 128, (size, features), dtype=torch.int8, device=device) for size in sizes]
        scales = [0.001 + 0.01 * torch.rand(size, device=device) for size in sizes]
    return Inputs(x, weights, [draw(size) if case["bias"] else None for size in sizes], scales)


def dequantized(weights: list[Tensor], scales: list[Tensor] | None) -> list[Tensor]:
    if scales is None:
        return weights
    return [weight.double() * scale.double()[:, None] for weight, scale in zip(weights, scales, strict=True)]


def wide(tensors: list[Any]) -> list[Any]:
    return [None if t is None else t.double() for t in tensors]


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("case", covering(LINEARS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], device: str) -> None:
    x, weights, biases, scales = inputs(case, case["outputs"], device)
    actual = linears(x, weights, biases, scales, backend="triton")
    truth = reference(x.double(), wide(dequantized(weights, scales)), wide(biases))
    for y, expected, exact in zip(actual, reference(x, weights, biases, scales), truth, strict=True):
        assert_as_exact_as(y, expected, exact)


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("case", covering(GLUS), ids=str)
def test_every_pair_of_options_of_the_glu(case: dict[str, Any], device: str) -> None:
    x, weights, biases, scales = inputs(case, [case["outputs"]] * 2, device)
    parameters = *weights, *biases, *(scales or [None, None])
    actual = linear_glu(x, *parameters, activation=case["activation"], backend="triton")
    expected = glu_reference(x, *parameters, case["activation"])
    dense = *wide(dequantized(weights, scales)), *wide(biases)
    truth = glu_reference(x.double(), *dense, activation=case["activation"])
    assert_as_exact_as(actual, expected, truth)


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 8, MAX_ROWS])
@pytest.mark.parametrize("int8", [False, True])
def test_rows_do_not_affect_each_other(rows: int, int8: bool, device: str) -> None:
    case = {"dtype": HALF_DTYPE, "rows": (rows,), "features": 300, "bias": False, "strided": False, "int8": int8}
    x, weights, _, scales = inputs(case, [70], device)
    (before,) = linears(x, weights, None, scales, backend="triton")
    for row in {0, rows // 2, rows - 1}:
        poisoned = torch.full_like(x, torch.nan)
        poisoned[row] = x[row]
        (after,) = linears(poisoned, weights, None, scales, backend="triton")
        assert torch.equal(after[row], before[row])


@needs_triton
def test_other_products_are_those_of_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> None:
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(few_rows, "_few_rows", forbidden)
    x, weight = (torch.randn(72, 16, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight.requires_grad_()
    linears(x[:4], [weight], backend="triton")[0].sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        for a, b in ((x, weight), (x[:4].float(), weight.float()), (x[:0], weight), (x[:4], weight[:, ::2])):
            (y,) = linears(a[:, : b.shape[1]], [b], backend="triton")
            assert torch.equal(y, torch.nn.functional.linear(a[:, : b.shape[1]], b))
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            assert linears(x[:4].float(), [weight])[0].dtype == torch.bfloat16


COMPILED: dict[str, list[Any]] = {
    "rows": [1, 2, 32, 64], "features": [4096, 1000], "outputs": [1024, 40000], "int8": [False, True]
}  # fmt: skip


@pytest.mark.plain
@torch.no_grad()
@pytest.mark.parametrize("case", long_cases(COMPILED), ids=str)
def test_it_compiles(case: dict[str, Any]) -> None:
    rows, features, outputs, int8 = case.values()
    x = torch.empty(rows, features, dtype=torch.bfloat16)
    weight = torch.empty(outputs, features, dtype=torch.int8 if int8 else x.dtype)
    bias, scale = torch.empty(outputs, dtype=torch.bfloat16), torch.empty(outputs) if int8 else None
    with compiling_for_hopper():
        linears(x, [weight] * 3, [bias] * 3, None if scale is None else [scale] * 3, backend="triton")
        linear_glu(x, weight, weight, None, None, scale, scale, backend="triton")


@torch.no_grad()
def test_products_with_int8_weights_elsewhere_are_the_reference() -> None:
    case = {"dtype": torch.float32, "rows": (3,), "features": 20, "bias": True, "strided": False, "int8": True}
    x, weights, biases, scales = inputs(case, [7, 7], "cpu")
    assert scales is not None
    for got, expected in zip(linears(x, weights, biases, scales), reference(x, weights, biases, scales), strict=True):
        assert torch.equal(got, expected)
    got = linear_glu(x, *weights, *biases, *scales)
    dense = glu_reference(x.double(), *dequantized(weights, scales), *wide(biases))
    torch.testing.assert_close(got, dense.float())
    x.requires_grad_()
    with torch.enable_grad():
        linears(x, weights, biases, scales)[0].sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dequantized(weights, scales)[0].sum(0).float().expand(3, 20))


@torch.no_grad()
def test_arguments_are_checked() -> None:
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    for arguments in ((weight, weight[:2]), (weight[:, :3], weight[:, :3]), (weight, weight, torch.ones(4))):
        with pytest.raises(ValueError, match=r"^linear_glu: x is \(2, 4\), gate .*; expected \(..., K\)"):
            linear_glu(x, *arguments)
    int8, scale = torch.ones(3, 4, dtype=torch.int8), torch.ones(3)
    with pytest.raises(ValueError, match=r"^linear_glu: x is .* two scales or none"):
        linear_glu(x, int8, weight, gate_scale=scale)
    with pytest.raises(ValueError, match=r"^linear_glu: x is .* two scales or none"):
        linear_glu(x, int8, int8, gate_scale=scale, up_scale=scale[:2])
    with pytest.raises(ValueError, match=r"^linears: x is .* as many biases and scales as weights"):
        linears(x, [int8, int8], scales=[scale])
    for wrong, other in ((int8.short(), scale), (int8, scale.double())):
        with pytest.raises(ValueError, match=r"^linears: weights\[0\] has dtype .*expected torch.int8 with a scale"):
            linears(x, [wrong], scales=[other])
    with pytest.raises(ValueError, match=r"^linears: weights\[0\] has dtype torch.int8; expected a floating-point"):
        linears(x, [int8])
    with pytest.raises(ValueError, match=r"activation='slu'; .*Did you mean 'silu'"):
        linear_glu(x, weight, weight, activation="slu")  # type: ignore[arg-type]


@needs_triton
def test_a_bias_of_another_length_is_left_to_torch(device: str) -> None:
    """The kernel would read beyond a shorter one."""
    options: Any = {"dtype": HALF_DTYPE, "device": device}
    x, weight, bias = torch.randn(2, 16, **options), torch.randn(8, 16, **options), torch.zeros(7, **options)
    with torch.no_grad(), pytest.raises(RuntimeError):
        compute_linears(x, [weight], [bias], "triton")
