"""Replaces the forward of one module instance by changing its class.

A replaced module has a subclass of its class, of the same name, whose forward comes from a `KernelModule`. Parameters,
buffers, hooks and attributes are those of the instance. Other instances keep their class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, cast

from torch import Tensor, nn

from ligerzoo.dtensors import is_dtensor

Options: TypeAlias = Mapping[str, Any]
"""The constants of a forward, by name."""


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
    kernel_options: ClassVar[Options]

    @classmethod
    def kernel_members(cls, original: type[nn.Module], options: Options) -> dict[str, object]:
        """Returns members of the new class of modules of class `original`, other than the constants."""
        return {}

    def kernel_parts(self) -> list[KernelModule]:
        """Returns modules that this one has replaced since `apply`, for `Report.undo`."""
        return []

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # pickle and copy cannot import the class by name. They call a function that makes it again.
        cls = type(self)
        return _new_module, (cls.kernel_original, cls.kernel_mixin, dict(cls.kernel_options)), self.__dict__


def kernel_class(original: type[nn.Module], mixin: type[KernelModule], options: Options) -> type[KernelModule]:
    """Returns the subclass of `original` that computes with the forward of `mixin`; the same one at each call.

    It has the name of `original`: transformers, accelerate and PEFT look classes up by name.
    """
    key = (original, original.forward, mixin, tuple(options.items()))  # other libraries assign forwards to classes
    if key not in _CLASSES:
        members = {
            **{name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")},
            "kernel_original": original,
            "kernel_mixin": mixin,
            "kernel_options": options,
            **options,
            **mixin.kernel_members(original, options),
        }
        metaclass: Any = type(original)
        _CLASSES[key] = metaclass(original.__name__, (mixin, original), members)
    return _CLASSES[key]


_CLASSES: dict[tuple[object, ...], type[KernelModule]] = {}


def _new_module(original: type[nn.Module], mixin: type[KernelModule], options: Options) -> KernelModule:
    cls = kernel_class(original, mixin, options)
    return cls.__new__(cls)


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
    options: Options = field(default_factory=dict)
    inputs: Callable[[Any], tuple[Tensor, ...]] | None = None

    def class_for(self, module: nn.Module) -> type[KernelModule]:
        """Returns the new class of `module`."""
        return kernel_class(type(module), self.mixin, self.options)

    def replace(self, module: nn.Module) -> KernelModule:
        """Gives `module` the new class, and returns it."""
        module.__class__ = self.class_for(module)
        return cast("KernelModule", module)


Recognized: TypeAlias = Replacement | str | None
"""The replacement of a module, or why it has none; None for modules of another kind."""


def reason_to_keep(module: nn.Module) -> str | None:
    """Returns why no module in the state of `module` may be replaced; None if it may."""
    if isinstance(module, KernelModule):
        return "already replaced"
    if "forward" in vars(module):
        return "another library has replaced the instance's forward"
    for parameter in module.parameters(recurse=False):
        if is_dtensor(parameter):
            return "its parameters are sharded: call apply before sharding the model"
        if not parameter.is_floating_point():
            return f"its parameters are {parameter.dtype}".replace("torch.", "")
    return None
