"""Self-attention with an output gate (Qiu et al. 2025, "Gated Attention for Large Language Models")."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ligerzoo.layers.attention import Attention
from ligerzoo.layers.cache import LayerCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.linear import Linear
from ligerzoo.layers.projection import check_features


class GatedAttention(Attention):
    """Self-attention whose output is gated by each token: `o_proj(attention(x) * sigmoid(gate(x)))`.

    Takes the arguments of `Attention`.

    Attributes:
        q_proj: (2 * N * D, H), for each head the D rows of its queries, then those of its gate.
    """

    def __init__(self, hidden_size: int, num_heads: int, *arguments: Any, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, *arguments, **options)
        q = self.q_proj
        self.q_proj = Linear(
            hidden_size, 2 * q.out_features, bias=q.bias is not None, device=q.weight.device, dtype=q.weight.dtype
        )

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H); see `Attention.forward`."""
        check_features(self, x, self.hidden_size)
        features, k, v = self.project(x)
        q, gate = features.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)  # type: ignore[no-untyped-call]
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (k, v))  # type: ignore[no-untyped-call]
        out = self.mix(q, k, v, context, cache)
        return self.o_proj((out * gate.sigmoid()).flatten(-2))  # type: ignore[no-any-return]
