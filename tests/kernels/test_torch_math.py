"""`torch_math`: the values of torch's functions, independent of an element's position."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import torch_math
from tests.kernels.accuracy import assert_equal, in_fp64, judge

FUNCTIONS = [(torch_math.sigmoid, torch.sigmoid), (torch_math.silu, F.silu), (torch_math.softplus, F.softplus)]
every_function = pytest.mark.parametrize(("function", "oracle"), FUNCTIONS, ids=lambda f: f.__name__)
EXTREMES = [-1e30, -1e4, -100.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 39.0, 40.0, 41.0, 100.0, 1e4, 1e30]

Function = Callable[[Tensor], Tensor]


@every_function
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_values_and_gradients(function: Function, oracle: Function, scale: float, device: str) -> None:
    torch.manual_seed(0)
    judge(function, oracle, [(scale * torch.randn(1000, device=device)).requires_grad_()])


@every_function
def test_extremes(function: Function, oracle: Function, device: str) -> None:
    x = torch.tensor(EXTREMES, device=device, requires_grad=True)
    y, (truth,) = function(x), in_fp64([x])
    expected = oracle(truth)
    torch.testing.assert_close(y, expected.float(), rtol=1e-6, atol=1e-4)
    gradients = torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), truth)[0].float()
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-4)


@every_function
def test_an_element_has_the_same_bits_anywhere(function: Function, oracle: Function, device: str) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(300, device=device)

    def results(part: Tensor) -> list[Tensor]:
        leaf = part.clone().requires_grad_()
        y = function(leaf)
        return [y.detach(), *torch.autograd.grad(y.sum(), leaf)]

    everything = results(x)
    for first, count in [(0, 1), (3, 5), (7, 100), (31, 33), (250, 50)]:
        assert_equal([t[first : first + count] for t in everything], results(x[first : first + count]))
