"""Tiny checkpoints that change a few entries of a base config.json, and MoE weights for them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import Tensors, Tiny


def variant(
    base: Mapping[str, Any],
    name: str,
    changes: Mapping[str, Any] | None = None,
    absent: tuple[str, ...] = (),
    **options: Any,
) -> Tiny:
    """A checkpoint whose config.json is `base` with `changes` applied and `absent` removed."""
    config = {key: value for key, value in {**base, **(changes or {})}.items() if key not in absent}
    return Tiny(f"{base['model_type']} {name}", config, **options)


ROUTERS = ".gate.weight", ".router.proj.weight"
"""Ends of the names of the matrices of routers."""


def with_steady_mixtures(tensors: Tensors) -> Tensors:
    """Changes MoE weights so that routing and logits are stable under bf16 rounding.

    With random weights, bf16 rounding sends about 1 % of the tokens to another expert, and expert outputs are so large
    that the order in which k of them are rounded and added shows in the logits.

    Here the first features of the residual stream hold the bits of the token id, as +2 and -2; no layer adds to these
    features. Routers read them and give the experts well-separated logits, in another order for each value of the bits.
    Expert outputs are scaled down.
    """
    experts = max((len(tensor) for name, tensor in tensors.items() if name.endswith(ROUTERS)), default=1)
    bits = (experts - 1).bit_length()

    def signs(numbers: int) -> Tensor:
        return 2.0 * (torch.arange(numbers)[:, None] >> torch.arange(bits) & 1) - 1

    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", ".embeddings.weight")):
            tensor[:, :bits] = 2 * signs(len(tensor))
        elif name.endswith("layernorm.weight") or re.search(r"layers\.\d+\.norm\.weight$", name):
            tensor[:bits] = 1
        elif name.endswith(
            (
                ".o_proj.weight",
                ".down_proj.weight",
                ".experts.down_proj",
                "per_layer_projection.weight",
                ".mixer.out_proj.weight",
                "fc2_latent_proj.weight",
                ".mamba.out_proj.weight",
                ".output_linear.weight",
            )
        ):
            tensor[..., :bits, :] = 0
        elif name.endswith(".router.scale"):
            tensor[:bits] = tensor.shape[0] ** 0.5
        elif name.endswith(ROUTERS):
            tensor[:, bits:] *= 0.05
            tensor[:, :bits] = 0.4 * 2.0 ** torch.arange(bits) * signs(len(tensor))
        elif name.endswith(".linear_fc2.weight") and "merger" in name:
            tensor[:bits] = 0
        elif name.endswith(".linear_fc2.bias") and "merger" in name:
            tensor[:bits] = 2 if ".merger." in name else 0
        if name.endswith(".experts.down_proj"):
            tensor *= 0.25
    return tensors


def on_the_hub(mixture: str, gate: str, up: str, down: str) -> Callable[[Tensors], Tensors]:
    """Returns a function that splits stable MoE weights into one tensor per expert and projection.

    Args:
        mixture: name of the MoE layer in the checkpoint, in place of `mlp`.
        gate: name of the gate projection.
        up: name of the up projection.
        down: name of the down projection.
    """

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
