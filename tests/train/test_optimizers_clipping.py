"""Clipping by the global norm, without host syncs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.train.optimizers import clip_grad_norm
from tests.train.optimizer_cases import set_gradients, tiny_llama


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e4, None, math.inf])
def test_it_equals_torch_s(dtype: torch.dtype, max_norm: float | None) -> None:
    model = tiny_llama(dtype=dtype, tie_word_embeddings=True)
    parameters = list(model.parameters())
    set_gradients(parameters, 0)
    parameters[3].grad = None
    gradients = [None if p.grad is None else p.grad.double() for p in parameters]
    truth = math.sqrt(sum(g.square().sum().item() for g in gradients if g is not None))
    norm = clip_grad_norm(model, max_norm)
    assert norm.dim() == 0
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(truth, rel=1e-5)
    factor = min(1.0, (max_norm or math.inf) / truth)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or parameter.grad is None:
            assert gradient is parameter.grad is None
        elif factor == 1.0:
            assert torch.equal(parameter.grad.double(), gradient)
        else:
            torch.testing.assert_close(
                parameter.grad.double(), gradient * factor, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=0
            )
    if factor < 1 and dtype == torch.float32:
        assert clip_grad_norm(model, None).item() == pytest.approx(max_norm, rel=1e-4)


def test_a_parameter_counts_once() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm([weight, weight], 1.0).item() == pytest.approx(5.0)
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_norm_shows_gradients_that_are_not_finite(value: float) -> None:
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3).bfloat16())]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    assert weights[0].grad is not None
    weights[0].grad[1] = value
    assert not clip_grad_norm(weights, 1.0).isfinite()


def test_the_device_is_never_waited_for() -> None:
    """On meta tensors, whose values do not exist, reading one would fail."""
    weights = [nn.Parameter(torch.zeros(4, device="meta")) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.zeros(4, device="meta")
    assert clip_grad_norm(weights, 1.0).is_meta


@pytest.mark.parametrize("max_norm, error, message", [
    (0.0, ValueError, "max_norm=0.0; expected a positive number, or None"),
    (math.nan, ValueError, "max_norm=nan; expected a positive number, or None"),
    ("1", TypeError, "max_norm='1'; expected a positive number, or None"),
    (1.0, ValueError, "no parameter has a gradient; expected a call between backward and zero_grad"),
])  # fmt: skip
def test_arguments_are_checked(max_norm: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^clip_grad_norm: {message}"):
        clip_grad_norm([nn.Parameter(torch.ones(2))], max_norm)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    output: Tensor = table(torch.tensor([1]))
    output.sum().backward()
    with pytest.raises(ValueError, match=r"^clip_grad_norm: a gradient is sparse"):
        clip_grad_norm(table, 1.0)
