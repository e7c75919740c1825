"""Precomputed gradients: the factor that multiplies them, and their memory."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ligerzoo.kernels.loss.precomputed_grad import attach_gradients
from tests.kernels.machine import ROUNDED_DTYPES


def precomputed(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a tensor, its gradient, and a loss with this gradient."""
    x = torch.randn(70, 90, device=device).to(dtype).requires_grad_()
    gradient = torch.randn(70, 90, device=device).to(dtype)
    return x, gradient, attach_gradients(torch.zeros((), device=device), (x, gradient))


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.3, 0.0, torch.inf, torch.nan])
def test_one_backward_multiplies_in_place(factor: float, dtype: torch.dtype, device: str) -> None:
    x, gradient, loss = precomputed(dtype, device)
    expected = (gradient.float() * factor).to(dtype)
    address = gradient.data_ptr()
    del gradient
    (loss * factor).backward()
    assert x.grad is not None
    assert torch.equal(x.grad.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert x.grad.data_ptr() == address


def test_a_second_backward_gives_the_same_gradient(device: str) -> None:
    x, gradient, loss = precomputed(torch.float32, device)
    expected = gradient.clone()
    first, second = (
        torch.autograd.grad(loss, x, torch.tensor(g, device=device), retain_graph=True)[0] for g in (2.0, 3.0)
    )
    (third,) = torch.autograd.grad(loss, x, torch.tensor(4.0, device=device))
    assert torch.equal(first, 2 * expected)
    assert torch.equal(second, 3 * expected)
    assert torch.equal(third, 4 * expected)


def test_gradients_accumulate(device: str) -> None:
    x, gradient, loss = precomputed(torch.float32, device)
    expected = 5 * gradient
    (2 * loss).backward(retain_graph=True)
    (3 * loss).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


def test_a_tensor_that_is_used_twice_has_the_sum(device: str) -> None:
    x, gradient, loss = precomputed(torch.float32, device)
    expected = gradient + 2 * x.detach()
    (loss + x.square().sum()).backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_gradient_in_another_dtype_is_copied(device: str) -> None:
    x = torch.randn(70, 90, device=device).half().requires_grad_()
    gradient = torch.randn(70, 90, device=device)
    expected = gradient.clone()
    attach_gradients(torch.zeros((), device=device), (x, gradient)).mul(0.1).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (expected * 0.1).half())
    assert torch.equal(gradient, expected)


def test_tensors_seen_by_saved_tensor_hooks_are_not_modified(device: str) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        x, gradient, loss = precomputed(torch.float32, device)
    expected = gradient.clone()
    (2 * loss).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * expected)
    assert torch.equal(gradient, expected)


def test_a_failed_backward_cannot_be_repeated(device: str) -> None:
    """It would multiply some gradients twice."""
    _, _, loss = precomputed(torch.float32, device)
    node = next(node for node, _ in loss.grad_fn.next_functions if node and "PrecomputedGradient" in node.name())  # type: ignore[union-attr]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = node.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        (3 * loss).backward()
    handle.remove()
    with pytest.raises(RuntimeError, match=r"inplace operation|second time"):
        (3 * loss).backward()


def test_fake_tensors(device: str) -> None:
    with FakeTensorMode():
        x, gradient, loss = precomputed(torch.float32, device)
    (2 * loss).backward()
    assert x.grad is not None
    assert x.grad.shape == gradient.shape
