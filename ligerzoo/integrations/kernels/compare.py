"""Compares a module with its replacement on random input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import Tensor, nn

from ligerzoo.integrations.kernels.replace import Replacement

T = TypeVar("T")

ULPS = 16
"""Largest difference of a replacement from the module's own result, in ulps of the largest element."""


@contextmanager
def class_of(module: nn.Module, cls: type[nn.Module]) -> Iterator[None]:
    """Gives `module` the class `cls` within the block."""
    own = module.__class__
    module.__class__ = cls
    try:
        yield
    finally:
        module.__class__ = own


def difference(module: nn.Module, replacement: Replacement, *arguments: object, **named: object) -> str | None:
    """Compares the replacement with the module's forward on random input; returns what differs, None for nothing.

    Compares in training mode, where a module may apply dropout, and in evaluation mode. Runs without gradients and
    hooks, and restores the mode of each module and the state of torch's random number generators.

    Args:
        module: the module.
        replacement: what may replace it. Its `inputs`, if it has them, are the positional arguments.
        arguments: positional arguments of the forward.
        named: keyword arguments of the forward.
    """
    try:
        if replacement.inputs is not None:
            arguments = replacement.inputs(module)
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


def difference_of(actual: object, expected: object, ulps: float = ULPS) -> str | None:
    """Returns how `actual` differs from `expected`, a tensor or a sequence of tensors; None if they are equal."""
    match actual, expected:
        case ([*actuals], [*expecteds]):
            if len(actuals) != len(expecteds):
                return f"{len(actuals)} results instead of {len(expecteds)}"
            found = (difference_of(a, e, ulps) for a, e in zip(actuals, expecteds, strict=True))
            return next(filter(None, found), None)
        case (Tensor(), Tensor()):
            if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
                return f"{tuple(actual.shape)} {actual.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
            scale = expected.abs().max().item()
            error = (actual - expected).abs().max().item()
            if error <= ulps * torch.finfo(expected.dtype).eps * scale:  # False for NaN
                return None
            return f"its results on random input differ from the kernel's by {error / scale if scale else error:.1e}"
    return None if actual is expected or actual == expected else f"{actual!r} instead of {expected!r}"


def first_match(candidates: Iterable[T], agrees: Callable[[T], bool]) -> T | None:
    """Returns the first candidate that agrees; a candidate that does not support the input does not."""
    for candidate in candidates:
        with suppress(RuntimeError, ValueError, TypeError, IndexError):
            if agrees(candidate):
                return candidate
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


def signature(module: nn.Module) -> tuple[object, ...]:
    """Returns what the equality of a module with its replacement depends on, except the values of the parameters."""
    found: list[object] = []
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
