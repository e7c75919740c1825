"""Finds modules by their class, and detects those and weights that a fused kernel may read directly."""

from types import NoneType
from typing import TypeGuard, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

_PLAIN_TENSORS = frozenset({nn.Parameter, Tensor, NoneType})


def find_modules(model: nn.Module, *kinds: type[M]) -> list[M]:
    """Returns the modules of a model that are instances of a class or its subclasses, the model itself included."""
    return [module for module in model.modules() if isinstance(module, kinds)]


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the model and all modules in it, shared ones several times. Faster than `nn.Module.modules`."""
    modules = [model]
    for module in modules:  # which grows
        modules += [child for child in module._modules.values() if child is not None]
    return modules


def is_plain(module: nn.Module, *kinds: type[M]) -> TypeGuard[M]:
    """Whether `module` computes exactly what one of `kinds` does, so that a fused kernel may read its weights directly.

    False if it is modified (see `is_unmodified`), and for parameters of a tensor subclass (such as quantized ones).
    """
    return is_unmodified(module, *kinds) and is_plain_tensor(*module._parameters.values())


def is_unmodified(module: nn.Module, *kinds: type[M]) -> TypeGuard[M]:
    """Whether `module` runs the forward of one of `kinds`, with whatever parameters.

    False for a subclass or wrapper (such as an adapter), a replaced `forward`, and any hook (such as those of
    parallelism or profilers).
    """
    return type(module) in kinds and not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or "forward" in module.__dict__
    )


def is_plain_tensor(*tensors: Tensor | None) -> bool:
    """Whether a fused kernel may read the tensors: False if one has a subclass, such as quantized ones and DTensors."""
    return _PLAIN_TENSORS.issuperset(map(type, tensors))


def dequantized(weight: Tensor) -> Tensor:
    """Returns a quantized weight (a tensor subclass with its own `dequantize`, as torchao's) in floating point.

    Other tensors are returned unchanged.
    """
    if hasattr(weight, "get_original_weight"):  # torchao's NF4, whose `dequantize` is another function
        return weight.get_original_weight()  # type: ignore[no-any-return]
    is_quantized = type(weight).dequantize is not Tensor.dequantize
    return weight.dequantize() if is_quantized else weight
