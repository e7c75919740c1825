"""Detects modules that a fused kernel may replace."""

from torch import nn


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether `module` computes exactly what one of `kinds` does, so that a fused kernel may read its weights directly.

    False for a subclass or wrapper (such as an adapter), a replaced `forward`, and any hook (such as those of
    parallelism or profilers).
    """
    return type(module) in kinds and not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or "forward" in vars(module)
    )
