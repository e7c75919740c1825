"""Which layers a captured CUDA graph may contain: those that read no values on the host."""

from __future__ import annotations

from torch import nn

from ligerzoo.kernels.dispatch import uses_triton
from ligerzoo.layers.moe import Experts
from ligerzoo.layers.plain import is_unmodified

_PACKAGES = ("ligerzoo.", "torch.")


def capture_obstacle(module: nn.Module) -> str | None:
    """Returns why a layer of ligerzoo or torch cannot be captured, as a clause for a message; None if it can."""
    if not is_unmodified(module, type(module)):
        return "has hooks or a replaced forward"
    if isinstance(module, Experts) and not uses_triton(module.gate_up_proj, backend=module.backend):
        return "groups tokens by expert on the host, without Triton"
    return None


def never_reads_values(module: nn.Module) -> bool:
    """Whether the layer is of a package whose forwards never depend on values."""
    return type(module).__module__.startswith(_PACKAGES)
