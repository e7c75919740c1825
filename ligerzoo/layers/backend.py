"""Selects the backend of all layers of a model."""

from torch import nn

from ligerzoo.kernels.dispatch import Backend, check_backend


def set_backend(module: nn.Module, backend: Backend) -> None:
    """Sets the backend of every layer in `module`.

    Has the same effect as passing `backend` to the constructor of each layer. Other modules are unaffected.

    Args:
        module: a layer or model.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        ValueError: `backend` is unknown, or no layer in `module` has a backend.
    """
    check_backend(backend)
    layers = [layer for layer in module.modules() if hasattr(layer, "backend")]
    if not layers:
        raise ValueError(
            f"set_backend: {type(module).__name__} contains no layer with a backend; expected ligerzoo layers"
        )
    for layer in layers:
        layer.backend = backend  # type: ignore[assignment]
