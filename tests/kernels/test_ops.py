"""The registered ops as torch sees them, and the public functions under torch.compile."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo import kernels
from ligerzoo.kernels.dispatch import INTERPRETING
from tests.kernels.accuracy import as_tuple, assert_as_exact_as, assert_equal, in_fp64
from tests.kernels.layouts import transposed
from tests.kernels.loss import samples as loss_samples
from tests.kernels.machine import needs_triton
from tests.kernels.operations import Operation, every_kernel
from tests.kernels.oracles import angles, numbers, targets


def sample_arguments(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """For each op some arguments that differ in layout, in dtype and in what is needed."""

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return numbers(*shape, dtype=dtype, device=device).detach()

    half = torch.float16
    q, k, one_angle, each_angle = (
        new(2, 3, 4, 8),
        new(2, 3, 2, 8),
        angles(1, 3, 3, device=device),
        angles(2, 3, 3, device=device),
    )
    fused = device == "cuda" or INTERPRETING
    tokens, dy, gate_up, down = new(5, 7), new(5, 7), new(3, 8, 7), new(3, 7, 4)
    routes = torch.tensor([[0, 2], [2, 0], [0, 0], [2, 2], [0, 2]], device=device)  # none to the second expert
    routed = (
        new(10, 8),
        torch.arange(10, device=device).int().view(5, 2),
        torch.tensor([0, 5, 5, 10], device=device).int(),
    )
    return {
        "rms_norm_forward": [
            (new(5, 33), new(33), 1e-6, 0.0, True),
            (transposed(new(2, 3, 33)), new(33, dtype=half), 1e-6, 0.0, True),
            (new(5, 33, dtype=half), new(33), 1e-6, 1.0, False),
            (new(5, 33, dtype=half), None, 1e-6, 0.0, True),
            (new(0, 33), new(33), 1e-6, 0.0, True),
        ],
        "add_rms_norm_forward": [
            (new(5, 33), new(5, 33), new(33), 1e-6, 0.0, True),
            (new(2, 3, 33, dtype=half), transposed(new(2, 3, 33)), new(33), 1e-6, 1.0, False),
            (new(5, 33), new(5, 33, dtype=half), None, 1e-6, 0.0, True),
            (new(0, 33), new(0, 33), new(33), 1e-6, 0.0, True),
        ],
        "rms_norm_backward": [
            (new(5, 33), None, new(5, 33), new(33), new(5).abs(), 0.0, True, True, True),
            (transposed(new(2, 3, 33)), new(2, 3, 33), new(2, 3, 33, dtype=half), new(33), new(2, 3), 1.0, False, True,
             False),
            (new(5, 33), new(5, 33), new(5, 33), new(33), new(5).abs(), 0.0, True, False, True),
            (new(5, 33), new(5, 33), new(5, 33, dtype=half), None, new(5).abs(), 0.0, True, True, False),
            (new(0, 33), None, new(0, 33), new(33), new(0), 0.0, True, True, True),
        ],
        "layer_norm_forward": [
            (new(5, 33), new(33), new(33), 1e-5),
            (transposed(new(2, 3, 33)), new(33, dtype=half), None, 1e-5),
            (new(0, 33), new(33), new(33), 1e-5),
        ],
        "layer_norm_backward": [
            (new(5, 33), new(5, 33), new(33), new(5), new(5).abs(), True, True, True),
            (transposed(new(2, 3, 33)), new(2, 3, 33, dtype=half), new(33), new(2, 3), new(2, 3), False, True, False),
            (new(5, 33), new(5, 33), new(33), new(5), new(5).abs(), True, False, True),
            (new(0, 33), new(0, 33), new(33), new(0), new(0), True, True, True),
        ],
        "rope": [
            (*one_angle, q, k, False, False),
            (*each_angle, q.half(), transposed(k), True, True),
            (*one_angle, None, k, True, False),
            (*one_angle, q, None, False, True),
            (*(a[:, :0] for a in one_angle), q[:, :0], k[:, :0], False, True),
        ],
        "glu_forward": [
            (new(5, 33), new(5, 33), "silu", torch.float32),
            (transposed(new(2, 3, 33)), new(2, 3, 33), "gelu_tanh", half),
            (new(0, 33), new(0, 33), "gelu", torch.float32),
        ],
        "glu_backward": [
            (new(5, 33), new(5, 33), new(5, 33), "silu", True, False, True),
            (new(2, 3, 33, dtype=half), transposed(new(2, 3, 33)), new(2, 3, 33), "gelu_tanh", False, True, False),
            (new(0, 33), new(0, 33), new(0, 33), "gelu", True, True, True),
        ],
        "activation_forward": [
            (new(5, 33), "quick_gelu", torch.float32),
            (transposed(new(2, 3, 33)), "gelu_tanh", half),
            (new(0, 33), "gelu", torch.float32),
        ],
        "activation_backward": [
            (new(5, 33), new(5, 33), "quick_gelu", True),
            (transposed(new(2, 3, 33, dtype=half)), new(2, 3, 33), "gelu_tanh", False),
            (new(0, 33), new(0, 33), "gelu", True),
        ],
        "softmax_forward": [(new(5, 33),), (transposed(new(2, 3, 33)).half(),), (new(0, 33),)],
        "softmax_backward": [
            (new(5, 33), new(5, 33)),
            (transposed(new(2, 3, 33)), new(2, 3, 33, dtype=half)),
            (new(0, 33), new(0, 33)),
        ],
        "experts_forward": [
            (tokens, routes, new(5, 2), gate_up, down, "silu", fused),
            (transposed(tokens).half(), routes, new(5, 2), gate_up.half(), transposed(down).half(), "gelu", fused),
            (tokens[:0], routes[:0], new(0, 2), gate_up, down, "silu", fused),
        ],
        "experts_backward": [
            (dy, tokens, new(5, 2), gate_up, down, *routed, "silu", fused, True, True, True, True),
            (dy, tokens, new(5, 2), gate_up, down, *routed, "gelu_tanh", fused, False, False, False, True),
            (transposed(dy), tokens, new(5, 2), gate_up, down, *routed, "gelu", fused, True, False, True, False),
        ],
        **{
            name: [loss_samples.OPS[name].flat_arguments(**sample) for sample in samples(device)]
            for name, samples in loss_samples.SAMPLES.items()
        },
    }  # fmt: skip


OPS = sorted(sample_arguments("cpu"))
ON_ANY_MACHINE = {
    "experts_backward",
    "experts_forward",
    "linear_cross_entropy_sweep",
    "linear_divergence_sweep",
    "scaled",
}


def test_every_op_is_checked() -> None:
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ligerzoo::")]
    assert sorted(registered) == [f"ligerzoo::{name}" for name in OPS]


@pytest.mark.no_poison  # opcheck compares what two runs write
@pytest.mark.parametrize("name", [n if n in ON_ANY_MACHINE else pytest.param(n, marks=needs_triton) for n in OPS])
def test_opcheck(name: str, device: str) -> None:
    for arguments in sample_arguments(device)[name]:
        torch.library.opcheck(getattr(torch.ops.ligerzoo, name).default, arguments)


def gradients_of(
    function: Callable[..., Any], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The outputs and the gradients; compiled code may use up what it saved, so one backward pass only."""
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    outputs = as_tuple(function(*leaves))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return *(t.detach() for t in outputs), *torch.autograd.grad(outputs, wanted, upstream)


@pytest.fixture
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@every_kernel
def test_compiled_equals_eager_at_any_batch_without_compiling_a_third_time(operation: Operation, device: str) -> None:
    if INTERPRETING and operation.always_fused:
        pytest.skip("compiles on a CPU to the same ops without the interpreter")
    compiled = torch.compile(operation.function, fullgraph=True, backend="aot_eager")
    for batch, stance in ((2, "default"), (3, "default"), (5, "fail_on_recompile"), (4, "fail_on_recompile")):
        inputs = operation.inputs(batch, torch.float32, device)
        upstream = [torch.randn_like(t) for t in as_tuple(operation.function(*inputs))]
        with torch.compiler.set_stance(stance):
            actual = gradients_of(compiled, inputs, upstream)
        assert_equal(actual, gradients_of(operation.function, inputs, upstream))


def all_of_them(
    x: Tensor, norm: Tensor, gate: Tensor, down: Tensor, head: Tensor, cos: Tensor, sin: Tensor, target: Tensor
) -> Tensor:
    """Something of a Transformer's shape that calls every function."""
    h = kernels.rms_norm(x, norm)
    q, k = kernels.rope(h.unflatten(-1, (4, 4)), h.unflatten(-1, (4, 4)), cos, sin)
    h = h + (q * k).flatten(-2)
    h = h + kernels.glu_linear(h @ gate.T, kernels.swiglu(h, x) @ gate.T, down)
    loss = kernels.linear_cross_entropy(h, head, target)
    return loss + kernels.cross_entropy(h @ head.T, target, reduction="none").mean()


def judge_compiled(function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    upstream = [torch.tensor(0.5, device=inputs[0].device)]
    actual = gradients_of(torch.compile(function, fullgraph=True), inputs, upstream)
    reference = gradients_of(function, inputs, upstream)
    truth = gradients_of(function, in_fp64(inputs), in_fp64(upstream))
    for case in zip(actual, reference, truth, strict=True):
        assert_as_exact_as(*case, ulps=8)  # inductor fuses and reorders what surrounds the kernels


@pytest.mark.skipif(INTERPRETING, reason="inductor's code is the same without")
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.inductor
def test_inductor_with_the_loss_head(device: str) -> None:
    inputs = [
        numbers(2, 3, 16, device=device),
        numbers(33, 16, device=device),
        targets(2, 3, classes=33, device=device),
    ]
    judge_compiled(kernels.linear_cross_entropy, inputs)


@pytest.mark.gpu
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.inductor
def test_inductor_with_everything(device: str) -> None:
    inputs = [numbers(*shape, device=device) for shape in ((2, 3, 16), (16,), (24, 16), (16, 24), (33, 16))]
    judge_compiled(all_of_them, [*inputs, *angles(1, 3, 2, device=device), targets(2, 3, classes=33, device=device)])
