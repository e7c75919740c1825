"""Every operation under the transforms of torch.func: the same results as autograd, or an error."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

from ligerzoo import kernels
from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from tests.kernels.accuracy import as_tuple
from tests.kernels.operations import Operation, every_kernel
from tests.kernels.oracles import numbers, targets

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch uses it in jvp

SAMPLES = 2


class Case:
    """An operation as a scalar function of its differentiable inputs: the product of its outputs and constants."""

    def __init__(self, operation: Operation, device: str) -> None:
        self.function = operation.function
        inputs = operation.inputs(2, torch.float32, device)
        self.inputs = [t.detach() for t in inputs]
        self.trainable = [i for i, t in enumerate(inputs) if t.requires_grad]
        outputs = as_tuple(self.function(*inputs))
        self.upstream = [torch.randn_like(t) if t.requires_grad else None for t in outputs]
        self.point = [self.inputs[i] for i in self.trainable]
        self.argnums = tuple(range(len(self.point)))

    def outputs(self, *point: Tensor) -> tuple[Tensor, ...]:
        inputs = list(self.inputs)
        for i, t in zip(self.trainable, point, strict=True):
            inputs[i] = t
        outputs = as_tuple(self.function(*inputs))
        return tuple(t for t, upstream in zip(outputs, self.upstream, strict=True) if upstream is not None)

    def __call__(self, *point: Tensor) -> Tensor:
        upstream = [t for t in self.upstream if t is not None]
        return sum(((t * u).sum() for t, u in zip(self.outputs(*point), upstream, strict=True)), torch.zeros(()))

    def by_autograd(self, *point: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in point]
        gradients = torch.autograd.grad(self(*leaves), leaves, allow_unused=True)
        return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(point, gradients, strict=True))

    def samples(self) -> list[Tensor]:
        """Returns other values of each input, stacked along a new first dimension."""
        return [torch.stack([t * (0.5 + 0.5 * i) for i in range(SAMPLES)]) for t in self.point]


@pytest.fixture
def case(operation: Operation, device: str) -> Case:
    return Case(operation, device)


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Within rounding: functorch decomposes some of torch's own functions."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@every_kernel
def test_grad_and_vjp_equal_autograd(case: Case) -> None:
    expected = case.by_autograd(*case.point)
    assert_close(grad(case, case.argnums)(*case.point), expected)
    _, pull_back = vjp(case.outputs, *case.point)
    assert_close(pull_back(tuple(t for t in case.upstream if t is not None)), expected)


@every_kernel
def test_per_sample_gradients_equal_those_of_each_sample(case: Case) -> None:
    samples = case.samples()
    expected = [case.by_autograd(*(t[i] for t in samples)) for i in range(SAMPLES)]
    per_sample = vmap(grad(case, case.argnums))(*samples)
    assert_close(per_sample, [torch.stack(g) for g in zip(*expected, strict=True)])
    # The gradient through vmap.
    summed = grad(lambda *point: vmap(case)(*point).sum(), case.argnums)(*samples)
    assert_close(summed, per_sample)


@every_kernel
def test_vmap_over_some_inputs_and_any_dimension(case: Case) -> None:
    first, *others = case.samples()
    in_dims = (1, *(None for _ in others))
    outputs = vmap(case.outputs, in_dims)(first.movedim(0, 1), *case.point[1:])
    expected = [case.outputs(sample, *case.point[1:]) for sample in first]
    assert_close(outputs, [torch.stack(t) for t in zip(*expected, strict=True)])


@every_kernel
def test_second_derivatives_are_right_or_refused(case: Case) -> None:
    def squared(*point: Tensor) -> Tensor:
        return torch.stack([t.square().sum() for t in case.outputs(*point)]).sum()

    def norm_of_gradient(*point: Tensor) -> Tensor:
        return sum((g.square().sum() for g in grad(squared, case.argnums)(*point)), torch.zeros(()))

    try:
        gradients = grad(norm_of_gradient, case.argnums)(*case.point)
    except RuntimeError as error:
        if "can be differentiated only once" not in str(error):
            raise
        return
    leaves = [t.clone().requires_grad_() for t in case.point]
    first = torch.autograd.grad(squared(*leaves), leaves, create_graph=True)
    expected = torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), leaves)
    for a, e in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4 * float(e.abs().max()))


@every_kernel
def test_forward_mode_is_right_or_refused(case: Case) -> None:
    tangents = [torch.randn_like(t) for t in case.point]
    try:
        _, derivative = jvp(case, tuple(case.point), tuple(tangents))
    except RuntimeError as error:
        if "forward-mode differentiation" not in str(error):
            raise
        return
    expected = sum((g * t).sum() for g, t in zip(case.by_autograd(*case.point), tangents, strict=True))
    torch.testing.assert_close(derivative, expected, rtol=1e-4, atol=1e-4)


# The loss head, whose gradients are usually computed in the forward pass


@pytest.fixture
def head(device: str) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (numbers(*shape, device=device).detach() for shape in ((6, 8), (11, 8)))
    return hidden, weight, targets(6, classes=11, device=device)


def test_forward_mode_through_the_loss_head_is_refused_without_torch_func_too(
    head: tuple[Tensor, Tensor, Tensor],
) -> None:
    hidden, weight, target = head
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode differentiation"):
        kernels.linear_cross_entropy(forward_ad.make_dual(hidden, torch.ones_like(hidden)), weight, target)
    with pytest.raises(RuntimeError, match="forward-mode differentiation"):
        hessian(kernels.linear_cross_entropy)(hidden, weight, target)


def test_jacrev_equals_row_by_row(head: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, target = head
    leaf = hidden.clone().requires_grad_()
    logps = kernels.token_logps(leaf, weight, target)
    expected = torch.stack([torch.autograd.grad(logp, leaf, retain_graph=True)[0] for logp in logps])
    assert torch.equal(jacrev(lambda h: kernels.token_logps(h, weight, target))(hidden), expected)


def test_vmap_over_an_eager_backward_does_not_scale_the_precomputed_gradient_twice(
    head: tuple[Tensor, Tensor, Tensor],
) -> None:
    """A backward that runs once multiplies the gradient in place; each of several samples needs the original."""
    hidden, weight, target = head
    leaf = hidden.clone().requires_grad_()
    loss = kernels.linear_cross_entropy(leaf, weight, target)
    (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    factors = torch.tensor([2.0, 3.0, 5.0], device=leaf.device)
    scaled = vmap(lambda factor: torch.autograd.grad(loss, leaf, factor)[0])(factors)
    torch.testing.assert_close(scaled, factors[:, None, None] * gradient)


def test_an_eager_backward_through_vmap(head: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, target = head
    leaf = torch.stack([hidden, 2 * hidden]).requires_grad_()
    vmap(lambda h: kernels.linear_cross_entropy(h, weight, target))(leaf).sum().backward()
    for sample, gradient in zip(leaf.detach(), leaf.grad, strict=True):
        expected = grad(lambda h: kernels.linear_cross_entropy(h, weight, target))(sample)
        torch.testing.assert_close(gradient, expected)


def test_a_target_out_of_range_is_found_under_vmap(head: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, target = head
    if target.is_cuda:
        pytest.skip("a GPU does not check targets")
    target[4] = 11
    with pytest.raises(ValueError, match=r"target\[4, 0\] is 11; expected 0 to 10"):
        vmap(lambda h, t: kernels.token_logps(h[None], weight, t[None]))(hidden, target)


def test_a_teacher_that_needs_a_gradient_is_found_under_vmap(head: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, *_ = head
    with pytest.raises(ValueError, match="teacher requires a gradient"):
        grad(lambda teacher: vmap(kernels.kl_div)(hidden, teacher).sum())(2 * hidden)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # Dynamo of torch 2.15 warns in vmap
@pytest.mark.parametrize("transform", [grad, lambda f: vmap(f, (0, None, 0))], ids=["grad", "vmap"])
def test_compiled_transforms(transform: Callable[..., Any], head: tuple[Tensor, Tensor, Tensor]) -> None:
    torch._dynamo.reset()
    hidden, weight, target = head
    if transform is not grad:
        hidden, target = hidden[:, None], target[:, None]
    transformed = transform(kernels.linear_cross_entropy)
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden, weight, target), transformed(hidden, weight, target))


# `FusedFunction` itself


class _Scaled(FusedFunction):
    """x * s and a statistic, with everything that a context offers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, s: Tensor | None, offset: float) -> tuple[Tensor, Tensor]:
        y, largest, extra = x * (1 if s is None else s) + offset, x.max(), x + 1
        ctx.save_for_backward(x, s, None, extra, y)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(largest)
        ctx.offset = offset
        return y, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dlargest: None) -> tuple[Tensor | None, ...]:
        assert dlargest is None
        x, s, nothing, extra, y = ctx.saved_tensors
        assert nothing is None
        assert torch.equal(extra, x + 1)
        assert torch.equal(y, x * (1 if s is None else s) + ctx.offset)
        if dy is None:
            return None, None, None
        needs_x, needs_s, _ = ctx.needs_input_grad
        return (dy if s is None else dy * s) if needs_x else None, (dy * x).sum() if needs_s else None, None


@pytest.mark.parametrize("s", [None, torch.tensor(3.0)], ids=["without", "with"])
def test_a_context_records_all_that_forward_does(s: Tensor | None) -> None:
    x = torch.randn(2, 5)

    def total(x: Tensor, s: Tensor | None) -> Tensor:
        y, largest = _Scaled.apply(x, s, 0.5)
        return y.square().sum() + largest.detach()

    def expected(x: Tensor, s: Tensor | None) -> Tensor:
        return (x * (1 if s is None else s) + 0.5).square().sum()

    argnums = (0,) if s is None else (0, 1)
    assert_close(grad(total, argnums)(x, s), grad(expected, argnums)(x, s))
    assert_close(vmap(grad(total, argnums), (0, None))(x, s), vmap(grad(expected, argnums), (0, None))(x, s))
    unused = vjp(lambda x: _Scaled.apply(x, s, 0.5)[1], x)[1]
    assert torch.equal(unused(torch.tensor(1.0))[0], torch.zeros_like(x))


def test_nested_vmaps() -> None:
    x = torch.randn(2, 3, 4)
    y, largest = vmap(vmap(lambda x: _Scaled.apply(x, None, 1.0)))(x)
    assert torch.equal(y, x + 1)
    assert torch.equal(largest, x.amax(-1))
