"""The NaN poisoning of new memory, by which all kernel tests find elements that a kernel does not write."""

import pytest
import torch


def newly_allocated() -> list[torch.Tensor]:
    like = torch.ones(3)
    return [torch.empty(3, dtype=torch.bfloat16, requires_grad=True), torch.empty_like(like), like.new_empty((2, 3))]


def test_new_memory_is_nan() -> None:
    assert all(tensor.isnan().all() for tensor in newly_allocated())


@pytest.mark.no_poison
def test_a_test_can_opt_out() -> None:
    assert torch.empty is torch._C._VariableFunctions.empty
    assert torch.Tensor.new_empty is torch._C.TensorBase.new_empty


@pytest.mark.plain
@pytest.mark.inductor
def test_compiled_code_is_not_poisoned() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(x) + torch.empty(x.shape).copy_(x)

    x = torch.randn(3)
    assert torch.equal(torch.compile(double, fullgraph=True)(x), 2 * x)
