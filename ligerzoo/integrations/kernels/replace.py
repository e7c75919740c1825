"""Replaces the forward of one module instance by changing its class, and checks the replacement on random input.

A replaced module has a subclass of its class, of the same name, whose forward comes from a `KernelModule`. Parameters,
buffers, hooks and attributes are those of the instance. Other instances keep their class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ULPS = 16
"""Largest difference of a replacement from the module's own result, in ulps of the largest element."""


class KernelModule(nn.Module):
    """Base class of the forwards that use ligerzoo's kernels.

    Attributes:
        kernel_kind: the kind of kernel, one of `promised.KINDS`, or "attention".
        kernel_original: the class that the module had.
        kernel_mixin: the class of the forward.
        kernel_options: the constants of the forward, by name. Each is an attribute of the class as well.
    """

    kernel_kind: ClassVar[str]
    kernel_original: ClassVar[type[nn.Module]]
    kernel_mixin: ClassVar[type[KernelModule]]
    kernel_options: ClassVar[tuple[tuple[str, Any], ...]]

    @classmethod
    def kernel_members(cls, original: type[nn.Module], **options: Any) -> dict[str, Any]:
        """Returns members of the new class of modules of class `original`, other than the constants."""
        return {}

    def kernel_parts(self) -> list[KernelModule]:
        """Returns modules that this one has replaced since `apply`, for `Report.undo`."""
        return []

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle and copy cannot import the class by name. They call a function that makes it again.
        cls = type(self)
        return _new_module, (cls.kernel_original, cls.kernel_mixin, cls.kernel_options), self.__dict__


def kernel_class(original: Any, mixin: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    """Returns the subclass of `original` that computes with the forward of `mixin`; the same one at each call.

    It has the name of `original`: transformers, accelerate and PEFT look classes up by name.
    """
    key = (original, original.forward, mixin, options)  # other libraries assign forwards to classes
    if key not in _CLASSES:
        _CLASSES[key] = _new_class(original, mixin, options)
    return _CLASSES[key]


_CLASSES: dict[tuple[Any, ...], Any] = {}


def _new_class(original: Any, mixin: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "kernel_original": original,
        "kernel_mixin": mixin,
        "kernel_options": options,
        **dict(options),
        **mixin.kernel_members(original, **dict(options)),
    }
    return type(original)(original.__name__, (mixin, original), members)


def _new_module(
    original: type[nn.Module], mixin: type[KernelModule], options: tuple[tuple[str, Any], ...]
) -> KernelModule:
    cls = kernel_class(original, mixin, options)
    return cls.__new__(cls)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Replacement:
    """What replaces a module.

    Args:
        mixin: the new forward.
        kernel: the name of the kernel, for the report.
        options: the constants of the forward.
        inputs: returns random positional arguments of the module's forward; None if the recognition of the module has
            compared results already.
    """

    mixin: type[KernelModule]
    kernel: str
    options: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Any], tuple[Any, ...]] | None = None

    def class_for(self, module: nn.Module) -> type[KernelModule]:
        """Returns the new class of `module`."""
        return kernel_class(type(module), self.mixin, tuple(self.options.items()))  # type: ignore[no-any-return]


def reason_to_keep(module: nn.Module) -> str | None:
    """Returns why no module in the state of `module` may be replaced; None if it may."""
    if isinstance(module, KernelModule):
        return "already replaced"
    if "forward" in vars(module):
        return "another library has replaced the instance's forward"
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor):
            return "its parameters are sharded: call apply before sharding the model"
        if not parameter.is_floating_point():
            return f"its parameters are {parameter.dtype}".replace("torch.", "")
    return None


@contextmanager
def class_of(module: nn.Module, cls: type[nn.Module]) -> Iterator[None]:
    """Gives `module` the class `cls` within the block."""
    own = module.__class__
    module.__class__ = cls
    try:
        yield
    finally:
        module.__class__ = own


def difference(module: nn.Module, replacement: Replacement) -> str | None:
    """Compares the replacement with the module's forward on random input; returns what differs, None for nothing."""
    if replacement.inputs is None:
        return None
    try:
        inputs = replacement.inputs(module)
    except Exception as error:  # the first layers of any module
        return f"its forward fails on random input: {error}"
    return difference_for(module, replacement, *inputs)


def difference_for(module: nn.Module, replacement: Replacement, *arguments: Any, **named: Any) -> str | None:
    """Compares the replacement with the module's forward; returns what differs, None if nothing does.

    Compares in training mode, where a module may apply dropout, and in evaluation mode. Runs without gradients and
    hooks, and restores the mode of each module and the state of torch's random number generators.

    Args:
        module: the module.
        replacement: what may replace it.
        arguments: positional arguments of the forward.
        named: keyword arguments of the forward.
    """
    try:
        with no_effects(module):
            for training in (True, False):
                with training_mode(module, training):
                    torch.manual_seed(0)  # the same dropout in both
                    expected = type(module).forward(module, *arguments, **named)
                    torch.manual_seed(0)
                    with class_of(module, replacement.class_for(module)):
                        actual = type(module).forward(module, *arguments, **named)
                found = difference_of(actual, expected)
                if found is not None:
                    return found
    except Exception as error:  # the forward of any module
        return f"its forward fails on random input: {error}"
    return None


@contextmanager
def no_effects(module: nn.Module) -> Iterator[None]:
    """Runs the block without gradients, and restores the state of torch's random number generators."""
    devices = list({p.device for p in module.parameters() if p.device.type == "cuda"})
    with torch.no_grad(), torch.random.fork_rng(devices):
        yield


@contextmanager
def training_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Sets training or evaluation mode within the block, and then the mode that each submodule had."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def difference_of(actual: Any, expected: Any, ulps: float = ULPS) -> str | None:
    """Returns how `actual` differs from `expected`, a tensor or a sequence of tensors; None if they are equal."""
    if isinstance(expected, tuple | list):
        if len(actual) != len(expected):
            return f"{len(actual)} results instead of {len(expected)}"
        found = (difference_of(a, e, ulps) for a, e in zip(actual, expected, strict=True))
        return next(filter(None, found), None)
    if not isinstance(expected, Tensor):
        return None if actual is expected or actual == expected else f"{actual!r} instead of {expected!r}"
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{tuple(actual.shape)} {actual.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    scale = expected.abs().max().item()
    error = (actual - expected).abs().max().item()
    if error <= ulps * torch.finfo(expected.dtype).eps * scale:  # False for NaN
        return None
    return f"its results on random input differ from the kernel's by {error / scale if scale else error:.1e}"


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Returns what the equality of a module with its replacement depends on, except the values of the parameters."""
    found: list[Any] = []
    for name, part in module.named_modules():
        constants = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, bool | int | float | str | None) and key not in ("layer_idx", "training")
        }
        found.append((name, type(part), tuple(sorted(constants.items()))))
    found += [(name, p.shape, p.dtype, p.device) for name, p in module.named_parameters()]
    return tuple(found)


def random_like(parameter: Tensor, *shape: int) -> Tensor:
    """Returns standard normal samples in the dtype and on the device of `parameter`, the same at each call."""
    generator = torch.Generator(parameter.device).manual_seed(0)
    return torch.randn(*shape, generator=generator, device=parameter.device).to(parameter.dtype)
