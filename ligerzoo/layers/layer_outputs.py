"""What layers store in a forward, in addition to the hidden states that they return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True)
class LayerOutputs:
    """The tensors that layers store in a forward: lists to which they append, or None to store none.

    Attributes:
        router_logits: (B * T, E) of each MoE layer, in order.
        attentions: (B, N, T, S) attention probabilities of each layer, computed in plain torch, not in fused kernels.
        hidden_states: (B, T, H), the input of the first block and the output of each block; the last one after the
            final norm.
    """

    router_logits: list[Tensor] | None = None
    attentions: list[Tensor] | None = None
    hidden_states: list[Tensor] | None = None

    def of_block(self) -> LayerOutputs:
        """Returns the empty lists of what layers within a block store here."""
        return LayerOutputs(
            router_logits=None if self.router_logits is None else [],
            attentions=None if self.attentions is None else [],
        )

    def stored(self) -> dict[str, list[Tensor]]:
        """Returns the lists that are not empty, by name."""
        return {name: tensors for name in LAYER_OUTPUTS if (tensors := getattr(self, name))}


LAYER_OUTPUTS = ("router_logits", "attentions", "hidden_states")
"""The attributes of `LayerOutputs`."""
