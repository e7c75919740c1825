import pytest
import torch

from ligerzoo.kernels import swiglu, swiglu_linear
from ligerzoo.kernels.swiglu import linear_reference, reference
from tests.kernels.helpers import DTYPES, Recorder, judge, launch_nothing, numbers, on_gpu_too

SHAPES = on_gpu_too(
    [(1,), (7,), (3, 1), (5, 127), (2, 3, 130), (2, 2, 2, 33), (3, 2048), (1, 2049)],
    [(1000, 4095), (17, 14336), (3, 100_001)],
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    judge(swiglu, reference, [numbers(*shape, dtype=dtype, device=device) for _ in range(2)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_sizes(shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype, device: str) -> None:
    gate, up, bias = (numbers(*s, dtype=dtype, device=device) for s in (shape, shape, (13,)))
    weight = numbers(13, shape[-1], dtype=dtype, device=device, scale=shape[-1] ** -0.5)
    judge(swiglu_linear, linear_reference, [gate, up, weight, *([bias] if has_bias else [])])


@pytest.mark.parametrize("scale", [10.0, 100.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_far_from_zero(scale: float, dtype: torch.dtype, device: str) -> None:
    gate, up = numbers(100, 33, dtype=dtype, device=device, scale=scale), numbers(100, 33, dtype=dtype, device=device)
    judge(swiglu, reference, [gate, up])


def test_numbers_that_are_not_finite_stay_alone(device: str) -> None:
    gate, up = numbers(5, 33, device=device), numbers(5, 33, device=device)
    with torch.no_grad():
        gate[1, 3], up[2, 5] = torch.nan, torch.inf
    y = swiglu(gate, up)
    gradients = torch.autograd.grad(y, [gate, up], torch.randn_like(y))
    wrong = torch.zeros_like(y, dtype=torch.bool)
    wrong[1, 3] = wrong[2, 5] = True
    assert torch.equal(~y.isfinite(), wrong)
    assert torch.equal(~(gradients[0].isfinite() & gradients[1].isfinite()), wrong)


def test_the_linear_layer_keeps_no_product(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "swiglu")
    inputs = [numbers(*shape, device=device) for shape in ((64, 33), (64, 33), (17, 33))]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()), lambda t: t):
        swiglu_linear(*inputs)
    assert kept == [t.data_ptr() for t in inputs]


def test_a_frozen_weight_costs_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "swiglu")
    gate, up, weight = (numbers(*shape, device=device) for shape in ((64, 33), (64, 33), (17, 33)))

    def made_in_backward(weight: torch.Tensor) -> list[int]:
        z = swiglu_linear(gate, up, weight)
        upstream = torch.ones_like(z)
        with Recorder() as recorder:
            torch.autograd.grad(z, [gate, up], upstream)
        return recorder.made

    one = 64 * 33 * 4  # dy, dgate and dup; with a trainable weight the product and dweight as well
    assert made_in_backward(weight.detach()) == [one] * 3
    assert made_in_backward(weight) == [one] * 4 + [17 * 33 * 4]


@pytest.mark.parametrize("function", [swiglu, lambda gate, up: swiglu_linear(gate, up, torch.ones(3, 33))])
@pytest.mark.parametrize("up", [torch.ones(5, 32), torch.ones(33), torch.ones(5, 33, dtype=torch.float16)])
def test_gate_and_up_that_differ(function: object, up: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"swiglu: gate is \(5, 33\) torch.float32 and up .*; expected the same"):
        function(torch.ones(5, 33), up)
