"""Adds low-rank updates to layers of any class that can have them, and switches them off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ligerzoo.layers.embedding import Embedding, ScaledEmbedding
from ligerzoo.layers.head import LMHead
from ligerzoo.layers.linear import Linear
from ligerzoo.layers.lora import (
    LoRAEmbedding,
    LoRAExperts,
    LoRAHead,
    LoRALayer,
    LoRALinear,
    LoRAOptions,
    LoRARouter,
    LoRAScaledEmbedding,
)
from ligerzoo.layers.moe import Experts
from ligerzoo.layers.plain import find_modules
from ligerzoo.layers.routers import Router

_CLASSES: dict[type[nn.Module], type[LoRALayer]] = {
    nn.Linear: LoRALinear,
    Linear: LoRALinear,
    Router: LoRARouter,
    LMHead: LoRAHead,
    nn.Embedding: LoRAEmbedding,
    Embedding: LoRAEmbedding,
    ScaledEmbedding: LoRAScaledEmbedding,
    Experts: LoRAExperts,
}


def adaptable_parameters(layer: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters that `adapt` can update: none for other classes and their subclasses."""
    if type(layer) is Experts:
        return layer.projections
    return ("weight",) if type(layer) in _CLASSES else ()


def adapt(
    layer: nn.Module,
    options: LoRAOptions,
    parameters: Sequence[str] = ("weight",),
    *,
    dora: bool = False,
    dtype: torch.dtype = torch.float32,
) -> LoRALayer:
    """Adds low-rank updates to a layer in place, and freezes its other parameters.

    Args:
        layer: a linear layer, router, language-model head, embedding or experts; see `adaptable_parameters`.
        options: rank, alpha, scaling and dropout.
        parameters: names of the parameters to update; of experts, any of `Experts.projections`.
        dora: decompose the updated weight into magnitudes and directions (DoRA).
        dtype: dtype of the updates.

    Returns:
        The same layer, with another class.

    Raises:
        ValueError: the layer's class or a parameter cannot be updated, or experts have dropout or DoRA.
    """
    if unknown := set(parameters) - set(adaptable_parameters(layer)):
        expected = ", ".join(adaptable_parameters(layer)) or f"one of {', '.join(c.__name__ for c in _CLASSES)}"
        raise ValueError(
            f"LoRA: {type(layer).__name__} has no update of {', '.join(sorted(unknown))}; expected {expected}"
        )
    adapted: Any = layer
    plain = layer.__class__
    adapted.__class__ = _CLASSES[plain]
    adapted.lora, adapted.lora_enabled = {}, True
    try:
        for parameter in parameters:
            adapted.add_update(parameter, options, dora=dora, dtype=dtype)
    except ValueError:
        adapted.remove_updates()
        raise
    for name, weight in layer.named_parameters(recurse=False):
        weight.requires_grad_("lora_" in name)
    return adapted  # type: ignore[no-any-return]


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Computes without the low-rank updates within the context: the base model, such as the reference of DPO."""
    layers = find_modules(model, LoRALayer)
    before = [layer.lora_enabled for layer in layers]
    try:
        for layer in layers:
            layer.lora_enabled = False
        yield
    finally:
        for layer, enabled in zip(layers, before, strict=True):
            layer.lora_enabled = enabled
