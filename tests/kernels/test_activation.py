from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from ligerzoo.kernels import activation_linear, experts_mlp, glu
from ligerzoo.kernels.activation import ACTIVATIONS, Activation, ActivationFunction, reference
from ligerzoo.kernels.gating import combined_backward, gating
from tests.kernels.accuracy import judge
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.layouts import sliced
from tests.kernels.machine import HALF_DTYPE, INTERPRETING, ROUNDED_DTYPES, needs_triton, on_gpu_too
from tests.kernels.op_recorder import Recorder, launch_nothing
from tests.kernels.oracles import numbers

SHAPES = on_gpu_too([(1,), (3, 1), (5, 127), (2, 2, 2, 33), (1, 2049)], [(1000, 4095), (17, 14336), (3, 100_001)])
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_sizes(shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype, device: str) -> None:
    x, bias = numbers(*shape, dtype=dtype, device=device), numbers(13, dtype=dtype, device=device)
    weight = numbers(13, shape[-1], dtype=dtype, device=device, scale=shape[-1] ** -0.5)
    judge(activation_linear, reference, [x, weight, *([bias] if has_bias else [])], sliced)


@pytest.mark.parametrize(
    "activation, theirs",
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_tanh", "gelu_pytorch_tanh"),
        ("quick_gelu", "quick_gelu"),
        ("relu2", "relu2"),
    ],
)
def test_activations_match_transformers(activation: Activation, theirs: str, device: str) -> None:
    x = torch.linspace(-6, 6, 1001, device=device)[:, None]
    found = activation_linear(x, torch.ones(1, 1, device=device), activation=activation)
    torch.testing.assert_close(found, ACT2FN[theirs](x), rtol=0, atol=2e-6)


@every_activation
@pytest.mark.parametrize("scale", [10.0, 100.0, 1e4])
def test_large_values(scale: float, activation: Activation, device: str) -> None:
    x, weight = numbers(20, 33, device=device, scale=scale), torch.eye(33, device=device)
    of = partial(activation_linear, activation=activation), partial(reference, activation=activation)
    judge(of[0], of[1], [x, weight])


def test_activated_values_are_not_saved(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "activation")
    inputs = [numbers(*shape, device=device) for shape in ((64, 33), (17, 33))]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t):
        activation_linear(*inputs)
    assert saved == [t.data_ptr() for t in inputs]


@pytest.mark.parametrize(
    "trainable, allocations", [("x", [64, 64]), ("x weight", [64, 64, 64, 17]), ("weight", [64, 17])]
)
def test_frozen_inputs_allocate_nothing(
    trainable: str, allocations: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of dy, dx, the activated values and dweight, backward allocates only those that are needed."""
    launch_nothing(monkeypatch, "activation")
    inputs = {"x": torch.ones(64, 33, device=device), "weight": torch.ones(17, 33, device=device)}
    trainable_inputs = [inputs[name].requires_grad_() for name in trainable.split()]
    z = activation_linear(**inputs)
    upstream = torch.ones_like(z)
    with Recorder() as recorder:
        torch.autograd.grad(z, trainable_inputs, upstream)
    assert recorder.allocated == [rows * 33 * 4 for rows in allocations]


def test_autocast_rounds_activated_values_but_not_inputs(device: str) -> None:
    x = torch.rand(64, 33, device=device) + 1
    with torch.autocast(device, HALF_DTYPE):
        z = activation_linear(x, torch.eye(33, device=device))
    activated = F.gelu(x.double())
    assert z.dtype == HALF_DTYPE
    assert ((z.double() - activated).abs() / activated).max() <= 0.501 * torch.finfo(HALF_DTYPE).eps


# Errors


@pytest.mark.parametrize("weight, bias", [(torch.ones(3, 32), None), (torch.ones(33), None), (torch.ones(3, 33), [4])])
def test_mismatched_shapes(weight: Tensor, bias: Any) -> None:
    with pytest.raises(ValueError, match=r"activation_linear: x is \(5, 33\), weight .*; expected shapes \(..., I\)"):
        activation_linear(torch.ones(5, 33), weight, bias and torch.ones(bias))


def test_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"activation='relu'; expected one of .*'silu', 'gelu_tanh', 'gelu', 'quick_"):
        activation_linear(torch.ones(3, 3), torch.ones(3, 3), activation="relu")  # type: ignore[arg-type]


@needs_triton
def test_backend_argument(device: str) -> None:
    x = numbers(3, 3, device=device)
    for backend, fused in (("auto", True), ("triton", True), ("torch", False)):
        node = activation_linear(x, x, backend=backend).grad_fn  # type: ignore[arg-type]
        assert ("ActivationLinear" in type(node).__name__) == fused


NO_BRANCH: Any = "no_branch"


@pytest.fixture
def _activation_without_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation in the table, for which there is no Triton code."""
    monkeypatch.setitem(
        ACTIVATIONS, NO_BRANCH, ActivationFunction(F.mish, lambda dy, x: torch.ops.aten.mish_backward(dy, x))
    )


def test_the_table_has_every_activation() -> None:
    assert ACTIVATIONS.keys() == {*get_args(Activation)}


@pytest.mark.usefixtures("_activation_without_branch")
def test_an_activation_without_triton_code_does_not_compile() -> None:
    from triton.errors import TritonError

    x, weight = torch.ones(3, 16), torch.ones(5, 16)
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    for call in (
        lambda: activation_linear(x, weight, activation=NO_BRANCH),
        lambda: glu(x, x, activation=NO_BRANCH),
        lambda: experts_mlp(x, ids, weights, torch.ones(1, 10, 16), weight.T[None], activation=NO_BRANCH),
    ):
        with nullcontext() if INTERPRETING else compiling_for_hopper(), pytest.raises(TritonError) as error:
            call()
        cause: BaseException = error.value
        while cause.__cause__ is not None:
            cause = cause.__cause__
        assert "activation has no branch" in str(cause)


@pytest.mark.usefixtures("_activation_without_branch")
def test_an_activation_of_the_table_has_its_own_gradient_in_plain_torch(device: str) -> None:
    gate, up, dy = numbers(4, 7, device=device), numbers(4, 7, device=device), numbers(4, 7, device=device).detach()
    expected = torch.autograd.grad(F.mish(gate) * up, [gate, up], dy)
    got = combined_backward(dy, torch.cat([gate, up], -1), gating(NO_BRANCH))
    torch.testing.assert_close(got.detach(), torch.cat(expected, -1))
