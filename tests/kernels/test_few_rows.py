from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import few_rows, linear_glu, linears
from ligerzoo.kernels.few_rows import MAX_ROWS, glu_reference
from ligerzoo.kernels.linears import reference
from tests.covering import covering
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import HALF_DTYPE, INTERPRETING, ROUNDED_DTYPES, needs_triton, on_gpu_too
from tests.kernels.oracles import numbers

SHAPES: dict[str, list[Any]] = {
    "dtype": [dtype for dtype in ROUNDED_DTYPES if dtype.itemsize == 2],
    "rows": [(), (1,), (1, 1), (3,), (2, 1), (17, 1), (33,), (4, 16)],
    "features": on_gpu_too([16, 300, 512], [1000, 4096]),
    "bias": [False, True],
    "strided": [False, True],
}
LINEARS = {**SHAPES, "outputs": [(5,), (64, 16), (70, 33, 8), (3, 3, 3)]}
GLUS = {**SHAPES, "outputs": [5, 70], "activation": ["silu", "gelu", "gelu_tanh", "quick_gelu"]}


def inputs(case: dict[str, Any], sizes: list[int], device: str) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Returns x, the weights and the biases."""
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return numbers(*shape, dtype=case["dtype"], device=device).detach()

    features = case["features"]
    x = draw(*case["rows"], 2 * features)[..., :features] if case["strided"] else draw(*case["rows"], features)
    return x, [draw(size, features) for size in sizes], [draw(size) if case["bias"] else None for size in sizes]


def wide(tensors: list[Any]) -> list[Any]:
    return [None if t is None else t.double() for t in tensors]


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("case", covering(LINEARS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], device: str) -> None:
    x, weights, biases = inputs(case, case["outputs"], device)
    actual = linears(x, weights, biases, backend="triton")
    truth = reference(x.double(), wide(weights), wide(biases))
    for y, expected, exact in zip(actual, reference(x, weights, biases), truth, strict=True):
        assert_as_exact_as(y, expected, exact)


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("case", covering(GLUS), ids=str)
def test_every_pair_of_options_of_the_glu(case: dict[str, Any], device: str) -> None:
    x, weights, biases = inputs(case, [case["outputs"]] * 2, device)
    actual = linear_glu(x, *weights, *biases, activation=case["activation"], backend="triton")
    expected = glu_reference(x, *weights, *biases, case["activation"])
    truth = glu_reference(x.double(), *wide(weights), *wide(biases), case["activation"])
    assert_as_exact_as(actual, expected, truth)


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 8, MAX_ROWS])
def test_rows_do_not_affect_each_other(rows: int, device: str) -> None:
    x, weights, _ = inputs({"dtype": HALF_DTYPE, "rows": (rows,), "features": 300, "bias": False, "strided": False},
                           [70], device)  # fmt: skip
    (before,) = linears(x, weights, backend="triton")
    for row in range(0, rows, 7):
        poisoned = torch.full_like(x, torch.nan)
        poisoned[row] = x[row]
        (after,) = linears(poisoned, weights, backend="triton")
        assert torch.equal(after[row], before[row])


@needs_triton
def test_other_products_are_those_of_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> None:
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(few_rows, "_few_rows", forbidden)
    x, weight = (torch.randn(70, 16, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight.requires_grad_()
    linears(x[:4], [weight], backend="triton")[0].sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        for a, b in ((x, weight), (x[:4].float(), weight.float()), (x[:0], weight), (x[:4], weight[:, ::2])):
            (y,) = linears(a[:, : b.shape[1]], [b], backend="triton")
            assert torch.equal(y, torch.nn.functional.linear(a[:, : b.shape[1]], b))
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            assert linears(x[:4].float(), [weight])[0].dtype == torch.bfloat16


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 32, 64])
@pytest.mark.parametrize("features", [4096, 1000])
@pytest.mark.parametrize("outputs", [1024, 40000])
def test_it_compiles(rows: int, features: int, outputs: int) -> None:
    x, weight = (torch.empty(n, features, dtype=torch.bfloat16) for n in (rows, outputs))
    bias = torch.empty(outputs, dtype=torch.bfloat16)
    with compiling_for_hopper():
        linears(x, [weight] * 3, [bias] * 3, backend="triton")
        linear_glu(x, weight, weight, backend="triton")


@torch.no_grad()
def test_arguments_are_checked() -> None:
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    for arguments in ((weight, weight[:2]), (weight[:, :3], weight[:, :3]), (weight, weight, torch.ones(4))):
        with pytest.raises(ValueError, match=r"^linear_glu: x is \(2, 4\), gate .*; expected \(..., K\)"):
            linear_glu(x, *arguments)
    with pytest.raises(ValueError, match=r"activation='slu'; .*Did you mean 'silu'"):
        linear_glu(x, weight, weight, activation="slu")  # type: ignore[arg-type]
