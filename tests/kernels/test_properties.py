"""Properties of every operation: accuracy in all dtypes and layouts, no input modified, only needed gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligerzoo.kernels.dispatch import INTERPRETING
from tests.covering import covering
from tests.kernels.accuracy import (
    as_tuple,
    assert_as_exact_as,
    assert_equal,
    differentiate,
    in_fp64,
    judge,
    judge_draws,
)
from tests.kernels.layouts import LAYOUTS, constant, laid_out, offset, repeated_rows, sliced
from tests.kernels.machine import DTYPES, HALF_DTYPE, ON_GPU
from tests.kernels.operations import KERNELS, Operation, every_kernel, every_operation


def upstream_of(operation: Operation, inputs: list[Tensor]) -> list[Tensor]:
    return [torch.randn_like(output) for output in as_tuple(operation.reference(*inputs))]


@every_operation
@pytest.mark.parametrize("batch, dtype", [(1, torch.float32), *((5, dtype) for dtype in DTYPES)], ids=str)
def test_outputs_and_gradients(operation: Operation, batch: int, dtype: torch.dtype, device: str) -> None:
    judge(operation.function, operation.reference, operation.inputs(batch, dtype, device))


# Only compiled kernels depend on the alignment; what copies `sliced` copies `transposed`, too.
ON_A_CPU = [layout for layout in LAYOUTS if layout not in (offset, sliced)]


@pytest.mark.parametrize(
    "operation, layout",
    [
        pytest.param(
            operation,
            layout,
            id=f"{operation.name}-{layout.__name__}",
            marks=() if layout is ON_A_CPU[i % len(ON_A_CPU)] else pytest.mark.thorough,
        )
        for i, operation in enumerate(KERNELS)
        for layout in LAYOUTS
    ],
)
def test_layouts_of_inputs_and_upstream_gradients(
    operation: Operation, layout: Callable[[Tensor], Tensor], device: str
) -> None:
    def judge_draw(seed: int) -> None:
        torch.manual_seed(seed)
        first, *others = operation.inputs(5, torch.float32, device)
        inputs = laid_out([first], layout)
        # With equal rows in the other inputs too, gradients would cancel to 0: only rounding would be compared.
        inputs += others if layout in (constant, repeated_rows) else laid_out(others, layout)
        judge(operation.function, operation.reference, inputs, layout)

    judge_draws(judge_draw, 0)


@every_operation
def test_zero_rows(operation: Operation, device: str) -> None:
    inputs = operation.inputs(0, torch.float32, device)
    upstream = upstream_of(operation, inputs)
    outputs, gradients = differentiate(operation.function, inputs, upstream)
    for output, like in zip(outputs, upstream, strict=True):
        assert output.shape == like.shape
        assert torch.equal(output, torch.zeros_like(output))
    for gradient, t in zip(gradients, inputs, strict=True):
        assert (gradient is not None) == t.requires_grad
        assert gradient is None or torch.equal(gradient, torch.zeros_like(t))


@pytest.mark.parametrize("strength", [2, pytest.param(None, marks=pytest.mark.thorough)], ids=["pairs", "all"])
@every_kernel
def test_gradients_of_subsets_of_inputs(operation: Operation, strength: int | None, device: str) -> None:
    """Subsets in which every two inputs need gradients together, one without the other, and neither; or all subsets."""
    inputs = operation.inputs(2, torch.float32, device)
    upstream = upstream_of(operation, inputs)
    outputs, gradients = differentiate(operation.function, inputs, upstream)
    choices = {str(i): [True, False] if t.requires_grad else [False] for i, t in enumerate(inputs)}
    for subset in covering(choices, strength or len(choices)):
        needed = subset.values()
        if any(needed):
            frozen = [t.detach().requires_grad_(n) for t, n in zip(inputs, needed, strict=True)]
            some_outputs, some_gradients = differentiate(operation.function, frozen, upstream)
            assert_equal(some_outputs, outputs)
            for gradient, of_all, is_needed in zip(some_gradients, gradients, needed, strict=True):
                assert (gradient is not None) == is_needed
                if gradient is not None:  # another compiled kernel may contract other products into FMAs
                    torch.testing.assert_close(gradient, of_all, rtol=1e-5, atol=1e-6)


@every_kernel
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_outputs_without_gradients(operation: Operation, mode: Any, device: str) -> None:
    inputs = operation.inputs(2, torch.float32, device)
    outputs = as_tuple(operation.function(*inputs))
    with mode():
        same_outputs = as_tuple(operation.function(*inputs))
    assert not any(t.requires_grad for t in same_outputs)
    assert_equal(same_outputs, [t.detach() for t in outputs])


@every_kernel
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(operation: Operation, use_reentrant: bool, device: str) -> None:
    inputs = operation.inputs(2, torch.float32, device)
    upstream = upstream_of(operation, inputs)

    def gradients(function: Callable[..., Any]) -> list[Tensor | None]:
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        torch.autograd.backward(as_tuple(function(*leaves)), upstream)
        return [leaf.grad for leaf in leaves]

    def checkpointed(*leaves: Tensor) -> Any:
        return checkpoint(operation.function, *leaves, use_reentrant=use_reentrant)

    assert_equal(gradients(checkpointed), gradients(operation.function))


@every_kernel
def test_saved_tensors_are_not_modified(operation: Operation, device: str) -> None:
    inputs = operation.inputs(2, torch.float32, device)
    saved: list[tuple[Tensor, Tensor]] = []

    def keep(t: Tensor) -> Tensor:
        saved.append((t, t.detach().clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        outputs = as_tuple(operation.function(*inputs))
    torch.autograd.backward(outputs, upstream_of(operation, inputs))
    assert saved
    assert_equal([t.detach() for t, _ in saved], [before for _, before in saved])


@every_operation
def test_a_second_derivative_is_correct_or_raises(operation: Operation, device: str) -> None:
    inputs = operation.inputs(2, torch.float32, device)
    # Upstream gradients without grad, as usual: autograd alone would treat the gradients as constants.
    upstream = upstream_of(operation, inputs)

    def second_derivative(function: Callable[..., Any], inputs: list[Tensor], upstream: list[Tensor]) -> Tensor:
        (gradient,) = torch.autograd.grad(as_tuple(function(*inputs)), inputs[0], upstream, create_graph=True)
        penalty = gradient.square().sum() + inputs[0].sum()  # differentiable whether or not `gradient` is
        return torch.autograd.grad(penalty, inputs[0])[0]

    if operation.always_fused or ON_GPU or INTERPRETING:
        with pytest.raises(RuntimeError, match="differentiated only once"):
            second_derivative(operation.function, inputs, upstream)
    else:
        truth = second_derivative(operation.reference, in_fp64(inputs), in_fp64(upstream))
        reference = second_derivative(operation.reference, inputs, upstream)
        assert_as_exact_as(second_derivative(operation.function, inputs, upstream), reference, truth)


@every_kernel
def test_autocast(operation: Operation, device: str) -> None:
    dtype = HALF_DTYPE  # the interpreter truncates to bf16 where a GPU rounds

    def with_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> Any:
            with torch.autocast(device, dtype):
                return function(*inputs)

        return run

    def judge_draw(seed: int) -> None:
        torch.manual_seed(seed)
        # fp32 weights, whose gradients are fp32, and activations in the autocast dtype
        inputs = [
            t.detach().to(dtype).requires_grad_() if t.requires_grad and t.dim() > 2 else t
            for t in operation.inputs(5, torch.float32, device)
        ]
        judge(with_autocast(operation.function), with_autocast(operation.reference), inputs)

    judge_draws(judge_draw, seed=0)  # rounding moves some numbers across the limits of clamps


@every_operation
def test_fp64(operation: Operation, device: str) -> None:
    inputs = operation.inputs(2, torch.float64, device)
    upstream = upstream_of(operation, inputs)
    outputs, gradients = differentiate(operation.function, inputs, upstream)
    assert {t.dtype for t in outputs} == {torch.float64}
    expected_outputs, expected_gradients = differentiate(operation.reference, inputs, upstream)
    for actual, expected in zip((*outputs, *gradients), (*expected_outputs, *expected_gradients), strict=True):
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
