"""Attention that shares keys and values (Gemma 4): keys as values, and the keys and values of an earlier layer.

Shapes: B batch, T tokens in the call, N query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ligerzoo.layers.attention import Attention
from ligerzoo.layers.cache import KeysAndValues, LayerCache
from ligerzoo.layers.context import Context


class SharingAttention(Attention):
    """Self-attention with normalized values, whose keys and values later layers may share (Gemma 4).

    Args:
        arguments: positional arguments of `Attention`.
        v_norm: applied to the values (B, T, K, D); None for no norm.
        shared_as: name by which `SharedKeysAttention` finds the keys and values in the same forward; None for no
            sharing.
        options: keyword arguments of `Attention`.
    """

    def __init__(
        self, *arguments: Any, v_norm: nn.Module | None = None, shared_as: str | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.v_norm, self.shared_as = v_norm, shared_as

    def mix(self, q: Tensor, k: Tensor, v: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        """See `Attention.mix`."""
        return super().mix(q, k, v if self.v_norm is None else self.v_norm(v), context, cache)

    def attend_to(self, q: Tensor, keys: KeysAndValues, context: Context) -> Tensor:
        """See `Attention.attend_to`."""
        if self.shared_as is not None:
            context.shared_keys[self.shared_as] = keys
        return super().attend_to(q, keys, context)


class TiedValueAttention(SharingAttention):
    """`SharingAttention` whose values are its keys, before their norm and rotation (Gemma 4)."""

    key_projections = ("k_proj",)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, H) -> queries (B, T, N * D), keys and values (B, T, K * D)."""
        q, k = super().project(x)
        return q, k, k

    @property
    def cached_features(self) -> int:
        """See `Attention.cached_features`."""
        return 2 * self.k_proj.out_features


class SharedKeysAttention(SharingAttention):
    """Attention to the keys and values of an earlier layer of the same forward (Brandon et al. 2024).

    The arguments are those of `SharingAttention`, with the earlier layer's `shared_as`, heads and window, and without
    norms of keys and values.
    """

    key_projections = ()
    cached_features = 0

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H); see `Attention.forward`. The cache is not used."""
        assert self.shared_as is not None
        [q] = map(self.heads, self.project(x))
        q, _ = self.position(q, q[:, :, :0], context)
        keys = context.shared_keys[self.shared_as]
        return self.o_proj(Attention.attend_to(self, q, keys, context).flatten(-2))  # type: ignore[no-any-return]
