"""`@register` makes a PyTorch op of a typed Python function. The op's schema follows from the function's signature.

Ops are registered with `torch.library.Library` and differentiated by a `torch.autograd.Function` around them: the
cheapest registration (24 us for a forward and backward, against 39 to 44 us for `custom_op` and `triton_op`) that still
passes opcheck, full-graph compilation with training, and export. Plain tensors bypass the dispatcher altogether.

    class Scaling(NamedTuple):
        factor: float
        offset: Tensor | None

    @register("scale", fake=lambda x: x.new_empty(x.shape))     # scale(Tensor x, float scaling_factor,
    def _scale(x: Tensor, scaling: Scaling) -> Tensor: ...      #       Tensor? scaling_offset) -> Tensor

A parameter may be a NamedTuple. The op then takes its fields one by one, named `<parameter>_<field>`; the function and
its callers use the tuple. Results are a tensor, a tuple of tensors or a NamedTuple of tensors.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, TypeVarTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Ts = TypeVarTuple("Ts")
R = TypeVar("R")

_library = torch.library.Library("ligerzoo", "DEF")
_DEVICES = ("CPU", "CUDA", "MPS", "XPU")
_SCHEMA_TYPES = {Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, bool, int, float, str, NoneType, torch.dtype})


def needs_dispatch(*args: object) -> bool:
    """Whether a call with these arguments must go through PyTorch's dispatcher.

    True under a compiler or a dispatch mode, and for tensor subclasses: they observe or replace operations.
    """
    return _is_observed() or not _PLAIN_TYPES.issuperset(map(type, args))


def _is_observed() -> bool:
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


OPS: dict[str, Op[*tuple[Any, ...], Any]] = {}
"""All registered ops by name."""


def register(
    name: str,
    *,
    fake: Callable[..., Any],
    flops: Callable[..., int] | None = None,
    peak: Callable[..., int] | None = None,
    moved: Callable[..., int] | None = None,
) -> Callable[[Callable[[*Ts], R]], Op[*Ts, R]]:
    """Registers the decorated function as the op `ligerzoo::<name>`, for tensors on every device but meta.

    Args:
        name: the op's name.
        fake: allocates the results, contiguous, from shapes and dtypes alone. Its parameters are a subset of the
            function's, matched by name.
        flops: counts the operations of the matrix products, for `torch.utils.flop_counter.FlopCounterMode`. Its
            parameters are a subset of the function's too. None for a function without products.
        peak: counts the bytes that the function allocates and holds at its peak on a GPU, results included, likewise.
            None if these are its results.
        moved: counts the bytes of other tensors than arguments and results that the function reads and writes, each
            time, likewise. None for a single kernel.
    """
    return lambda function: Op(name, function, fake, flops, peak, moved)


class Op(Generic[*Ts, R]):
    """A registered op. Call it by position, where autograd does not record: within an `autograd.Function`.

    A call with plain tensors runs the function itself, any other call runs the op (see `needs_dispatch`). The function
    must be functional: it writes only to memory that it allocates. Its first argument is a tensor, or a NamedTuple
    whose first field is one; the function runs with that tensor's device as the current one.

    Attributes:
        overload: the op as the dispatcher knows it, for tests and sharding rules.
        flops: counts the operations of a call with these flat arguments; None for a function without products.
        peak: counts the bytes of a call with these flat arguments, see `register`; None if these are its results.
        moved: counts the bytes of other tensors that a call reads and writes, see `register`; None for none.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[*Ts], R],
        fake: Callable[..., Any],
        flops: Callable[..., int] | None = None,
        peak: Callable[..., int] | None = None,
        moved: Callable[..., int] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        hints = get_type_hints(function)
        self._names = list(inspect.signature(function).parameters)
        # Position and type of each NamedTuple; the last first, so that flattening one leaves the others' positions.
        self._structs = [(i, hints[n]) for i, n in enumerate(self._names) if _is_struct(hints[n])][::-1]
        # A call with a NamedTuple of numbers need not look at its fields.
        numbers = {struct for _, struct in self._structs if not _has_tensors(struct)}
        self._plain_types = _PLAIN_TYPES | numbers
        self._has_tensors = len(numbers) < len({struct for _, struct in self._structs})
        results = hints["return"]
        self._make_result: Callable[[Any], R] | None = results._make if _is_struct(results) else None
        schema = ", ".join(p for n in self._names for p in _parameter_schema(n, hints[n]))
        _library.define(f"{name}({schema}) -> {_result_schema(results)}")
        for device in _DEVICES:
            _library.impl(name, lambda *flat: self._run(flat[0], self._nest(flat)), device)

        torch.library.register_fake(f"{_library.ns}::{name}", self._of_flat(fake, f"{name}: the fake"), lib=_library)
        self.overload = getattr(getattr(torch.ops, _library.ns), name).default
        self.flops = None if flops is None else self._of_flat(flops, f"{name}: flops")
        self.peak = None if peak is None else self._of_flat(peak, f"{name}: peak")
        self.moved = None if moved is None else self._of_flat(moved, f"{name}: moved")
        if self.flops is not None:
            _count_flops(self.overload, self.flops)
        OPS[name] = self

    def __call__(self, *args: *Ts) -> R:
        checked: Sequence[Any] = self._flatten(args) if self._has_tensors else args
        first: Tensor = checked[0]
        if _is_observed() or not self._plain_types.issuperset(map(type, checked)) or first.is_meta:
            result = self.overload(*self._flatten(args))
            return result if self._make_result is None else self._make_result(result)
        return self._run(first, args)

    def flat_arguments(self, **arguments: object) -> tuple[object, ...]:
        """The positional arguments of `overload` for these arguments of the function."""
        return tuple(self._flatten(inspect.signature(self._function).bind(**arguments).args))

    def _of_flat(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Returns the function of some of the op's parameters, by name, as a function of all flat arguments."""
        names = list(inspect.signature(function).parameters)
        if unknown := [n for n in names if n not in self._names]:
            raise TypeError(f"{what} has parameter {unknown[0]}; expected some of {', '.join(self._names)}")

        def of_flat(*flat: object) -> Any:
            arguments = dict(zip(self._names, self._nest(flat), strict=True))
            return function(**{n: arguments[n] for n in names})

        return of_flat

    def _run(self, first: Tensor, args: Sequence[Any]) -> R:
        # Triton launches on the current device. A context manager per call would cost more than the launch.
        if first.is_cuda and first.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(first.device):
                return self._function(*args)
        return self._function(*args)

    def _flatten(self, args: Sequence[Any]) -> Sequence[Any]:
        for i, _ in self._structs:
            args = (*args[:i], *args[i], *args[i + 1 :])
        return args

    def _nest(self, flat: Sequence[Any]) -> Sequence[Any]:
        for i, struct in reversed(self._structs):
            end = i + len(struct._fields)
            flat = (*flat[:i], struct(*flat[i:end]), *flat[end:])
        return flat


def _count_flops(overload: Any, flops: Callable[..., int]) -> None:
    """Makes `FlopCounterMode` count the op.

    Registering a formula imports torch's flop counter, and with it triton. So this waits until a counter meets the op:
    it then asks for a decomposition. The counter copied the registered formulas when it was created, so it gets ours.
    """

    def formula(*flat: object, out_val: object) -> int:
        return flops(*flat)

    def decompose(*args: object, **kwargs: object) -> object:
        flop_counter: Any = sys.modules.get("torch.utils.flop_counter")
        if flop_counter is not None:
            modes = _get_current_dispatch_mode_stack()
            counters = [mode.counter for mode in modes if isinstance(mode, flop_counter._FlopCounterMode)]
            for registry in (flop_counter.flop_registry, *(counter.flop_registry for counter in counters)):
                registry.setdefault(overload.overloadpacket, formula)
        return NotImplemented

    overload.decompose = decompose


def _is_struct(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _has_tensors(struct: type) -> bool:
    return any(_schema_type(name, hint).startswith("Tensor") for name, hint in get_type_hints(struct).items())


def _parameter_schema(name: str, hint: object) -> Iterator[str]:
    if _is_struct(hint):
        for field, field_hint in get_type_hints(hint).items():
            yield f"{_schema_type(f'{name}_{field}', field_hint)} {name}_{field}"
    else:
        yield f"{_schema_type(name, hint)} {name}"


def _schema_type(name: str, hint: object) -> str:
    if get_origin(hint) is Literal:
        return "str"
    if get_origin(hint) in (Union, UnionType):
        (type_,) = (t for t in get_args(hint) if t is not NoneType)
        return f"{_schema_type(name, type_)}?"
    if hint not in _SCHEMA_TYPES:
        expected = ", ".join(t.__name__ if isinstance(t, type) else str(t) for t in _SCHEMA_TYPES)
        raise TypeError(
            f"parameter {name} has type {hint}; expected one of {expected}, Literal, NamedTuple, or ... | None"
        )
    return _SCHEMA_TYPES[hint]


def _result_schema(hint: Any) -> str:
    if hint is Tensor:
        return "Tensor"
    n_results = len(hint._fields) if _is_struct(hint) else len(get_args(hint))
    return f"({', '.join(['Tensor'] * n_results)})"
