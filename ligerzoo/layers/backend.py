"""Choosing what computes the operations of a whole model."""

from torch import nn

from ligerzoo.kernels.dispatch import Backend, check_backend


def set_backend(module: nn.Module, backend: Backend) -> None:
    """Gives every layer within `module` this backend: "auto" (Triton where it can), "triton" or "torch".

    It is the layers' own, as if each had been constructed with it: no other module hears of it.

    Raises:
        ValueError: `backend` is unknown, or no layer within the module has one.
    """
    check_backend(backend)
    layers = [layer for layer in module.modules() if hasattr(layer, "backend")]
    if not layers:
        raise ValueError(f"set_backend: {type(module).__name__} holds no layer of ligerzoo that has a backend")
    for layer in layers:
        layer.backend = backend  # type: ignore[assignment]
