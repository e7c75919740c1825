"""Fixtures for Triton's interpreter: they silence NumPy's warnings, and leave out work without an effect on results."""

import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ligerzoo.kernels.dispatch import INTERPRETING


@pytest.fixture(autouse=True)
def _silent_numpy() -> Iterator[None]:
    """Silences NumPy's warnings about infinities and NaN, which a GPU computes silently."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
        yield


@pytest.fixture(autouse=True, scope="session")
def _patched_once() -> Iterator[None]:
    """Patches Triton's language once. The interpreter does so at each launch and at each device function call, which
    takes a third of the time.

    Sums and products of integers are checked for overflows with ten more operations each, whose result only kernels
    compiled for debugging read. Every tensor computes its shape as a Triton tuple with types, and every operation of
    two tensors compares their shapes number by number, their types by name, and derives the type of the result. Every
    number becomes a new tensor, every scalar a block of what it is added to, and every result is checked for its size
    in bytes. And each function of the language is called through two others, which check and replace the argument
    `_semantic`.
    """
    if not INTERPRETING:
        yield
        return
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # or checks for overflows would have an effect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        patch.setattr(core.block_type, "__init__", _init_block_type)
        patch.setattr(core.tensor, "__init__", _init_tensor)
        patch.setattr(core.dtype, "__eq__", _by_name(core.dtype.__eq__))
        patch.setattr(core.block_type, "scalar", property(operator.attrgetter("element_ty")))
        patch.setattr(interpreter.TensorHandle, "__init__", _init_handle)
        patch.setattr(interpreter, "_validate_np_data_size", _fits)
        check_types = TritonSemantic.binary_op_type_checking_impl
        patch.setattr(TritonSemantic, "binary_op_type_checking_impl", _remembered(check_types, _elementwise()))
        patch.setattr(interpreter, "_patch_attr", _patch_attribute)
        patch.setattr(TritonSemantic, "broadcast_impl_value", _unless_equal(TritonSemantic.broadcast_impl_value))
        scopes: list[Any] = []
        patch.setattr(interpreter, "_patch_lang", _once(interpreter._patch_lang, scopes))
        patch.setattr(interpreter, "_get_np_dtype", _cached(interpreter._get_np_dtype))
        for name in vars(interpreter.InterpreterBuilder):
            if name.startswith(("create_icmp", "create_fcmp")):
                patch.setattr(
                    interpreter.InterpreterBuilder, name, _boolean(vars(interpreter.InterpreterBuilder)[name])
                )
        yield
        while scopes:
            scopes.pop().restore()


def _boolean(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the result of a comparison the type of booleans.

    The interpreter gives it the type of what was compared. That of triton 3.9 broadcasts a scalar with this type, and
    then refuses the mask.
    """

    def call(*operands: Any) -> Any:
        from triton.language import core

        result = compare(*operands)
        result.dtype = core.int1
        return result

    return call


_SIZES: dict[int, tuple[int, ...]] = {}
"""The sizes of each shape of a block type, by its id: `_shape_of_type` keeps the shapes."""


@functools.cache
def _shape_of_type(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    """The shape, number of elements and text of the shape of a block type; raises the errors for invalid shapes."""
    from triton.language import core

    values = core.tuple(shape)
    _SIZES[id(values)] = shape
    return values, core.validate_block_shape(values), str(values)


@functools.cache
def _shape_of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
    from triton.language import core

    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


@functools.cache
def _attributes_of_block(shape: tuple[int, ...], element_name: str) -> dict[str, Any]:
    values, numel, text = _shape_of_type(shape)
    name = f"<{text}, {element_name}>"
    return {"shape": values, "numel": numel, "name": name, "shape_of_tensor": _shape_of_tensor(shape)}


def _init_block_type(self: Any, element_type: Any, shape: Any) -> None:
    sizes = _SIZES.get(id(shape)) or tuple([getattr(size, "value", size) for size in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_type
    self.__dict__.update(_attributes_of_block(sizes, element_type.name))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.shape_of_tensor if type.is_block() else _shape_of_tensor(())


def _init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _fits(data: np.ndarray, dtype: Any) -> bool:
    """Whether an element is no larger than the type says; pointers and elements of a byte always fit."""
    return data.itemsize == 1 or dtype.is_ptr() or data.itemsize * 8 <= dtype.primitive_bitwidth  # type: ignore[no-any-return]


class _Patched:
    """The scope that a launch restores at its end: the patches stay."""

    def restore(self) -> None:
        pass


def _once(patch_language: Callable[[Any], Any], scopes: list[Any]) -> Callable[[Any], Any]:
    """Patches each module of the language once, and adds what restores it to `scopes`."""
    patched: set[int] = set()  # modules
    stays = _Patched()

    def patch(function: Any) -> _Patched:
        modules = _language_modules(function)
        if not modules <= patched:
            patched.update(modules)
            scopes.append(patch_language(function))
        return stays

    return patch


def _patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Gives a function of the language the interpreter's `_semantic`, without asking whether it has one."""
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    is_checked = getattr(member, "__code__", None) is _code_of_checks()
    function = member.__wrapped__ if is_checked else member

    def method(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, method if isinstance(owner, type) else functools.partial(function, _semantic=semantic))


@functools.cache
def _code_of_checks() -> Any:
    """The code around every function of the language, which checks that there is a `_semantic`."""
    from triton.language import core

    return core.builtin(lambda: None).__code__


def _unless_equal(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Blocks of one shape share it, see `_shape_of_type`, and are not broadcast."""

    def broadcast_unless_equal(self: Any, left: Any, right: Any) -> Any:
        shape = getattr(left.type, "shape", None)
        if shape is not None and shape is getattr(right.type, "shape", None):
            return left, right
        return broadcast(self, left, right)

    return broadcast_unless_equal


def _elementwise() -> Any:
    """A `TritonSemantic` for the operands of elementwise operations, which NumPy broadcasts.

    Operands have the type of the result, and keep their data.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    class Elementwise(TritonSemantic):  # type: ignore[misc]
        def broadcast_impl_value(self, left: Any, right: Any) -> Any:
            first, second = left.type, right.type
            if first.is_block() and second.is_block():
                if first.shape is second.shape:
                    return left, right
                shape = _common_shape(_SIZES[id(first.shape)], _SIZES[id(second.shape)])
                if shape is None:
                    return super().broadcast_impl_value(left, right)
            elif first.is_block() or second.is_block():
                shape = first.shape if first.is_block() else second.shape
            else:
                return left, right
            return of_shape(left, shape), of_shape(right, shape)

    def of_shape(tensor: Any, shape: Any) -> Any:
        if tensor.type.is_block() and tensor.type.shape is shape:
            return tensor
        return core.tensor(tensor.handle, core.block_type(tensor.type.scalar, shape))

    return Elementwise(interpreter.interpreter_builder)


@functools.cache
def _common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> Any:
    """The shape of the result of two blocks, or None if their ranks differ or they do not match."""
    if len(left) != len(right) or any(1 not in (m, n) and m != n for m, n in zip(left, right, strict=True)):
        return None
    return _shape_of_type(tuple(max(m, n) for m, n in zip(left, right, strict=True)))[0]


def _by_name(equals: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    from triton.language import core

    def equal(self: Any, other: Any) -> bool:
        if self is other:
            return True
        return self.name == other.name if type(other) is core.dtype else equals(self, other)  # type: ignore[no-any-return]

    return equal


def _remembered(check_types: Callable[..., tuple[Any, Any]], elementwise: Any) -> Callable[..., tuple[Any, Any]]:
    """The types to which two tensors are cast depend on theirs alone. A number becomes the same tensor each time."""
    from triton.language import core

    constants: dict[tuple[object, ...], Any] = {}
    casts: dict[tuple[object, ...], tuple[Any, Any]] = {}  # the types, or None for an operand that keeps its own

    def of_number(tensor: Any, number: Any, order: Callable[..., tuple[Any, Any]], *options: Any) -> Any:
        key = (type(number), number, tensor.dtype.name, id(tensor.shape), order, *options)
        if key in constants:
            return order(tensor, constants[key])
        results = check_types(elementwise, *order(tensor, number), *options)
        same, constant = order(*results)
        if same is tensor:
            constant.handle.data.flags.writeable = False
            constants[key] = constant
        return results

    def of_tensors(left: Any, right: Any, *options: Any) -> Any:
        key = (left.dtype.name, right.dtype.name, *options)
        if key not in casts:
            results = check_types(elementwise, left, right, *options)
            pairs = zip((left, right), results, strict=True)
            casts[key] = tuple(None if to.dtype.name == of.dtype.name else to.dtype for of, to in pairs)
            return results
        first, second = casts[key]
        return elementwise.broadcast_impl_value(
            left if first is None else elementwise.cast(left, first),
            right if second is None else elementwise.cast(right, second),
        )

    def check(self: Any, left: Any, right: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
        if not named and isinstance(left, core.tensor):
            if isinstance(right, core.tensor):
                return of_tensors(left, right, *options)  # type: ignore[no-any-return]
            if type(right) in (bool, int, float):
                return of_number(left, right, _in_order, *options)  # type: ignore[no-any-return]
        elif not named and isinstance(right, core.tensor) and type(left) in (bool, int, float):
            return of_number(right, left, _swapped, *options)  # type: ignore[no-any-return]
        return check_types(elementwise, left, right, *options, **named)

    return check


def _in_order(first: Any, second: Any) -> tuple[Any, Any]:
    return first, second


def _swapped(first: Any, second: Any) -> tuple[Any, Any]:
    return second, first


def _cached(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function builds a table of all dtypes in each call, except of a pointer type (which cannot be hashed)."""
    cached = functools.cache(numpy_dtype)
    return lambda dtype: (numpy_dtype if dtype.scalar.is_ptr() else cached)(dtype.scalar)


@functools.cache
def _language_modules(function: Any) -> frozenset[int]:
    import triton.language as tl

    return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
