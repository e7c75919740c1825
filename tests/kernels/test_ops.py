"""`opcheck` of all registered ops, and the public functions under torch.compile."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from ligerzoo import kernels
from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.kernels.registration import OPS
from tests.kernels.accuracy import as_tuple, assert_as_exact_as, assert_equal, in_fp64
from tests.kernels.loss.samples import SAMPLES as LOSS_SAMPLES
from tests.kernels.machine import ON_GPU, needs_triton
from tests.kernels.operations import KERNELS, Operation
from tests.kernels.oracles import angles, numbers, targets
from tests.kernels.samples import SAMPLES

ALL_SAMPLES = {**SAMPLES, **LOSS_SAMPLES}
OP_NAMES = sorted(ALL_SAMPLES)
ON_ANY_MACHINE = {
    "apply_sinks",
    "apply_sinks_backward",
    "contrastive_sweep",
    "experts_backward",
    "experts_forward",
    "experts_gate_up",
    "linear_cross_entropy_sweep",
    "linear_divergence_sweep",
    "packed_attention",
    "packed_attention_backward",
    "scaled",
    "sink_gradients",
}

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""All checks of `opcheck`; the last one compiles, as the public functions that call ops of two passes do below."""

META_ONLY = {"ligerzoo::attention_on_meta", "ligerzoo::attention_on_meta_backward"}
"""Ops that replace torch's attention on meta tensors: they allocate, and compute nothing."""


def test_every_op_is_checked() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ligerzoo::")}
    assert sorted(registered - META_ONLY) == [f"ligerzoo::{name}" for name in OP_NAMES]


@pytest.mark.no_poison  # opcheck compares what two runs write
@pytest.mark.parametrize("name", [n if n in ON_ANY_MACHINE else pytest.param(n, marks=needs_triton) for n in OP_NAMES])
@pytest.mark.parametrize("compiled", ["one sample", pytest.param("every sample", marks=pytest.mark.thorough)])
def test_opcheck(name: str, compiled: str, device: str) -> None:
    has_other_pass = name.endswith(("_forward", "_backward"))
    for i, sample in enumerate(ALL_SAMPLES[name](device)):
        checks = OPCHECKS if compiled == "every sample" or i == has_other_pass == 0 else OPCHECKS[:-1]
        torch.library.opcheck(OPS[name].overload, OPS[name].flat_arguments(**sample), test_utils=checks)


@pytest.mark.parametrize("name", [n if n in ON_ANY_MACHINE else pytest.param(n, marks=needs_triton) for n in OP_NAMES])
def test_compiled_code_serves_all_sizes(name: str, device: str) -> None:
    """The fake of an op leaves a symbolic size symbolic. `len` of a tensor would not: each size compiles again."""
    for sample in ALL_SAMPLES[name](device):
        arguments = OPS[name].flat_arguments(**sample)
        size, shapes = arguments[0].shape[0], ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes)

        def symbolic(argument: Any, size: int = size, mode: FakeTensorMode = mode) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            dims = [DimDynamic.DYNAMIC if n == size > 1 else DimDynamic.STATIC for n in argument.shape]
            return mode.from_tensor(argument, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))

        with mode:
            OPS[name].overload(*pytree.tree_map(symbolic, arguments))
        assert not shapes.replacements


def gradients_of(
    function: Callable[..., Any], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The outputs and the gradients, with one backward pass only: compiled code may free its saved tensors."""
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    outputs = as_tuple(function(*leaves))
    trainable = [leaf for leaf in leaves if leaf.requires_grad]
    return *(t.detach() for t in outputs), *torch.autograd.grad(outputs, trainable, upstream)


@pytest.fixture
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "operation",
    [
        # A CPU without the interpreter compiles the plain torch of the others.
        pytest.param(operation, marks=() if INTERPRETING or ON_GPU or operation.always_fused else pytest.mark.thorough)
        for operation in KERNELS
    ],
    ids=lambda operation: operation.name,
)
def test_compiled_equals_eager_at_any_batch_without_compiling_a_third_time(operation: Operation, device: str) -> None:
    if INTERPRETING and operation.always_fused:
        pytest.skip("compiles on a CPU to the same ops without the interpreter")
    if operation.name == "residual_rms_norm" and device == "cpu" and not INTERPRETING:
        pytest.skip("plain torch adds the three gradients of x in another order when it is compiled")
    compiled = torch.compile(operation.function, fullgraph=True, backend="aot_eager")
    for batch, stance in ((2, "default"), (3, "default"), (5, "fail_on_recompile")):
        inputs = operation.inputs(batch, torch.float32, device)
        upstream = [torch.randn_like(t) for t in as_tuple(operation.reference(*inputs))]
        with torch.compiler.set_stance(stance):
            actual = gradients_of(compiled, inputs, upstream)
        assert_equal(actual, gradients_of(operation.function, inputs, upstream))


def transformer_like(
    x: Tensor, norm: Tensor, gate: Tensor, down: Tensor, head: Tensor, cos: Tensor, sin: Tensor, target: Tensor
) -> Tensor:
    """A small Transformer block with a loss."""
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
        assert_as_exact_as(*case, ulps=8)  # inductor fuses and reorders the operations around the kernels


@pytest.mark.plain
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.inductor
@pytest.mark.thorough  # takes 15 s; tests/kernels/test_poisoned_memory.py compiles a kernel
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
    judge_compiled(
        transformer_like, [*inputs, *angles(1, 3, 2, device=device), targets(2, 3, classes=33, device=device)]
    )
