from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import linears
from ligerzoo.kernels.linears import reference
from tests.kernels.accuracy import judge
from tests.kernels.machine import ROUNDED_DTYPES
from tests.kernels.op_recorder import Recorder, launch_nothing
from tests.kernels.oracles import numbers


def applied(function: Any, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Calls the function with weights, of 2 dimensions, and a bias of the first, of 1 dimension."""
    weights = [p for p in parameters if p.ndim == 2]
    biases: list[Tensor | None] = [None] * len(weights)
    for bias in parameters[len(weights) :]:
        biases[0] = bias
    outputs: tuple[Tensor, ...] = function(x, weights, biases)
    return outputs


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(5,), (7, 7), (16, 4, 4), (3, 1, 2, 9)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_sizes(sizes: tuple[int, ...], has_bias: bool, dtype: torch.dtype, device: str) -> None:
    inputs = [numbers(2, 3, 33, dtype=dtype, device=device)]
    inputs += [numbers(n, 33, dtype=dtype, device=device) for n in sizes]
    inputs += [numbers(sizes[0], dtype=dtype, device=device)] * has_bias
    judge(lambda *args: applied(linears, *args), lambda *args: applied(reference, *args), inputs)


@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {3}, {1, 2}, {0, 2}], ids=str)
def test_frozen_inputs(frozen: set[int], device: str) -> None:
    inputs = [numbers(*shape, device=device) for shape in ((2, 3, 33), (7, 33), (5, 33), (7,))]
    for i in frozen:
        inputs[i] = inputs[i].detach()
    judge(lambda *args: applied(linears, *args), lambda *args: applied(reference, *args), inputs)


def test_gradients_accumulate_into_one_tensor(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "linears")
    x, weights = numbers(6, 16, device=device), [torch.ones(n, 16, device=device) for n in (8, 4, 4)]
    outputs = linears(x, weights)
    upstream = [torch.ones_like(y) for y in outputs]
    with Recorder() as recorder:
        torch.autograd.grad(outputs, x, upstream)
    assert recorder.allocated == [6 * 16 * 4]
    assert not {"add", "add_"} & {*recorder.names}


def test_frozen_weights_do_not_keep_the_input(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "linears")
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linears(numbers(6, 16, device=device), [torch.ones(8, 16, device=device)] * 2)
    assert {tuple(t.shape) for t in saved} == {(8, 16)}


def test_autocast(device: str) -> None:
    x, weight = numbers(6, 16, device=device), numbers(8, 16, device=device)
    with torch.autocast(device, torch.bfloat16):
        outputs = linears(x, [weight, weight])
    assert [y.dtype for y in outputs] == [torch.bfloat16] * 2
    gradients = torch.autograd.grad(sum(y.float().sum() for y in outputs), [x, weight])  # type: ignore[arg-type]
    assert [t.dtype for t in gradients] == [torch.float32] * 2
    expected = 2 * weight.bfloat16().float().sum(0)
    torch.testing.assert_close(gradients[0], expected.expand(6, 16), rtol=0.02, atol=0.1)


@pytest.mark.parametrize(
    "weights, biases",
    [([], None), ([(8, 15)], None), ([(8, 16), (16,)], None), ([(8, 16)], [(7,)]), ([(8, 16)], [(8,), (8,)])],
)
def test_mismatched_shapes(weights: list[tuple[int, ...]], biases: list[tuple[int, ...]] | None) -> None:
    with pytest.raises(ValueError, match=r"linears: x is \(6, 16\).*; expected shapes \(..., H\), \(O_i, H\)"):
        linears(torch.ones(6, 16), [torch.ones(s) for s in weights], biases and [torch.ones(s) for s in biases])


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"linears: weights\[1\]"):
        linears(torch.ones(6, 16), [torch.ones(8, 16), [1.0]])  # type: ignore[list-item]
