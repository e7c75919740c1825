"""Tiny checkpoints that differ from one config.json by a few entries, and mixtures of experts in them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import EMBEDDING, Tensors, Tiny


def variant(
    base: Mapping[str, Any],
    name: str,
    changes: Mapping[str, Any] | None = None,
    absent: tuple[str, ...] = (),
    **options: Any,
) -> Tiny:
    """A checkpoint whose config.json is `base`, but for some entries."""
    config = {key: value for key, value in {**base, **(changes or {})}.items() if key not in absent}
    return Tiny(f"{base['model_type']} {name}", config, **options)


def with_steady_mixtures(tensors: Tensors) -> Tensors:
    """Mixtures of experts that bear rounding: random ones send one token in a hundred to another expert in bf16, and
    add to the residual stream so much that the order in which k outputs are rounded and added shows in the logits.

    Here the stream's first features are the bits of a token's id, +2 and -2, for no layer adds to them. Routers read
    them, and give the experts logits in steps, in another order for each value of the bits. Experts say less.
    """
    experts = max((len(tensor) for name, tensor in tensors.items() if name.endswith(".gate.weight")), default=1)
    bits = (experts - 1).bit_length()

    def signs(numbers: int) -> Tensor:
        return 2.0 * (torch.arange(numbers)[:, None] >> torch.arange(bits) & 1) - 1

    for name, tensor in tensors.items():
        if name == EMBEDDING:
            tensor[:, :bits] = 2 * signs(len(tensor))
        elif name.endswith("layernorm.weight"):
            tensor[:bits] = 1
        elif name.endswith((".o_proj.weight", ".down_proj.weight", ".experts.down_proj")):
            tensor[..., :bits, :] = 0
        elif name.endswith(".gate.weight"):
            tensor[:, bits:] *= 0.05
            tensor[:, :bits] = 0.4 * 2.0 ** torch.arange(bits) * signs(len(tensor))
        if name.endswith(".experts.down_proj"):
            tensor *= 0.25
    return tensors


def on_the_hub(mixture: str, gate: str, up: str, down: str) -> Callable[[Tensors], Tensors]:
    """Steady mixtures, the matrices of each expert under names of their own, and `mixture` for what is `mlp` in such a
    layer."""

    def split(tensors: Tensors) -> Tensors:
        apart: Tensors = {}
        for name, tensor in with_steady_mixtures(tensors).items():
            layer, _, rest = name.rpartition(".mlp.")
            if rest not in ("experts.gate_up_proj", "experts.down_proj"):
                apart[f"{layer}.{mixture}.{rest}" if rest == "gate.weight" else name] = tensor
                continue
            for expert, matrix in enumerate(tensor):
                parts = (gate, up) if rest == "experts.gate_up_proj" else (down,)
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    apart[f"{layer}.{mixture}.experts.{expert}.{part}.weight"] = rows.clone()
        return apart

    return split
