"""Each kernel that a model uses against fp64, judged by plain torch's own error.

The calls of kernels are recorded while the model computes losses, decodes and continues texts of random lengths. Each
is then repeated with the same inputs: by the kernel, in plain torch in the same dtype, and in plain torch in fp64.
Outputs and gradients may have twice the error of plain torch, plus some ulps of the largest number. They are also
computed in fp32, where a wrong formula shows that half precision hides.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isfunction, signature
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ligerzoo.doctor.findings import Finding
from ligerzoo.doctor.texts import longest_text, random_tokens
from ligerzoo.kernels.activation import ACTIVATIONS, Activation
from ligerzoo.kernels.few_rows import gate_few_rows
from ligerzoo.kernels.jit import INTERPRETING
from ligerzoo.layers import attention_paths, plain_attention
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.models import CausalLM

Function = Callable[..., Any]

CALLERS = ("ligerzoo.layers", "ligerzoo.models", "ligerzoo.losses")
"""Packages whose calls of kernels are recorded."""

ULPS, ULPS_IN_FP32 = 2.0, 8.0
"""What errors may be in addition to twice those of plain torch, in ulps of the largest number.

Torch's fused attention in fp32 has 3 times the error of its plain form.
"""

REPEATS = 4
"""Further draws of upstream gradients, if a result is less accurate: plain torch's error may be near 0 by chance."""

OTHERS = (
    "losses but cross-entropy, LoRA, optimizers, sampling, and modules that do not read text, such as a vision tower"
)
"""Kernels that the recorded calls do not use."""

IN_HALF_PRECISION_ONLY = {"exact_attention", "packed_attention", "gate_few_rows"}


def _gate(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], scales: object, activation: Activation
) -> Tensor:
    gate, up = (F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return ACTIVATIONS[activation](gate) * up


def _attend(call: AttentionCall) -> Tensor:
    return plain_attention.reference(call._replace(mask=call.additive(call.q.dtype)))


PLAIN: Mapping[Function, Function] = {gate_few_rows: _gate, attention_paths.compute: _attend}
"""Plain torch for functions without the argument `backend`."""


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel.

    Attributes:
        name: of the function.
        function: the function.
        arguments: by name.
        differentiates: whether backward may follow.
    """

    name: str
    function: Function
    arguments: dict[str, Any]
    differentiates: bool

    @property
    def key(self) -> tuple[str, bool, str]:
        """What distinguishes the call from others: the name, shapes and dtypes, and options."""
        arguments = tree_map_only(Tensor, lambda x: (x.shape, x.dtype), self.arguments)
        return self.name, self.differentiates, re.sub(" at 0x[0-9a-f]+", "", repr(arguments))

    def results(self, dtype: torch.dtype | None, *, plain: bool, seed: int) -> list[Tensor]:
        """Returns the outputs, and the gradients of the inputs for random upstream gradients.

        Args:
            dtype: of all inputs; None for their own.
            plain: compute in plain torch.
            seed: of the upstream gradients.
        """
        leaves: list[Tensor] = []

        def prepared(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            is_parameter = type(value) is torch.nn.Parameter  # others may be written to: states, or outputs of products
            copy = value.detach().to(dtype or value.dtype, copy=not is_parameter)
            if self.differentiates and value.requires_grad:
                leaves.append(copy.requires_grad_())
            return copy

        bound = signature(self.function).bind_partial()
        bound.arguments.update(tree_map_only(Tensor, prepared, self.arguments))
        function = PLAIN.get(self.function, self.function) if plain else self.function
        if plain and self.function not in PLAIN:
            bound.arguments["backend"] = "torch"
        with torch.set_grad_enabled(self.differentiates):
            output = function(*bound.args, **bound.kwargs)
        outputs = [one for one in _tensors(output) if one.is_floating_point()]
        differentiable = [one for one in outputs if one.requires_grad]
        if not differentiable:
            return [one.detach() for one in outputs]
        generator = torch.Generator("cpu").manual_seed(seed)
        upstream = [torch.randn(one.shape, generator=generator).to(one) for one in differentiable]
        gradients = torch.autograd.grad(differentiable, leaves, upstream, allow_unused=True)
        zeros = (torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, gradients, strict=True))
        return [*(one.detach() for one in outputs), *zeros]


Calls = dict[tuple[str, bool, str], KernelCall]
"""Calls by their keys."""


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    """Records the calls of kernels within the block, one of each kind."""
    calls: Calls = {}
    patched: list[tuple[ModuleType, str, Function]] = []
    for module in [module for name, module in sys.modules.items() if name.startswith(CALLERS)]:
        for name, function in list(vars(module).items()):
            if _is_kernel(name, function):
                patched.append((module, name, function))
                setattr(module, name, _recording(name, function, calls))
    try:
        yield calls
    finally:
        for module, name, function in patched:
            setattr(module, name, function)


def _is_kernel(name: str, function: object) -> bool:
    """Whether a name in a module is a function that computes by a kernel, or in plain torch."""
    if not isfunction(function) or name.startswith(("check_", "uses_", "write_")):
        return False
    has_backend = function.__module__.startswith("ligerzoo.kernels.") and "backend" in signature(function).parameters
    return has_backend or function in PLAIN


def _recording(name: str, function: Function, calls: Calls) -> Function:
    parameters = signature(function)
    name = "attend" if PLAIN.get(function) is _attend else name.removeprefix("compute_")

    def call(*arguments: Any, **options: Any) -> Any:
        bound = parameters.bind(*arguments, **options)
        bound.apply_defaults()
        differentiates = torch.is_grad_enabled() and any(one.requires_grad for one in _tensors(bound.arguments))
        one = KernelCall(name, function, tree_map_only(Tensor, _detached, dict(bound.arguments)), differentiates)
        if one.key not in calls:
            calls[one.key] = one
        return function(*arguments, **options)

    return call


def _detached(x: Tensor) -> Tensor:
    """A tensor without the graph that computed it, but with its `requires_grad`."""
    return x if x.grad_fn is None else x.detach().requires_grad_()


def _tensors(values: object) -> list[Tensor]:
    """The tensors among nested values."""
    return list(filter(torch.is_tensor, tree_leaves(values)))


def kernel_findings(model: CausalLM, chance: random.Random) -> Iterator[Finding]:
    """Yields a finding for each kernel that the model uses on texts of random lengths."""
    device = model.device
    if device.type == "cpu" and not INTERPRETING:
        yield Finding("kernels", "all", "not covered", "plain torch computes on a CPU; see TRITON_INTERPRET=1")
        return
    if INTERPRETING and model.dtype == torch.bfloat16:
        yield Finding(
            "kernels", "all", "not covered", "Triton's interpreter does not compute in bf16; use --dtype float16"
        )
        return
    with recorded_calls() as calls:
        longest = min(600, longest_text(model))
        for length in (1, 9) if INTERPRETING else (1, chance.randint(2, 64), chance.randint(longest // 2, longest)):
            ids = random_tokens(model, chance, 2, length).to(device)
            model(ids, labels=ids)
            with torch.no_grad():
                cache = model.new_cache()
                model(ids, past_key_values=cache)
                model(ids[:, -1:], past_key_values=cache)
    for name in sorted({call.name for call in calls.values()}):
        yield judge(name, [call for call in calls.values() if call.name == name], chance)
    yield Finding("kernels", "others", "not covered", OTHERS)


def judge(name: str, calls: list[KernelCall], chance: random.Random) -> Finding:
    """Compares all calls of a kernel with plain torch and fp64."""
    worst = Accuracy(0.0, 0.0, 0.0)
    for call in calls:
        for dtype in (None,) if name in IN_HALF_PRECISION_ONLY else (None, torch.float32):
            try:
                found = accuracy(call, dtype, chance.getrandbits(32))
                if found.share > 1:  # unlucky, or wrong in all further draws
                    found = min(accuracy(call, dtype, chance.getrandbits(32)) for _ in range(REPEATS))
            except Exception as error:
                if dtype is not None:  # the kernel, or the GPU's memory, may be for half precision only
                    continue
                return Finding(
                    "kernels", name, "fails", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                )
            if math.isnan(found.share):
                return Finding("kernels", name, "not covered", "its inputs are not finite: an earlier kernel is wrong")
            worst = max(worst, found)
    detail = (
        f"{len(calls)} kinds of calls: error {worst.error:.1e} of the largest number; plain torch {worst.plain:.1e}"
    )
    return Finding("kernels", name, "holds" if worst.share <= 1 else "fails", detail)


class Accuracy(NamedTuple):
    """The least accurate result of a call: its error as a share of the allowed one, and errors of ours and torch's.

    The share is NaN if the true result is not finite.
    """

    share: float
    error: float
    plain: float


def accuracy(call: KernelCall, dtype: torch.dtype | None, seed: int) -> Accuracy:
    """Computes a call in a dtype, in plain torch, and in fp64."""
    ours = call.results(dtype, plain=False, seed=seed)
    plain = call.results(dtype, plain=True, seed=seed)
    truth = call.results(torch.float64, plain=True, seed=seed)
    worst = Accuracy(0.0, 0.0, 0.0)
    for one, other, true in zip(ours, plain, truth, strict=True):
        largest = true.abs().max().item() if true.numel() else 0.0
        if not math.isfinite(largest):
            return Accuracy(math.nan, math.nan, math.nan)
        if largest > 0:
            error, own = ((x.double() - true).abs().max().item() / largest for x in (one, other))
            ulps = ULPS_IN_FP32 if other.dtype == torch.float32 else ULPS
            share = error / (2 * own + ulps * torch.finfo(other.dtype).eps)
            worst = max(worst, Accuracy(math.inf if math.isnan(share) else share, error, own))
    return worst
