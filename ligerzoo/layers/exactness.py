"""Exact caches: results of tokens that do not depend, to the bit, on how the text was divided into calls.

A forward of a whole text on a Hopper GPU in bf16 gives a token the same bits whatever follows it, and whatever else is
in the batch: products sum over the features in one order (`kernels.row_sums`), and so does cuDNN's causal attention
over the keys. With an exact cache, each token gets these bits too: products do not split their sums, and attention to
cached keys runs in a kernel with cuDNN's order of operations (`kernels.exact_attention`). The log-probabilities of
sampled tokens are then exactly those that training computes.

So do mixtures of experts: a token's experts and weights depend on its logits alone (`kernels.route`), the products of
an expert sum over the features in one order, whatever its other rows, and a token's experts are added up from the best
to the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from ligerzoo.layers.invariance import HeadShape, expert_obstacles, machine_obstacles
from ligerzoo.layers.plain import is_plain_tensor

_HOPPER = 9  # major number of the compute capability

Obstacle = tuple[str, str, str]
"""What prevents exact results: the name of an attribute, "" for the layer itself; what is expected; what it is."""


def never_exact(layer: nn.Module, expected: str = "plain self-attention") -> Obstacle:
    """The obstacle of a layer that never gives exact results."""
    return "", expected, f"is a {type(layer).__name__}"


def check_exact(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Raises ValueError, with the reason, if results with an exact cache would differ from those of a whole forward.

    Args:
        module: a decoder, or a part of one.
        dtype: of the cache; None for that of the keys.
    """
    if (obstacle := exact_obstacle(module, dtype)) is not None:
        raise ValueError(f"exact cache: {obstacle}. Use exact=False")


def exact_obstacle(module: nn.Module, dtype: torch.dtype | None = None) -> str | None:
    """Returns the first obstacle, with what is expected, as a clause for a message; None without one.

    It is one of the `obstacles`, or one that a check of the GPU finds.
    """
    for name, expected, got in chain(obstacles(module, dtype), _machine_obstacles(module)):
        return f"{name} {got}; expected {expected}"
    return None


def _machine_obstacles(module: nn.Module) -> Iterator[Obstacle]:
    """Yields what a check of the GPU finds. It runs once per process and kind of attention, update and mixture."""
    device = next(module.parameters()).device
    if device.type != "cuda" or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return
    versions = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    parts = list(module.modules())
    heads = frozenset(_checked_heads(part) for part in parts if hasattr(part, "attention_call"))
    updates = (one for part in parts for one in getattr(part, "lora", {}).values())
    ranks = frozenset((one.rank, float(one.scale)) for one in updates)
    of_experts = expert_obstacles(mixtures(module), device)
    for found in machine_obstacles(device, heads, ranks) + of_experts:
        expected = "bits that do not depend on what shares a call, see `ligerzoo doctor`"
        yield str(device), expected, f"with {versions} gives other bits: {found}"


def mixtures(module: nn.Module) -> list[nn.Module]:
    """Returns the `MoE` layers of a model."""
    return [part for part in module.modules() if hasattr(part, "experts")]


def _checked_heads(attention: nn.Module) -> HeadShape:
    """A few heads of the same kind, with a window that is shorter than the texts of the check."""
    window = None if attention.window is None else 96
    return HeadShape(8, 2, attention.head_dim, window=window, has_sinks=hasattr(attention, "sinks"))  # type: ignore[arg-type]


def obstacles(module: nn.Module, dtype: torch.dtype | None = None) -> Iterator[Obstacle]:
    """Yields obstacles to exact results: name, expected, got. Layers yield theirs in a method `exact_obstacles()`."""
    if dtype is not None:
        yield "the cache's dtype", "that of the keys", f"is {dtype}"
    updates = {parameter for part in module.modules() for parameter in _updates(part)}
    for name, weight in module.named_parameters():
        if not weight.is_cuda or torch.cuda.get_device_capability(weight.device)[0] != _HOPPER:
            yield f"{name}", "a Hopper GPU (compute capability 9.0)", f"is on {weight.device}"
        is_rounded = weight.dtype == torch.bfloat16 or weight in updates
        if not (is_rounded and is_plain_tensor(weight)):
            yield f"{name}", "a plain tensor of torch.bfloat16", f"is a {type(weight).__name__} of {weight.dtype}"
    for name, part in module.named_modules():
        if hasattr(part, "exact_obstacles"):
            for attribute, expected, got in part.exact_obstacles():
                yield f"{name}.{attribute}".rstrip("."), expected, got


def _updates(layer: nn.Module) -> Iterable[Tensor]:
    """The parameters of low-rank updates, which are rounded to the dtype of the weights before they are multiplied."""
    return layer.update_parameters().values() if hasattr(layer, "update_parameters") else ()  # type: ignore[operator]
