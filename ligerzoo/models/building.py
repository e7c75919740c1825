"""Builds models on one device and in one dtype, and says which of their tensors are left without values."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ligerzoo.checks import is_text
from ligerzoo.dtensors import is_dtensor
from ligerzoo.errors import LigerzooError
from ligerzoo.models.config import require_config

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that have a NaN, which no initialization draws."""


class ModelMeta(type):
    """Class of model classes: `Llama(config, device=..., dtype=...)` runs the constructor within `building`.

    Args:
        device: device of the weights; "meta" allocates no memory. Defaults to torch's default device.
        dtype: floating dtype of the weights. Defaults to torch's default dtype.
    """

    def __call__(
        cls, *args: Any, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Any
    ) -> Any:
        if args or "config" in options:
            require_config(cls, args[0] if args else options["config"])
        if is_text(dtype):
            where, got, expected = f"dtype of {cls.__name__}", repr(dtype), "a torch.dtype"
            remedy = "Pass one such as torch.bfloat16, or call AutoModel.from_config(config, dtype=...) with a name."
            raise LigerzooError("not a dtype", where=where, got=got, expected=expected, remedy=remedy)
        with building(device, dtype):
            return super().__call__(*args, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's parameters, and `device` and `dtype`, for `help`."""
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
        call = inspect.signature(ModelMeta.__call__).parameters
        names = {parameter.name for parameter in own}
        own += [call[name] for name in ("device", "dtype") if name not in names]
        return inspect.Signature(sorted(own, key=lambda parameter: parameter.kind))


@contextlib.contextmanager
def building(device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Creates tensors on this device and in this floating dtype, unless they say otherwise. None changes nothing.

    On the meta device, skips random initialization.
    """
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        if dtype is not None:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
        if device is not None:
            stack.enter_context(torch.device(device))
        if torch.get_default_device().type == "meta":
            stack.enter_context(_SkipInitialization())
        yield


class _SkipInitialization(TorchFunctionMode):
    """Skips random initialization: drawing into a meta tensor makes torch import its compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_initialization = getattr(func, "__module__", None) == nn.init.__name__
        return kwargs["tensor"] if is_initialization and kwargs["tensor"].is_meta else func(*args, **kwargs)


def forget_values(module: nn.Module) -> None:
    """Fills the parameters and buffers that a module itself owns with NaN."""
    with torch.no_grad():
        for _, tensor in _own_tensors(module):
            tensor.fill_(math.nan)


def require_values(name: str, module: nn.Module) -> None:
    """Raises LigerzooError if a parameter or buffer that `forget_values` has filled was not set since."""
    missing = [own for own, tensor in _own_tensors(module) if tensor.isnan().any()]
    if not missing:
        return
    kind, names = type(module).__name__, ", ".join(missing)
    what = f"init_weights of {kind} has not set {names}, which has no values after to_empty or on meta"
    remedy = f"Override init_weights(self, std) in {kind}: call super().init_weights(std), and set {names}."
    raise LigerzooError(what, where=f"{kind} {name!r}", remedy=remedy)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and values of the tensors of a module; of a DTensor, those of this process."""
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if tensor.dtype in _DTYPES and not tensor.is_meta:
            yield name, tensor.to_local() if is_dtensor(tensor) else tensor
