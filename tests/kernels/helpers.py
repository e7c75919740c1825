"""How the kernel tests judge an operation, what they feed it, and the table of operations that the general tests walk.

The tests run in three ways: on a CPU, where the references and the chunked `linear_cross_entropy` run; on a CPU with
TRITON_INTERPRET=1, where the Triton kernels themselves run, thousands of times slower; and on a GPU, at larger sizes.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligerzoo import kernels
from ligerzoo.kernels.dispatch import INTERPRETING

ON_GPU = torch.cuda.is_available() and not INTERPRETING
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

needs_triton = pytest.mark.skipif(not (ON_GPU or INTERPRETING), reason="needs a GPU or TRITON_INTERPRET=1")


def on_gpu_too(small: Sequence[Any], large: Sequence[Any]) -> list[Any]:
    """The small cases, and on a GPU the large ones as well."""
    return [*small, *(large if ON_GPU else ())]


def kernel_file(name: str) -> ModuleType:
    """The module ligerzoo.kernels.<name>; as an attribute of the package, that name is the function."""
    return import_module(f"ligerzoo.kernels.{name}")


# Judging


def assert_as_exact_as(
    actual: Tensor | None, reference: Tensor | None, truth: Tensor | None, ulps: float = 2.0
) -> None:
    """`actual` errs from `truth` at most twice as much as `reference` does, plus `ulps` of the truth's largest element.

    The three have the same shape, `actual` and `reference` the same dtype and device, and where `reference` is not
    finite, `actual` is the same infinity or NaN.
    """
    if reference is None or actual is None or truth is None:
        assert reference is None
        assert actual is None
        return
    assert (actual.shape, actual.dtype, actual.device) == (reference.shape, reference.dtype, reference.device)
    finite = reference.isfinite()
    torch.testing.assert_close(actual[~finite], reference[~finite], rtol=0, atol=0, equal_nan=True)
    if not finite.any():
        return
    truth = truth[finite].double()
    error, reference_error = ((t[finite].double() - truth).abs().max().item() for t in (actual, reference))
    floor = ulps * torch.finfo(reference.dtype).eps * truth.abs().max().item()
    assert error <= 2 * reference_error + floor, f"errs by {error:.3g}, the reference by {reference_error:.3g}"


def assert_equal(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """The same bits (NaN equals NaN) and the same Nones."""
    assert [t is None for t in actual] == [t is None for t in expected]
    for a, e in zip(actual, expected, strict=True):
        if a is not None:
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def differentiate(
    function: Callable[..., Any], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """The outputs, and the gradient of each input (None for one that requires none).

    Nothing may be written to on the way: neither inputs, outputs nor upstream gradients, nor what is saved between the
    two passes, so that a second backward pass gives the same.
    """
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    outputs = as_tuple(function(*leaves))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    pairs = [(output, dy) for output, dy in zip(outputs, upstream, strict=True) if output.requires_grad]
    differentiable, upstreams = zip(*pairs, strict=True)
    seen = [*inputs, *upstream, *outputs]
    before = [t.detach().clone() for t in seen]
    first, second = (
        torch.autograd.grad(differentiable, wanted, upstreams, retain_graph=True, allow_unused=True) for _ in range(2)
    )
    assert_equal([t.detach() for t in seen], before)
    assert_equal(second, first)
    gradients = iter(first)
    return outputs, tuple(next(gradients) if leaf.requires_grad else None for leaf in leaves)


def in_fp64(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t.detach() for t in tensors
    ]


def judge(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    layout: Callable[[Tensor], Tensor] = torch.clone,
) -> None:
    """Holds outputs and gradients to `assert_as_exact_as`, for random upstream gradients laid out by `layout`."""
    before = [t.detach().clone() for t in inputs]
    upstream = [layout(torch.randn_like(output)) for output in as_tuple(reference(*inputs))]
    outputs, gradients = differentiate(function, inputs, upstream)
    assert_equal([t.detach() for t in inputs], before)
    expected = differentiate(reference, inputs, upstream)
    truth = differentiate(reference, in_fp64(inputs), in_fp64(upstream))
    for case in zip(outputs, expected[0], truth[0], strict=True):
        assert_as_exact_as(*case)
    for case in zip(gradients, expected[1], truth[1], strict=True):
        assert_as_exact_as(*case)


# Layouts: the same shape and, but for the expanded ones, the same values, laid out otherwise in memory


def offset(t: Tensor) -> Tensor:
    """Begins one element into its storage, where no vector load is aligned."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def sliced(t: Tensor) -> Tensor:
    """Every second element of every dimension of something larger."""
    view = t.new_zeros([2 * n for n in t.shape])[(slice(1, None, 2),) * t.dim()]
    return view.copy_(t)


def padded(t: Tensor) -> Tensor:
    """The middle of longer rows."""
    return F.pad(t, (2, 3))[..., 2:-3] if t.dim() else t


def transposed(t: Tensor) -> Tensor:
    """The dimensions in memory are the reverse of those in the shape."""
    backwards = tuple(range(t.dim()))[::-1]
    return t.permute(backwards).contiguous().permute(backwards)


def swapped(t: Tensor) -> Tensor:
    """(A, B, ...) in memory as (B, A, ...), as attention hands queries on."""
    return t if t.dim() < 3 else t.transpose(0, 1).contiguous().transpose(0, 1)


def repeated_rows(t: Tensor) -> Tensor:
    """One entry of the first dimension, expanded over it."""
    return t[:1].expand_as(t) if t.dim() else t


def constant(t: Tensor) -> Tensor:
    """One number expanded over all dimensions, as the gradient of a sum is."""
    return t.flatten()[:1].view((1,) * t.dim()).expand_as(t)


LAYOUTS = [offset, sliced, padded, transposed, swapped, repeated_rows, constant]


def laid_out(inputs: Sequence[Tensor], layout: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [layout(t.detach()).requires_grad_(t.requires_grad) for t in inputs]


# Watching what runs


@dataclass
class Recorder(TorchDispatchMode):
    """Records every operation that runs, those inside ligerzoo's own as well, and the bytes of all memory it makes."""

    names: list[str] = field(default_factory=list)
    made: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "ligerzoo":
            key = torch._C.DispatchKey.CUDA if args[0].is_cuda else torch._C.DispatchKey.CPU
            with self:
                return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **kwargs)
        self.names.append(func.overloadpacket.__name__)
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.numel() and t.untyped_storage().data_ptr() not in known:
                self.made.append(t.untyped_storage().nbytes())
        return result


def launch_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Lets the launching code of a kernel file run anywhere, with kernels that do nothing."""
    file = kernel_file(name)
    monkeypatch.setattr(file, "uses_triton", lambda *_: True)
    for kernel in [name for name in vars(file) if name.endswith("_kernel")]:
        monkeypatch.setattr(file, kernel, defaultdict(lambda: lambda *_, **__: None))  # kernel[grid](...)


# The operations


def cross_entropy_oracle(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """What `cross_entropy` promises, in terms of torch's own."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), target.reshape(-1), ignore_index=ignore_index, reduction="none"
    ).view(target.shape)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (max(1, int((target != ignore_index).sum())) if num_items is None else num_items)


def linear_cross_entropy_oracle(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return cross_entropy_oracle(F.linear(hidden, weight), target, **options)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0) -> Tensor:
    """Normally distributed, and differentiable."""
    return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()


def targets(*shape: int, classes: int, device: str = "cpu", ignored: float = 0.3, ignore_index: int = -100) -> Tensor:
    """Random classes, a share of them replaced by `ignore_index`."""
    target = torch.randint(classes, shape, device=device)
    return target.masked_fill(torch.rand(shape, device=device) < ignored, ignore_index)


def angles(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(cos, sin) of random angles."""
    angle = torch.randn(shape, device=device) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


@dataclass(frozen=True)
class Operation:
    """One public function under one set of options; `inputs(batch, dtype, device)` makes small inputs for it."""

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[int, torch.dtype, str], list[Tensor]]
    always_fused: bool = False
    """Whether an autograd.Function runs on a plain CPU too."""


def _rms_norm_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device), numbers(33, dtype=dtype, device=device)]


def _rope_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    heads = [numbers(batch, 2, n, 10, dtype=dtype, device=device) for n in (4, 2)]
    return [*heads, *angles(1, 2, 4, device=device)]


def _swiglu_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device) for _ in range(2)]


def _swiglu_linear_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    weights = [numbers(17, 33, dtype=dtype, device=device), numbers(17, dtype=dtype, device=device)]
    return _swiglu_inputs(batch, dtype, device) + weights


def _cross_entropy_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device), targets(batch, 3, classes=33, device=device)]


def _linear_cross_entropy_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    features = [
        numbers(batch, 3, 17, dtype=dtype, device=device),
        numbers(33, 17, dtype=dtype, device=device, scale=0.3),
    ]
    return [*features, targets(batch, 3, classes=33, device=device)]


def _rms_norm_reference(x: Tensor, weight: Tensor) -> Tensor:
    return kernel_file("rms_norm").reference(x, weight, 1e-6)


OPERATIONS = [
    Operation("rms_norm", kernels.rms_norm, _rms_norm_reference, _rms_norm_inputs),
    Operation("rope", kernels.rope, kernel_file("rope").reference, _rope_inputs),
    Operation("swiglu", kernels.swiglu, kernel_file("swiglu").reference, _swiglu_inputs),
    Operation("swiglu_linear", kernels.swiglu_linear, kernel_file("swiglu").linear_reference, _swiglu_linear_inputs),
    *(
        Operation(
            f"cross_entropy-{reduction}",
            partial(kernels.cross_entropy, reduction=reduction),
            partial(cross_entropy_oracle, reduction=reduction),
            _cross_entropy_inputs,
        )
        for reduction in ("mean", "none")
    ),
    *(
        Operation(
            f"linear_cross_entropy-{reduction}",
            partial(kernels.linear_cross_entropy, reduction=reduction),
            partial(linear_cross_entropy_oracle, reduction=reduction),
            _linear_cross_entropy_inputs,
            always_fused=True,
        )
        for reduction in ("mean", "none")
    ),
]

every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
