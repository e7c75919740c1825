from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import geglu, glu, glu_linear, swiglu
from ligerzoo.kernels.activation import ACTIVATIONS, Activation
from ligerzoo.kernels.glu import linear_reference, reference
from ligerzoo.kernels.jit import INTERPRETING
from tests.kernels.accuracy import differentiate, judge
from tests.kernels.layouts import padded
from tests.kernels.machine import HALF_DTYPE, ON_GPU, ROUNDED_DTYPES, needs_triton, on_gpu_too
from tests.kernels.op_recorder import Recorder, launch_nothing
from tests.kernels.oracles import numbers

SHAPES = on_gpu_too(
    [(1,), (7,), (3, 1), (5, 127), (2, 3, 130), (2, 2, 2, 33), (3, 2048), (1, 2049)],
    [(1000, 4095), (17, 14336), (3, 100_001)],
)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@every_activation
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: tuple[int, ...], dtype: torch.dtype, activation: Activation, device: str) -> None:
    inputs = [numbers(*shape, dtype=dtype, device=device) for _ in range(2)]
    judge(partial(glu, activation=activation), partial(reference, activation=activation), inputs)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_sizes(shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype, device: str) -> None:
    gate, up, bias = (numbers(*s, dtype=dtype, device=device) for s in (shape, shape, (13,)))
    weight = numbers(13, shape[-1], dtype=dtype, device=device, scale=shape[-1] ** -0.5)
    layout: Callable[[Tensor], Tensor] = torch.clone
    if shape == (1,):  # avoids cancellation in the single sum that is the gradient, which would amplify rounding
        weight, layout = weight.detach().abs().requires_grad_(), torch.abs
    judge(glu_linear, linear_reference, [gate, up, weight, *([bias] if has_bias else [])], layout)


@pytest.mark.parametrize(
    "function, expected_function",
    [
        (swiglu, F.silu),
        (geglu, partial(F.gelu, approximate="tanh")),
        (partial(geglu, approximate="none"), F.gelu),
        (partial(glu, activation="gelu"), F.gelu),
    ],
)
def test_activations_match_torch(function: Any, expected_function: Callable[[Tensor], Tensor], device: str) -> None:
    """The two GELUs differ by at most 5e-4."""
    gate, up = torch.linspace(-6, 6, 1001, device=device), torch.ones(1001, device=device)
    torch.testing.assert_close(function(gate, up), expected_function(gate), rtol=0, atol=2e-6)


@every_activation
@pytest.mark.parametrize("scale", [10.0, 100.0, 1e4])
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_gates_far_from_zero(scale: float, dtype: torch.dtype, activation: Activation, device: str) -> None:
    gate, up = numbers(100, 33, dtype=dtype, device=device, scale=scale), numbers(100, 33, dtype=dtype, device=device)
    # Beyond, intermediate results of quick_gelu, and products of relu2, overflow in fp16.
    limit = 100 if activation == "relu2" else 3000
    gate = gate.detach().clamp(-limit, limit).requires_grad_()
    judge(partial(glu, activation=activation), partial(reference, activation=activation), [gate, up])


@every_activation
def test_infinite_gates(activation: Activation, device: str) -> None:
    """-inf * 0 is NaN in torch too."""
    inf = torch.inf
    gate = torch.tensor([1e4, -1e4, 1e15, -1e15, inf, -inf, torch.nan], device=device).requires_grad_()
    if activation == "gelu" and not (INTERPRETING or ON_GPU):
        gate = gate.detach()[:4].requires_grad_()  # torch's error function of inf is NaN on a CPU
    y = glu(gate, torch.full_like(gate, 3.0), activation=activation)
    (slope,) = torch.autograd.grad(y, gate, torch.ones_like(y))
    values, slopes = [3e4, 0.0, 3e15, 0.0, inf, torch.nan, torch.nan], [3.0, 0.0, 3.0, 0.0]
    if activation == "relu2":
        values, slopes = [3e8, 0.0, 3e30, 0.0, inf, 0.0, torch.nan], [6e4, 0.0, 6e15, 0.0]
    torch.testing.assert_close(y.detach(), torch.tensor(values, device=device)[: len(y)], equal_nan=True)
    torch.testing.assert_close(slope[:4], torch.tensor(slopes, device=device))


@every_activation
def test_non_finite_elements_do_not_affect_others(activation: Activation, device: str) -> None:
    gate, up = numbers(5, 33, device=device), numbers(5, 33, device=device)
    with torch.no_grad():
        gate[1, 3], up[2, 5] = torch.nan, torch.inf
    y = glu(gate, up, activation=activation)
    gradients = torch.autograd.grad(y, [gate, up], torch.randn_like(y))
    wrong = torch.zeros_like(y, dtype=torch.bool)
    wrong[1, 3] = wrong[2, 5] = True
    assert torch.equal(~y.isfinite(), wrong)
    assert torch.equal(~(gradients[0].isfinite() & gradients[1].isfinite()), wrong)


# The halves of a fused projection


@pytest.mark.parametrize("shape", [(2, 1, 48), (5, 66), (1, 2), (2, 3, 130), (3, 4100)], ids=str)
def test_halves_of_one_projection(shape: tuple[int, ...], device: str) -> None:
    def of_halves(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: function(*x.chunk(2, -1))

    for layout in (padded, torch.clone):  # of upstream gradients
        judge(of_halves(swiglu), of_halves(reference), [numbers(*shape, device=device)], layout)


def test_halves_of_one_projection_are_not_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "glu")
    gate, up = (half.detach().requires_grad_() for half in torch.ones(64, 66, device=device).chunk(2, -1))
    upstream = torch.ones(64, 66, device=device).chunk(2, -1)[0]
    with Recorder() as recorder:
        torch.autograd.grad(swiglu(gate, up), [gate, up], upstream)
    assert recorder.allocated == [64 * 33 * 4] * 3


# Memory


def test_glu_linear_does_not_save_the_product(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "glu")
    inputs = [numbers(*shape, device=device) for shape in ((64, 33), (64, 33), (17, 33))]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t):
        glu_linear(*inputs)
    assert saved == [t.data_ptr() for t in inputs]


@pytest.mark.parametrize(
    "trainable, allocations",
    [
        ("gate up", [1, 1, 1]),  # dy, dgate, dup
        ("gate", [1, 1]),
        ("up", [1, 1]),
        ("gate up weight", [1, 1, 1, 1, 0]),  # also the product and dweight
        ("up weight", [1, 1, 1, 0]),
        ("weight", [1, 0]),
    ],
)
def test_frozen_inputs_allocate_nothing(
    trainable: str, allocations: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_nothing(monkeypatch, "glu")
    shapes = {"gate": (64, 33), "up": (64, 33), "weight": (17, 33)}
    inputs = {name: torch.ones(*shape, device=device) for name, shape in shapes.items()}
    trainable_inputs = [inputs[name].requires_grad_() for name in trainable.split()]
    z = glu_linear(**inputs)
    upstream = torch.ones_like(z)
    with Recorder() as recorder:
        torch.autograd.grad(z, trainable_inputs, upstream)
    assert recorder.allocated == [64 * 33 * 4 if activations else 17 * 33 * 4 for activations in allocations]


@pytest.mark.parametrize("frozen", ["gate", "up"])
def test_a_frozen_half_allocates_nothing(frozen: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "glu")
    gate, up = (torch.ones(64, 33, device=device, requires_grad=name != frozen) for name in ("gate", "up"))
    y = swiglu(gate, up)
    upstream = torch.ones_like(y)
    with Recorder() as recorder:
        torch.autograd.grad(y, up if frozen == "gate" else gate, upstream)
    assert recorder.allocated == [64 * 33 * 4]


def test_autocast_rounds_the_product_but_not_its_factors(device: str) -> None:
    """Rounding the fp32 factors first could triple the error."""
    dtype = HALF_DTYPE
    gate, up = torch.rand(64, 33, device=device) + 1, torch.rand(64, 33, device=device) + 1
    with torch.autocast(device, dtype):
        z = glu_linear(gate, up, torch.eye(33, device=device))
    product = reference(gate.double(), up.double())
    assert z.dtype == dtype
    assert ((z.double() - product).abs() / product).max() <= 0.501 * torch.finfo(dtype).eps


@pytest.mark.parametrize("factors", [torch.float32, torch.float16], ids=str)
def test_gradients_have_the_dtypes_of_the_inputs_under_autocast(factors: torch.dtype, device: str) -> None:
    gate, up = (numbers(5, 33, dtype=factors, device=device) for _ in range(2))
    weight, bias = numbers(17, 33, device=device), numbers(17, device=device)

    def cast(*inputs: Tensor) -> Tensor:
        with torch.autocast(device, torch.float16):
            return glu_linear(*inputs)

    def reference_cast(*inputs: Tensor) -> Tensor:
        with torch.autocast(device, torch.float16):
            return F.linear(F.silu(inputs[0]) * inputs[1], *inputs[2:])

    judge(cast, reference_cast, [gate, up, weight, bias])
    _, gradients = differentiate(cast, [gate, up, weight, bias], [torch.ones(5, 17, device=device).half()])
    assert [g.dtype for g in gradients if g is not None] == [factors, factors, torch.float32, torch.float32]


def test_the_product_is_rounded_to_the_dtype_of_the_weight(device: str) -> None:
    gate, up = (numbers(5, 33, device=device) for _ in range(2))
    weight = numbers(17, 33, dtype=torch.float16, device=device)
    judge(glu_linear, linear_reference, [gate, up, weight])
    assert glu_linear(gate, up, weight).dtype == torch.float16


# Errors


@pytest.mark.parametrize("function", [swiglu, geglu, lambda gate, up: glu_linear(gate, up, torch.ones(3, 33))])
@pytest.mark.parametrize("up", [torch.ones(5, 32), torch.ones(33), torch.ones(5, 33, dtype=torch.float16)])
def test_mismatched_gate_and_up(function: Any, up: Tensor) -> None:
    with pytest.raises(ValueError, match=r"gate is \(5, 33\) torch.float32 and up .*; expected the same"):
        function(torch.ones(5, 33), up)


def test_unknown_activations() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"activation='relu'; expected one of .*'silu', 'gelu_tanh', 'gelu', 'quick_"):
        glu(x, x, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='approximate=\'Tanh\'; expected "tanh" or "none"'):
        geglu(x, x, approximate="Tanh")  # type: ignore[arg-type]


@needs_triton
@pytest.mark.parametrize("function", [swiglu, geglu, lambda x, _, **how: glu_linear(x, x, x, **how)])
def test_backend_argument(function: Any, device: str) -> None:
    x = numbers(3, 3, device=device)
    for backend, fused in (("auto", True), ("triton", True), ("torch", False)):
        node = function(x, x, backend=backend).grad_fn
        assert ("GLU" in type(node).__name__) == fused
