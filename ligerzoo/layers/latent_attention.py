"""Multi-head latent attention (MLA; DeepSeek-V2, 2024, section 2.1).

Keys and values of all heads are projections of one latent vector per token, c. Rotation cannot be moved out of a
projection, so each head's query and key have a second, rotated part; that of the keys is shared by all heads:

    c, k_rope = split(W_a x);  c = norm(c);   k_h = [U_h c | rotated k_rope],   v_h = V_h c
    q_h = [q_nope_h | rotated q_rope_h],      W_b = rows of U_h and V_h, head by head

The cache holds c and the rotated k_rope: as many numbers per token as few key-value heads, for any number of heads.
A decode step does not compute keys and values: (U_h c) q = c (U_h^T q), and sum p V_h c = V_h sum p c ("absorbed"
projections), so it is attention with one key-value head whose keys are [c | k_rope] and whose values are c.

Shapes: B batch, T tokens in the call, S keys (cached and new), N heads, R features of c, P rotated features, D features
of a head's query that are not rotated, V features of a head's value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ligerzoo.kernels import latent_decode_attention, rope
from ligerzoo.kernels.autograd import under_transform
from ligerzoo.kernels.dispatch import Backend, check_backend
from ligerzoo.kernels.fp8 import from_storage
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.layers.attention_paths import attend, attend_unequal
from ligerzoo.layers.cache import LayerCache, TokenCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.exactness import Obstacle, never_exact
from ligerzoo.layers.linear import Linear
from ligerzoo.layers.masks import AttentionMask, Mask, single_query_interval
from ligerzoo.layers.norm import RMSNorm, recomputable_norm
from ligerzoo.layers.plain import is_plain
from ligerzoo.layers.plain_attention import attend_and_record
from ligerzoo.layers.projection import check_features, project
from ligerzoo.layers.rotary import RotaryEmbedding
from ligerzoo.layers.static_cache import DECODE_TOKENS, StaticLayerCache
from ligerzoo.layers.tensor_plan import TensorPlan
from ligerzoo.tensor_checks import explains_options

_MAX_SCORES = 1024 * 1024
"""Largest T * S for which several new tokens attend to latent vectors: fused kernels lack heads of 512 features."""


class LatentAttention(nn.Module):
    """Causal self-attention whose cache holds one latent vector per token.

    Args:
        hidden_size: H.
        num_heads: N.
        kv_rank: R.
        nope_dim: D.
        value_dim: V.
        rotary: rotary embedding of P features; None for no positions.
        q_rank: features between the two projections to queries, with a norm; None for one projection.
        rope_dim: P without rotary embedding.
        scale: factor of the scores; None for (D + P)^-0.5.
        bias: add biases to the first projections, to latent vectors and `q_rank` features, and to the output.
        norm_eps: epsilon of the norms of latent vectors and of `q_rank` features.
        backend: of rotation and projections: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        ValueError: a size is not positive, or `backend` is unknown.
    """

    exchanged_heads = 0
    """See `Attention.exchanged_heads`."""

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kv_rank: int,
        nope_dim: int,
        value_dim: int,
        rotary: RotaryEmbedding | None,
        *,
        q_rank: int | None = None,
        rope_dim: int = 0,
        scale: float | None = None,
        bias: bool = False,
        norm_eps: float = 1e-6,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "kv_rank": kv_rank, "nope_dim": nope_dim}
        sizes |= {"value_dim": value_dim, "q_rank": 1 if q_rank is None else q_rank}
        if min(sizes.values()) < 1:
            given = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise ValueError(f"LatentAttention: {given}; expected positive numbers")
        self.hidden_size, self.num_heads, self.kv_rank = hidden_size, num_heads, kv_rank
        self.q_rank = q_rank
        rope_dim = rope_dim if rotary is None else rotary.dim
        self.nope_dim, self.rope_dim, self.value_dim = nope_dim, rope_dim, value_dim
        self.scale = (nope_dim + rope_dim) ** -0.5 if scale is None else scale
        self.backend: Backend = check_backend(backend)
        self.rotary = rotary

        def linear(inputs: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        q_size = num_heads * (nope_dim + rope_dim)
        if q_rank is None:
            self.q_proj = linear(hidden_size, q_size)
        else:
            self.q_a_proj = linear(hidden_size, q_rank, bias)
            self.q_a_layernorm = RMSNorm(q_rank, norm_eps, device=device, dtype=dtype)
            self.q_b_proj = linear(q_rank, q_size)
        self.kv_a_proj_with_mqa = linear(hidden_size, kv_rank + rope_dim, bias)
        self.kv_a_layernorm = RMSNorm(kv_rank, norm_eps, device=device, dtype=dtype)
        self.kv_b_proj = linear(kv_rank, num_heads * (nope_dim + value_dim))
        self.o_proj = linear(num_heads * value_dim, hidden_size, bias)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H).

        Args:
            x: the hidden states of T new tokens.
            context: positions and mask of these tokens.
            cache: latent vectors and rotated keys of earlier tokens; the new ones are appended.
        """
        check_features(self, x, self.hidden_size)
        q_nope, q_rope, latents, k_rope = self.project(x, context)
        if cache is not None:
            latents, k_rope = cache.append(latents, k_rope)
        if self._absorbs(q_nope, latents, context):
            out = self._attend_to_latents(q_nope, q_rope, latents, k_rope, context.mask(latents.shape[1], cache=cache))
        else:
            q = torch.cat([q_nope, q_rope], -1)
            k, v = self.expand(from_storage(latents, q.dtype), from_storage(k_rope, q.dtype))
            heads = q.shape[2]
            q, k, v = context.parts.to_heads(q, k, v)
            out = self._attend(q, k, v, context.whole.mask(k.shape[1], cache=cache), context)
            out = context.parts.to_tokens(out, heads)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Projects and rotates the hidden states x, (B, T, H).

        Returns:
            Queries (B, T, N, D) and rotated (B, T, N, P); latent vectors (B, T, 1, R) and rotated keys (B, T, 1, P).
        """
        if self.q_rank is None:
            q, compressed = project(x, self.q_proj, self.kv_a_proj_with_mqa, backend=self.backend)
        else:
            q, compressed = project(x, self.q_a_proj, self.kv_a_proj_with_mqa, backend=self.backend)
            q = self.q_b_proj(recomputable_norm(q, self.q_a_layernorm))
        q_nope, q_rope = self._split_heads(q, self.nope_dim, self.rope_dim)
        latents, k_rope = compressed.split_with_sizes([self.kv_rank, self.rope_dim], -1)
        latents = recomputable_norm(latents, self.kv_a_layernorm)
        k_rope, rotary = k_rope[:, :, None], self.rotary
        if rotary is not None:
            cos, sin = context.rotation(rotary, q.dtype)
            q_rope, k_rope = rope(q_rope, k_rope, cos, sin, interleaved=rotary.interleaved, backend=self.backend)
        return q_nope, q_rope, latents[:, :, None], k_rope

    def expand(self, latents: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Latent vectors (B, S, 1, R) and rotated keys (B, S, 1, P) -> keys (B, S, N, D + P), values (B, S, N, V)."""
        k_nope, v = self._split_heads(self.kv_b_proj(latents[:, :, 0]), self.nope_dim, self.value_dim)
        return torch.cat([k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)], -1), v

    def _split_heads(self, x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """(B, T, N * sum(sizes)) -> (B, T, N, size) each."""
        return x.view(*x.shape[:2], -1, sum(sizes)).split_with_sizes(sizes, -1)

    def _absorbs(self, q: Tensor, latents: Tensor, context: Context) -> bool:
        """Whether to attend to latent vectors: decode steps, whose cached tokens are many more than the new ones."""
        tokens, keys = q.shape[1], latents.shape[1]
        is_decoding = tokens < keys and (tokens == 1 or (tokens <= DECODE_TOKENS and tokens * keys <= _MAX_SCORES))
        return (
            is_decoding
            and context.attentions is None
            and is_plain(self.kv_b_proj, Linear, nn.Linear)
            and not (torch.is_grad_enabled() and q.requires_grad)
            and not under_transform()
        )

    def _attend_to_latents(
        self, q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, mask: AttentionMask | Tensor | None
    ) -> Tensor:
        """Returns (B, T, N, V), with both halves of `kv_b_proj` absorbed."""
        weight = self.kv_b_proj.weight.view(-1, self.nope_dim + self.value_dim, self.kv_rank)
        to_keys, to_values = weight[:, : self.nope_dim], weight[:, self.nope_dim :]
        q = torch.einsum("btnd,ndr->btnr", q_nope, to_keys)
        if q.shape[1] == 1 and (mask is None or isinstance(mask, Mask)):
            parts = q[:, 0], q_rope[:, 0], latents[:, :, 0], k_rope[:, :, 0], *single_query_interval(mask)
            out = latent_decode_attention(*parts, scale=self.scale, backend=self.backend)[:, None]
        else:
            latents, k_rope = from_storage(latents, q.dtype), from_storage(k_rope, q.dtype)
            keys = torch.cat([latents, k_rope], -1)
            out = attend(torch.cat([q, q_rope], -1), keys, latents, mask, self.scale)
        return torch.einsum("btnr,nvr->btnv", out, to_values)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None, context: Context) -> Tensor:
        """Returns (B, T, N, V); stores the probabilities if the context asks for them."""
        if (record := context.attentions) is None:
            return attend_unequal(q, k, v, mask, self.scale)
        return attend_and_record(AttentionCall(q, k, v, mask, self.scale), record)

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """See `Attention.exact_obstacles`."""
        yield never_exact(self)

    def tensor_plan(self) -> TensorPlan:
        """Divides the heads over the processes of tensor parallelism; each computes all latent vectors."""
        queries = "q_proj" if self.q_rank is None else "q_b_proj"
        return TensorPlan({"heads": self.num_heads}, (queries, "kv_b_proj"), ("o_proj",))

    def new_cache(self, capacity: int | None = None) -> LayerCache:
        """Returns an empty cache, of fixed size if `capacity` is given.

        Its keys are the latent vectors, and its values the rotated keys.
        """
        return TokenCache() if capacity is None else StaticLayerCache(capacity)

    @property
    def cached_features(self) -> int:
        """Numbers that its cache holds of each token."""
        return self.kv_rank + self.rope_dim

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, scale={self.scale:.6g}"
