"""Whether a module may be replaced by its mathematics."""

from torch import nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling the module is no more than what `kind` computes: no adapter in its place, no parallelism or probe
    hooked on."""
    return type(module) is kind and not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or "forward" in vars(module)
    )
