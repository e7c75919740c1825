"""`opcheck` of all registered ops, and the public functions under torch.compile."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo import kernels
from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.kernels.registration import OPS
from tests.kernels.accuracy import as_tuple, assert_as_exact_as, assert_equal, in_fp64
from tests.kernels.layouts import transposed
from tests.kernels.machine import needs_triton
from tests.kernels.operations import Operation, every_kernel
from tests.kernels.oracles import angles, numbers, targets
from tests.kernels.samples import SAMPLES


def loss_arguments(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Samples of the loss ops by position; those of the other ops are in `samples`, by keyword."""

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return numbers(*shape, dtype=dtype, device=device).detach()

    half = torch.float16
    logits, target = new(5, 33), targets(5, classes=33, device=device)
    other_target = targets(5, classes=33, device=device, ignore_index=5)
    hidden, weight, upstream = new(5, 7), new(33, 7), new(5)
    summed, no_upstream = upstream[:1].expand(5), upstream[:0]
    fused = device == "cuda" or INTERPRETING
    untransformed = (1.0, None, 1.0, None)
    plain, options = (1.0, None, 1.0, 0.0, 0.0), (0.7, 3.0, 1.3, 0.1, 0.01)
    return {
        "cross_entropy_forward": [
            (logits, target, None, *plain, -100, False),
            (transposed(logits).half(), other_target, weight[:, 0], *options, 5, True),
            (logits[:0], target[:0], None, *plain, -100, False),
        ],
        "cross_entropy_backward": [
            (logits, target, new(2, 5), upstream, None, *plain, -100),
            (transposed(logits).half(), other_target, new(2, 5), summed, weight[:, 0], *options, 5),
            (logits[:0], target[:0], new(2, 0), no_upstream, None, *plain, -100),
        ],
        "linear_cross_entropy_sweep": [
            (hidden, weight, target, None, None, upstream, None, None, None, *plain, -100, 0, fused, False,
             True, True, False),
            (transposed(hidden).half(), weight.half(), other_target, None, None, summed, None, None, None, *plain, 5,
             512, fused, False, True, False, False),
            (hidden, transposed(weight), target, weight[:, 0], weight[:, 1], None, upstream, upstream, summed, *options,
             -100, None, fused, True, False, True, True),
            (hidden, weight, target, None, None, None, None, None, None, *plain, -100, 0, False, True,
             False, False, False),
            (hidden[:0], weight, target[:0], None, None, no_upstream, None, None, None, *plain, -100, 512, fused, False,
             True, True, False),
        ],
        "divergence_forward": [
            (logits, logits.flip(0), target, "forward_kl", 0.0, 1.0, -100, *untransformed),
            (transposed(new(5, 33)).half(), logits, other_target, "jsd", 0.3, 2.0, 5, 0.7, 3.0, 0.9, None),
            (logits[:0], logits[:0], target[:0], "tvd", 0.0, 1.0, -100, *untransformed),
        ],
        "divergence_backward": [
            (logits, logits.flip(0), target, new(5, 5), upstream, "reverse_kl", 0.0, 1.0, -100, *untransformed),
            (transposed(logits).half(), logits.flip(0), other_target, new(5, 5), summed, "jsd", 0.3, 2.0, 5,
             1.0, None, 0.9, 2.0),
            (logits[:0], logits[:0], target[:0], new(0, 5), no_upstream, "tvd", 0.0, 1.0, -100, *untransformed),
        ],
        "linear_divergence_sweep": [
            (hidden, weight, weight[:, 0], hidden.flip(0), weight, weight[:, 1], target, upstream,
             "forward_kl", 0.0, 1.0, -100, *untransformed, 0, fused, True, True, True),
            (hidden.half(), weight.half(), None, hidden, weight, None, other_target, summed,
             "jsd", 0.3, 2.0, 5, 0.7, 3.0, 0.9, 2.0, None, fused, True, False, False),
            (hidden, weight, None, hidden @ weight.T, None, None, target, None,
             "cosine", 0.0, 1.0, -100, *untransformed, None, False, False, False, False),
            (hidden[:0], weight, None, hidden[:0], weight, None, target[:0], no_upstream,
             "tvd", 0.0, 1.0, -100, *untransformed, None, fused, True, True, False),
        ],
        "scaled": [
            (weight, new(), torch.bfloat16),
            (transposed(weight).half(), new(), half),
            (weight[:0], new(), torch.float32),
        ],
    }  # fmt: skip


OP_NAMES = sorted([*SAMPLES, *loss_arguments("cpu")])
ON_ANY_MACHINE = {
    "experts_backward",
    "experts_forward",
    "linear_cross_entropy_sweep",
    "linear_divergence_sweep",
    "scaled",
}


def test_every_op_is_checked() -> None:
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ligerzoo::")]
    assert sorted(registered) == [f"ligerzoo::{name}" for name in OP_NAMES]


@pytest.mark.no_poison  # opcheck compares what two runs write
@pytest.mark.parametrize("name", [n if n in ON_ANY_MACHINE else pytest.param(n, marks=needs_triton) for n in OP_NAMES])
def test_opcheck(name: str, device: str) -> None:
    if name in SAMPLES:
        arguments = [OPS[name].flat_arguments(**sample) for sample in SAMPLES[name](device)]
    else:
        arguments = loss_arguments(device)[name]
    for args in arguments:
        torch.library.opcheck(getattr(torch.ops.ligerzoo, name).default, args)


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


@pytest.mark.skipif(INTERPRETING, reason="inductor's code does not depend on the interpreter")
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
    judge_compiled(
        transformer_like, [*inputs, *angles(1, 3, 2, device=device), targets(2, 3, classes=33, device=device)]
    )
