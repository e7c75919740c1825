"""`FusedFunction`: the autograd of fused operations, in eager mode and under the transforms of torch.func.

A kernel file writes a classic `torch.autograd.Function`: `forward(ctx, ...)` and a `once_differentiable`
`backward(ctx, ...)`. Eager mode and torch.compile run it directly. torch.func (grad, vjp, jacrev, vmap) accepts only
functions with a `setup_context`, whose intermediate results are outputs. On a CPU an empty function of this kind takes
39 us forward and backward, a classic one 20: torch binds the arguments to the signature in each call. So two generic
functions replace the classic one, only while a transform is active: `_Forward` records what `forward` saves and returns
it as further outputs, and `_Backward` runs `backward` on it. Under no_grad, `forward` runs without autograd.

Under vmap both process the samples one after the other: each sample launches the kernels that it would launch alone.
Forward-mode differentiation and second derivatives are errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

_REMEDY = "call the plain-torch `reference` function of the operation's file in ligerzoo/kernels"
_TWICE = (
    "a fused operation can be differentiated only once: create_graph=True and nested torch.func transforms are not "
    f"supported; for higher derivatives, {_REMEDY}"
)


def under_transform() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def innermost(tensor: Tensor) -> Tensor:
    """Returns the plain tensor that transforms of torch.func wrap: under vmap, that of all samples."""
    return _unwrapped(tensor)[-1]


def any_true(condition: Tensor) -> bool:
    """Whether an element is True, under vmap in any sample. A host sync."""
    return bool(innermost(condition).any())


def requires_gradient(tensor: Tensor) -> bool:
    """Whether autograd or any active transform of torch.func differentiates with respect to the tensor."""
    return any(t.requires_grad for t in _unwrapped(tensor))


def _unwrapped(tensor: Tensor) -> list[Tensor]:
    """Returns the tensor and what each transform of torch.func wraps in it; the last one is a plain tensor."""
    tensors = [tensor]
    if not torch.compiler.is_compiling():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensors[-1]):
            tensors.append(torch._C._functorch.get_unwrapped(tensors[-1]))
    return tensors


class FusedContext(Protocol):
    """The `ctx` of a `FusedFunction`: autograd's, or a `RecordedContext`. Further attributes are the function's own."""

    @property
    def needs_input_grad(self) -> Sequence[bool]: ...

    @property
    def saved_tensors(self) -> Sequence[Any]: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...


def if_needed(gradients: Iterable[Tensor | None], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The needed gradients, and None for the others."""
    return tuple([gradient if needs else None for gradient, needs in zip(gradients, needed, strict=True)])


class FusedFunction(torch.autograd.Function):
    """Base class of the autograd functions of fused operations. All arguments of `apply` are positional."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if under_transform():
            *outputs, recording = _Forward.apply(cls, *args)
            return tuple(outputs[: recording.n_outputs]) if recording.returns_tuple else outputs[0]
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            # As `torch.autograd.Function.apply`, without looking for a `setup_context`.
            return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]
        return cls.forward(RecordedContext((False,) * len(args)), *unwrap_dead_wrappers(args))


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a backward raise under `create_graph=True`, where autograd would treat its results as constants.

    torch's decorator of this name raises only if the upstream gradient requires a gradient. That of a loss does not.

    Raises:
        RuntimeError: from the decorated backward, under `create_graph=True`.
    """

    @functools.wraps(backward)
    def checked(ctx: FusedContext, *gradients: Tensor | None) -> Any:
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                raise RuntimeError(_TWICE)
            if under_transform():  # such as torch.autograd.grad(..., is_grads_batched=True)
                saved = ctx.saved_tensors
                return _Backward.apply(checked, dict(vars(ctx)), ctx.needs_input_grad, len(saved), *saved, *gradients)
        return backward(ctx, *gradients)

    return checked


class RecordedContext:
    """Replaces autograd's `ctx` under no_grad and while a transform is active.

    Args:
        needs_input_grad: whether each input needs a gradient.
        saved_tensors: for a backward.
    """

    def __init__(self, needs_input_grad: Sequence[bool], saved_tensors: Sequence[Tensor | None] = ()) -> None:
        self.needs_input_grad, self.saved_tensors = needs_input_grad, saved_tensors
        self._non_differentiable: tuple[Tensor, ...] = ()
        self._materialize_grads = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._materialize_grads = value

    def record(self, inputs: Sequence[object], result: Tensor | tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Returns the outputs, the saved tensors that are neither inputs nor outputs, and a `_Recording`."""
        outputs = result if isinstance(result, tuple) else (result,)
        recorded = [*inputs, *outputs]
        recorded += [t for t in self.saved_tensors if t is not None and _index(recorded, t) is None]
        recording = _Recording(
            n_outputs=len(outputs),
            returns_tuple=isinstance(result, tuple),
            saved=[_index(recorded, t) for t in self.saved_tensors],
            non_differentiable=[_index(recorded, t) for t in self._non_differentiable],
            materialize_grads=self._materialize_grads,
            attributes={name: value for name, value in vars(self).items() if name not in _CONTEXT_ATTRIBUTES},
        )
        return *recorded[len(inputs) :], recording


_CONTEXT_ATTRIBUTES = frozenset(vars(RecordedContext(())))


def _index(recorded: Sequence[object], tensor: Tensor | None) -> int | None:
    """Returns the index of the tensor itself, not of an equal one; None for None and for a tensor that is missing."""
    return None if tensor is None else next((i for i, other in enumerate(recorded) if other is tensor), None)


@dataclass(frozen=True)
class _Recording:
    """What a forward did with its context.

    Attributes:
        n_outputs: the number of outputs.
        returns_tuple: whether it returned a tuple.
        saved: the index of each saved tensor among inputs, outputs and further saved tensors; None for None.
        non_differentiable: indices of outputs in the same list.
        materialize_grads: whether backward gets zeros for unused outputs.
        attributes: those that it set.
    """

    n_outputs: int
    returns_tuple: bool
    saved: Sequence[int | None]
    non_differentiable: Sequence[int | None]
    materialize_grads: bool
    attributes: dict[str, object]


def _refuse_jvp(ctx: object, *_: object) -> None:
    raise RuntimeError(
        "forward-mode differentiation (torch.func.jvp, jacfwd, hessian) of a fused operation is not supported; use "
        f"reverse mode (torch.func.grad, vjp, jacrev), or {_REMEDY}"
    )


def _one_by_one(function: type[torch.autograd.Function], info: Any, in_dims: Any, *args: Any) -> Any:
    """The vmap rule: calls the function for each sample and stacks the results."""
    columns = [
        arg.unbind(dim) if isinstance(arg, Tensor) and dim is not None else [arg] * info.batch_size
        for arg, dim in zip(args, in_dims, strict=True)
    ]
    results = [function.apply(*sample) for sample in zip(*columns, strict=True)]
    stacked = tuple(torch.stack(c) if isinstance(c[0], Tensor) else c[0] for c in zip(*results, strict=True))
    return stacked, tuple(0 if isinstance(result, Tensor) else None for result in stacked)


class _Forward(torch.autograd.Function):
    """The outputs of a `FusedFunction`, the further tensors that it saves, and a `_Recording`."""

    @staticmethod
    def forward(function: type[FusedFunction], *args: Any) -> tuple[Any, ...]:
        ctx = RecordedContext((True,) * len(args))  # only backward has the true ones
        return ctx.record(args, function.forward(ctx, *args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        (ctx.function, *args), (*tensors, recording) = inputs, output
        ctx.recording = recording
        recorded = [*args, *tensors]
        ctx.mark_non_differentiable(
            *(recorded[i] for i in recording.non_differentiable), *tensors[recording.n_outputs :]
        )
        ctx.set_materialize_grads(recording.materialize_grads)
        ctx.save_for_backward(*(None if i is None else recorded[i] for i in recording.saved))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, recording = ctx.saved_tensors, ctx.recording
        return None, *_Backward.apply(
            ctx.function.backward, recording.attributes, ctx.needs_input_grad[1:], len(saved), *saved,
            *gradients[: recording.n_outputs],
        )  # fmt: skip

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(_Forward, info, in_dims, *args)

    jvp = staticmethod(_refuse_jvp)


class _Backward(torch.autograd.Function):
    """The results of a `FusedFunction.backward`, which may not be differentiated again."""

    @staticmethod
    def forward(
        backward: Callable[..., Any], attributes: dict[str, object], needs_input_grad: Sequence[bool], n_saved: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx = RecordedContext(needs_input_grad, tensors[:n_saved])
        vars(ctx).update(attributes)
        result = backward(ctx, *tensors[n_saved:])
        return result if isinstance(result, tuple) else (result,)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[object, ...], output: tuple[object, ...]) -> None: ...

    @staticmethod
    def backward(ctx: object, *_: object) -> None:
        raise RuntimeError(_TWICE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(_Backward, info, in_dims, *args)

    jvp = staticmethod(_refuse_jvp)
