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
DOT_DTYPES = tuple(d for d in DTYPES if not (INTERPRETING and d == torch.bfloat16))
"""Those that kernels with a `tl.dot` are tested in: the interpreter's takes the bits of bf16 for integers."""

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
    monkeypatch.setattr(file, "uses_triton", lambda *_, **__: True, raising=False)
    for kernel in [name for name in vars(file) if name.endswith("_kernel")]:
        monkeypatch.setattr(file, kernel, defaultdict(lambda: lambda *_, **__: None))  # kernel[grid](...)


# The operations


def transformed(
    logits: Tensor, *, softcap: float | None = None, logit_scale: float = 1.0, temperature: float = 1.0
) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def cross_entropy_oracle(
    logits: Tensor,
    target: Tensor,
    token_weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    **transform: Any,
) -> Tensor:
    """What `cross_entropy` promises, in terms of torch's own."""
    logits = transformed(logits, **transform)
    class_weight = logits.new_ones(logits.shape[-1]) if class_weight is None else class_weight.to(logits.dtype)
    counts = target != ignore_index
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), target.reshape(-1), class_weight,
        ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing,
    ).view(target.shape)  # fmt: skip
    if z_loss:
        losses = losses + z_loss * torch.where(counts, logits.logsumexp(-1), 0.0).square()
    weights = class_weight[target.where(counts, 0)] * counts
    if token_weight is not None:
        losses, weights = losses * token_weight, weights * token_weight
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / ((weights.sum() if counts.any() else 1) if num_items is None else num_items)


def linear_cross_entropy_oracle(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return cross_entropy_oracle(F.linear(hidden, weight, bias), target, token_weight, **options)


def statistics_oracle(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100, **transform: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The differentiable ones of `token_statistics`."""
    logits = transformed(F.linear(hidden, weight), **transform)
    distribution = torch.distributions.Categorical(logits=logits, validate_args=False)
    counts = target != ignore_index
    results = (distribution.log_prob(target.where(counts, 0)), distribution.entropy(), logits.logsumexp(-1))
    logps, entropy, logsumexp = (torch.where(counts, t, 0.0) for t in results)
    return logps, entropy, logsumexp


def statistics(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    result = kernels.token_statistics(hidden, weight, target, **options)
    return result.logps, result.entropy, result.logsumexp


def divergence_oracle(
    of: str,
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """What one of DIVERGENCES promises of finite logits, in terms of torch's own."""
    dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    log_q, log_p = ((t.to(dtype) / temperature).log_softmax(-1) for t in (student, teacher))
    kl_div = partial(F.kl_div, reduction="none", log_target=True)  # torch's first argument is the second of KL(. || .)
    if of == "kl_div" or (of == "jsd" and beta == 0):
        parts = kl_div(log_q, log_p)
    elif of == "kl_div-reverse" or (of == "jsd" and beta == 1):
        parts = kl_div(log_p, log_q)
    elif of == "jsd":
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        parts = beta * kl_div(log_m, log_p) + (1 - beta) * kl_div(log_m, log_q)
    else:
        parts = (log_p.exp() - log_q.exp()).abs() / 2
    counts = torch.ones_like(parts[..., 0], dtype=torch.bool) if target is None else target != ignore_index
    losses = parts.sum(-1).masked_fill(~counts, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (max(1, int(counts.sum())) if num_items is None else num_items)


DIVERGENCES = {
    "kl_div": (kernels.kl_div, kernels.linear_kl_div),
    "kl_div-reverse": (partial(kernels.kl_div, reverse=True), partial(kernels.linear_kl_div, reverse=True)),
    "jsd": (kernels.jsd, kernels.linear_jsd),
    "tvd": (kernels.tvd, kernels.linear_tvd),
}
"""Functions of logits, and of hidden states and heads."""


def linear_divergence_oracle(
    of: str,
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    student = F.linear(student_hidden, student_weight, student_bias)
    return divergence_oracle(of, student, F.linear(teacher_hidden, teacher_weight, teacher_bias), target, **options)


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


def _softmax_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device)]


def _divergence_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    logits = [numbers(batch, 3, 33, dtype=dtype, device=device) for _ in range(2)]
    return [logits[0], logits[1].detach(), targets(batch, 3, classes=33, device=device)]


def _linear_divergence_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    student, teacher = (_linear_cross_entropy_inputs(batch, dtype, device) for _ in range(2))
    return [*student[:2], *(t.detach() for t in teacher)]


def _rms_norm_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device), numbers(33, dtype=dtype, device=device)]


def _rope_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    heads = [numbers(batch, 2, n, 10, dtype=dtype, device=device) for n in (4, 2)]
    return [*heads, *angles(1, 2, 4, device=device)]


def _glu_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device) for _ in range(2)]


def _glu_linear_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    weights = [numbers(17, 33, dtype=dtype, device=device), numbers(17, dtype=dtype, device=device)]
    return _glu_inputs(batch, dtype, device) + weights


def _cross_entropy_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device), targets(batch, 3, classes=33, device=device)]


def _experts_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    dtype = torch.float16 if dtype in DTYPES and dtype not in DOT_DTYPES else dtype
    return [
        numbers(8 * batch, 17, dtype=dtype, device=device),
        torch.rand(8 * batch, 3, device=device).argsort(-1)[:, :2],
        torch.rand(8 * batch, 2, device=device).to(dtype).requires_grad_(),
        numbers(3, 18, 17, dtype=dtype, device=device, scale=0.3),
        numbers(3, 17, 9, dtype=dtype, device=device, scale=0.3),
    ]


def _linear_cross_entropy_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    features = [
        numbers(batch, 3, 17, dtype=dtype, device=device),
        numbers(33, 17, dtype=dtype, device=device, scale=0.3),
    ]
    return [*features, targets(batch, 3, classes=33, device=device)]


OPTIONS: dict[str, Any] = {
    "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3, "reduction": "none",
}  # fmt: skip
"""Options of `cross_entropy` that bring in all of its formula."""


def _weighted_linear_cross_entropy_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    token_weight = torch.rand(batch, 3, device=device) + 0.5
    return [*_linear_cross_entropy_inputs(batch, dtype, device), token_weight.requires_grad_()]


def _weighted_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor) -> Tensor:
    return kernels.linear_cross_entropy(hidden, weight, target, token_weight=token_weight, **OPTIONS)


def _weighted_linear_cross_entropy_oracle(
    hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor
) -> Tensor:
    return linear_cross_entropy_oracle(hidden, weight, target, None, token_weight, **OPTIONS)


def _add_rms_norm_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device), *_rms_norm_inputs(batch, dtype, device)]


def _layer_norm_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [*_rms_norm_inputs(batch, dtype, device), numbers(33, dtype=dtype, device=device)]


GEMMA = {"weight_offset": 1.0, "round_before_scale": False}
"""The options of `rms_norm` that are not Llama's."""


OPERATIONS = [
    *(
        Operation(
            name,
            partial(kernels.rms_norm, **options),
            partial(kernel_file("rms_norm").reference, eps=1e-6, **options),
            _rms_norm_inputs,
        )
        for name, options in (("rms_norm", {}), ("rms_norm-gemma", GEMMA))
    ),
    *(
        Operation(
            name,
            partial(kernels.add_rms_norm, **options),
            partial(kernel_file("rms_norm").add_reference, eps=1e-6, **options),
            _add_rms_norm_inputs,
        )
        for name, options in (("add_rms_norm", {}), ("add_rms_norm-gemma", GEMMA))
    ),
    Operation(
        "layer_norm", kernels.layer_norm, partial(kernel_file("layer_norm").reference, eps=1e-5), _layer_norm_inputs
    ),
    Operation("experts_mlp", kernels.experts_mlp, kernel_file("experts").reference, _experts_inputs, always_fused=True),
    Operation("rope", kernels.rope, kernel_file("rope").reference, _rope_inputs),
    Operation(
        "rope-interleaved",
        partial(kernels.rope, interleaved=True),
        partial(kernel_file("rope").reference, interleaved=True),
        _rope_inputs,
    ),
    *(
        Operation(
            f"{name}-{activation}",
            partial(function, activation=activation),
            partial(reference, activation=activation),
            inputs,
        )
        for name, function, reference, inputs in (
            ("glu", kernels.glu, kernel_file("glu").reference, _glu_inputs),
            ("glu_linear", kernels.glu_linear, kernel_file("glu").linear_reference, _glu_linear_inputs),
        )
        for activation in kernel_file("glu").ACTIVATIONS
    ),
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
    Operation(
        "linear_cross_entropy-options",
        _weighted_linear_cross_entropy,
        _weighted_linear_cross_entropy_oracle,
        _weighted_linear_cross_entropy_inputs,
        always_fused=True,
    ),
    Operation(
        "cross_entropy-options",
        partial(kernels.cross_entropy, **OPTIONS),
        partial(cross_entropy_oracle, **OPTIONS),
        _cross_entropy_inputs,
    ),
    Operation("token_statistics", statistics, statistics_oracle, _linear_cross_entropy_inputs, always_fused=True),
    Operation("softmax", kernels.softmax, kernel_file("softmax").reference, _softmax_inputs),
    *(
        Operation(name, function, partial(divergence_oracle, name), _divergence_inputs)
        for name, (function, _) in DIVERGENCES.items()
    ),
    *(
        Operation(
            f"linear_{name}",
            function,
            partial(linear_divergence_oracle, name),
            _linear_divergence_inputs,
            always_fused=True,
        )
        for name, (_, function) in DIVERGENCES.items()
    ),
]

every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
