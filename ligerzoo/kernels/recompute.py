"""Recomputes in backward, instead of keeping, tensors that follow from others which backward keeps anyway.

The output of a norm is saved by the projections that read it, for their weight gradients, although the norm saves its
input already. So layers declare such tensors:

    y = rms_norm(x, weight)
    recomputable((y,), rms_norm, x, weight)

Within `recomputing`, whatever saves `y` or a view of it for backward saves this recipe instead. Reading it in backward
runs the same function on the same inputs, so the gradients have the same bits. An input may be recomputable itself. The
result is kept until its last reader has read it: several readers cost one computation.

A checkpointed block (`Recompute.BLOCK`) uses recipes too, inside of torch's activation checkpointing. Torch recomputes
a block up to the last tensor that backward needs. With gate and up replaced by a recipe, that tensor precedes the MLP,
whose down projection is not run again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ligerzoo.kernels.autograd import under_transform


class Recompute(IntEnum):
    """What backward recomputes of a block. Each level includes the ones before.

    Attributes:
        NOTHING: nothing; backward keeps all that it needs.
        ELEMENTWISE: outputs of norms and short convolutions, rotations of normalized heads, inputs that processes
            gather for layers, and `activation(gate) * up`. Costs no matrix product.
        MLP: gate and up projections too, of dense MLPs and of experts.
        BLOCK: everything; backward keeps the block's input.
    """

    NOTHING = 0
    ELEMENTWISE = 1
    MLP = 2
    BLOCK = 3


T = TypeVar("T", Tensor, tuple[Tensor, ...])

_state = threading.local()


def is_recording() -> bool:
    """Whether a declaration may have an effect. Layers ask first, since a declaration costs a few microseconds."""
    return not torch.compiler.is_compiling() and getattr(_state, "recipes", None) is not None


def recomputable(
    outputs: tuple[Tensor, ...],
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    *inputs: object,
    level: Recompute = Recompute.ELEMENTWISE,
    in_checkpoints: bool = True,
) -> None:
    """Declares that `function(*inputs)` returns `outputs`, bit by bit, in backward as well as now.

    Has no effect outside of `recomputing`, and for a lower level.

    Args:
        outputs: contiguous tensors.
        function: runs without gradients. Reads no other tensors, unless they are among `inputs` as well.
        inputs: its arguments. Tensors are kept until backward, and must not be modified until then.
        level: the lowest level that recomputes the outputs.
        in_checkpoints: whether a checkpointed block recomputes the outputs separately.
    """
    if is_recording():
        recipes: _Recipes = _state.recipes
        if level <= recipes.level and (in_checkpoints or recipes.level < Recompute.BLOCK):
            recipes.add(outputs, function, inputs)


def recomputed(function: Callable[..., T], *inputs: object, level: Recompute | None = Recompute.ELEMENTWISE) -> T:
    """Returns `function(*inputs)`, and declares it `recomputable`.

    Args:
        function: returns a tensor or a tuple of tensors.
        inputs: see `recomputable`.
        level: the lowest level that recomputes the outputs; None for no declaration.
    """
    outputs = function(*inputs)
    if level is not None and is_recording():
        recomputable(outputs if isinstance(outputs, tuple) else (outputs,), function, *inputs, level=level)
    return outputs


def recomputing(level: Recompute) -> AbstractContextManager[None]:
    """Within this context, backward recomputes declared tensors of this level instead of keeping them.

    Args:
        level: for `Recompute.BLOCK`, only declared tensors are recomputed; the caller checkpoints the block.

    Raises:
        RuntimeError: under torch.compile, which decides itself what to recompute, under torch.autocast, or under a
            transform of torch.func; except for `Recompute.BLOCK`, which then recomputes the whole block.
    """
    unsupported = None if level == Recompute.NOTHING else _unsupported()
    if level == Recompute.NOTHING or (unsupported and level == Recompute.BLOCK):
        return nullcontext()
    if unsupported:
        raise RuntimeError(
            f"an activation plan with Recompute.{level.name} is not supported under {unsupported}; use eager mode with "
            "bf16 weights, or model.gradient_checkpointing_enable()"
        )
    return _recording(level)


@contextmanager
def _recording(level: Recompute) -> Iterator[None]:
    outer, recipes = getattr(_state, "recipes", None), _Recipes(level)
    _state.recipes = recipes
    try:
        with torch.autograd.graph.saved_tensors_hooks(recipes.pack, _read):
            yield
    finally:
        _state.recipes = outer


def _unsupported() -> str | None:
    """Returns what is active that recipes do not support; None for nothing."""
    if torch.compiler.is_compiling():
        return "torch.compile"
    if torch._C._is_any_autocast_enabled():
        return "torch.autocast"
    return "a transform of torch.func" if under_transform() else None


class _Recipes:
    """The recipes of a block while it runs.

    Attributes:
        level: which declarations count.
    """

    def __init__(self, level: Recompute) -> None:
        self.level = level
        self._of_storage: dict[int, tuple[weakref.ref[Any], _Recipe, int]] = {}
        self._outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def add(self, outputs: tuple[Tensor, ...], function: Callable[..., Any], inputs: tuple[object, ...]) -> None:
        packed = [self.pack(one) if isinstance(one, Tensor) else one for one in inputs]
        recipe = _Recipe(function, packed)
        for index, output in enumerate(outputs):
            storage = output.untyped_storage()
            if storage.nbytes() == output.numel() * output.element_size() and output.is_contiguous():
                self._of_storage[storage._cdata] = weakref.ref(storage), recipe, index

    def pack(self, tensor: Tensor) -> _Saved | _Derived:
        if type(tensor) is nn.Parameter:
            return _Saved(tensor, tensor._version)
        if type(tensor) is Tensor and self._of_storage:
            storage = tensor.untyped_storage()
            reference, recipe, index = self._of_storage.get(storage._cdata, (None, None, 0))
            # An address may be that of an earlier storage that does not exist any more.
            if reference is not None and recipe is not None and reference() is not None:
                return recipe.derive(index, tensor)
        if self._outer is not None:
            packed, unpack = self._outer[0](tensor), self._outer[1]
            return _Saved(packed, unpack=unpack)
        # Detached: a node that holds its own output would never be freed.
        return _Saved(tensor.detach(), tensor._version)


class _Saved:
    """A tensor that is kept, or what the outer hooks made of it."""

    __slots__ = ("_unpack", "_value", "_version")

    def __init__(self, value: Any, version: int | None = None, unpack: Callable[[Any], Tensor] | None = None) -> None:
        self._value, self._version, self._unpack = value, version, unpack

    def read(self) -> Tensor:
        if self._unpack is not None:
            return self._unpack(self._value)
        tensor: Tensor = self._value
        if tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.dtype} {tuple(tensor.shape)} is at version {tensor._version}; expected version "
                f"{self._version}. Modify weights and activations only after backward."
            )
        return tensor


class _Derived:
    """A view of an output of a recipe."""

    __slots__ = ("_index", "_recipe", "_view")

    def __init__(self, recipe: _Recipe, index: int, view: tuple[Any, ...]) -> None:
        self._recipe, self._index, self._view = recipe, index, view

    def read(self) -> Tensor:
        return self._recipe.compute()[self._index].as_strided(*self._view)


class _Recipe:
    """A function and its inputs. Its outputs exist from their first reader in a backward to the last."""

    def __init__(self, function: Callable[..., Any], inputs: list[object]) -> None:
        self._function, self._inputs = function, inputs
        self._readers = self._remaining = 0
        self._outputs: tuple[Tensor, ...] | None = None

    def derive(self, index: int, tensor: Tensor) -> _Derived:
        self._readers += 1
        self._remaining += 1
        return _Derived(self, index, (tensor.shape, tensor.stride(), tensor.storage_offset()))

    def compute(self) -> tuple[Tensor, ...]:
        outputs = self._outputs
        if outputs is None:
            inputs = [one.read() if isinstance(one, _Saved | _Derived) else one for one in self._inputs]
            with torch.no_grad():
                result = self._function(*inputs)
            outputs = tuple(_owning(one) for one in (result if isinstance(result, tuple) else (result,)))
        self._remaining -= 1
        self._outputs = outputs if self._remaining else None
        if not self._remaining:
            self._remaining = self._readers  # for another backward through the same graph
        return outputs


def _owning(output: Tensor) -> Tensor:
    """Returns a contiguous tensor at the beginning of its storage, as the declared one."""
    is_owning = output.is_contiguous() and output.storage_offset() == 0
    return output if is_owning else output.clone(memory_format=torch.contiguous_format)


def _read(packed: _Saved | _Derived) -> Tensor:
    return packed.read()
