"""Self-attention layers with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023).

Shapes: B batch, T tokens in the call, S keys (cached and new), N query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligerzoo.checks import AT_LEAST_1, POSITIVE_OR_NONE, check, or_none
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels import apply_sinks, rope
from ligerzoo.kernels.dispatch import Backend, check_backend
from ligerzoo.kernels.exact_attention import HEAD_SIZES, exact_attention_with_lse, follows_cudnn
from ligerzoo.kernels.recompute import is_recording, recomputable
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.layers.attention_paths import compute
from ligerzoo.layers.cache import KeysAndValues, LayerCache, RollingLayerCache, TokenCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.exactness import Obstacle
from ligerzoo.layers.linear import INIT_STD, Linear, initialize
from ligerzoo.layers.masks import AttentionMask
from ligerzoo.layers.norm import AllHeadsRMSNorm, RMSNorm
from ligerzoo.layers.plain import is_plain
from ligerzoo.layers.plain_attention import attend_and_record
from ligerzoo.layers.projection import check_features, project
from ligerzoo.layers.rotary import RotaryEmbedding
from ligerzoo.layers.row_parts import WHOLE_ROWS, RowParts
from ligerzoo.layers.static_cache import StaticLayerCache
from ligerzoo.layers.tensor_plan import Heads, TensorPlan
from ligerzoo.tensor_checks import explains_options

_AT_LEAST_1_OR_NONE = or_none(AT_LEAST_1)


class Attention(nn.Module):
    """Self-attention with grouped queries.

    Args:
        hidden_size: H.
        num_heads: N.
        num_kv_heads: K, a divisor of N; None for N.
        head_dim: D; None for H / N.
        rotary: rotary embedding of queries and keys; None for no positions.
        q_norm: applied to the queries (B, T, N, D) before rotation; None for no norm.
        k_norm: applied to the keys (B, T, K, D) before rotation; None for no norm.
        window: tokens that a token attends to, including itself; None for full attention.
        chunk: tokens of a text attend to those of the same chunk of this many tokens (Llama 4); None for one chunk.
        scale: factor of the scores; None for D^-0.5.
        softcap: see `attend`.
        is_causal: mask later tokens.
        qkv_bias: add biases to the query, key and value projections.
        output_bias: add a bias to the output projection.
        backend: of rotation and projections: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        ValueError: a size, `window` or `softcap` is not positive, N is not a multiple of K, H is not a multiple of N
            and `head_dim` is None, or `backend` is unknown.
    """

    query_parts: ClassVar[int] = 1
    """Outputs of `q_proj` of each head, as multiples of D."""

    key_projections: ClassVar[tuple[str, ...]] = ("k_proj", "v_proj")
    """The projections to keys and values that the layer has."""

    k_proj: Linear
    v_proj: Linear
    exchanged_heads = 0
    """Heads that processes must divide equally to divide rows, see `RowParts`; 0 if they need not."""

    @explains_options
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: RotaryEmbedding | None = None,
        *,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        window: int | None = None,
        chunk: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        is_causal: bool = True,
        qkv_bias: bool = False,
        output_bias: bool = False,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check("Attention", AT_LEAST_1, hidden_size=hidden_size, num_heads=num_heads)
        check(
            "Attention", _AT_LEAST_1_OR_NONE, num_kv_heads=num_kv_heads, head_dim=head_dim, window=window, chunk=chunk
        )
        check("Attention", POSITIVE_OR_NONE, softcap=softcap)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.hidden_size, self.head_dim = hidden_size, hidden_size // num_heads if head_dim is None else head_dim
        self.window, self.chunk, self.scale, self.softcap, self.is_causal = window, chunk, scale, softcap, is_causal
        self.backend: Backend = check_backend(backend)
        if num_heads % num_kv_heads:
            raise ValueError(f"Attention: num_heads={num_heads}; expected a multiple of num_kv_heads={num_kv_heads}")
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"Attention: hidden_size={hidden_size}; expected a multiple of num_heads={num_heads}, or head_dim"
            )
        if (rotated := getattr(rotary, "dim", 0)) > self.head_dim:
            what = f"rotary is a {type(rotary).__name__} of {rotated} features"
            raise LigerzooError(what, where="Attention", expected=f"at most head_dim={self.head_dim}")
        q_size, kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = Linear(hidden_size, self.query_parts * q_size, bias=qkv_bias, device=device, dtype=dtype)
        for name in self.key_projections:
            setattr(self, name, Linear(hidden_size, kv_size, bias=qkv_bias, device=device, dtype=dtype))
        self.o_proj = Linear(q_size, hidden_size, bias=output_bias, device=device, dtype=dtype)
        self.q_norm, self.k_norm, self.rotary = q_norm, k_norm, rotary

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H).

        Args:
            x: the hidden states of T new tokens.
            context: positions and mask of these tokens.
            cache: keys and values of earlier tokens; the new ones are appended.
        """
        q, k, v = map(self.heads, self.project(x))
        return self.o_proj(self.mix(q, k, v, context, cache).flatten(-2))  # type: ignore[no-any-return]

    def mix(self, q: Tensor, k: Tensor, v: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        """Attends from the queries (B, T, N, D) to the new and cached keys and values -> (B, T, N, D)."""
        q, k = self.position(q, k, context)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.attend_to(q, KeysAndValues(k, v, cache), context)

    def attend_to(self, q: Tensor, keys: KeysAndValues, context: Context) -> Tensor:
        """Attends from queries with positions, (B, T, N, D), to all keys and values -> (B, T, N, D)."""
        (k, v, cache), heads = keys, q.shape[2]
        q, k, v = context.parts.to_heads(q, k, v)
        mask = context.whole.mask(
            k.shape[1],
            window=self.window,
            chunk=self.chunk,
            is_causal=self.is_causal,
            cache=cache,
            # Only FlexAttention fuses soft caps, and it needs a mask. So do other bits than cuDNN's.
            force=self.softcap is not None or (context.is_exact and not follows_cudnn(self.head_dim)),
        )
        return context.parts.to_tokens(self.attend(q, k, v, mask, context), heads)

    def position(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Returns queries (B, T, N, D) and keys (B, T, K, D), normalized and rotated."""
        q_norm, k_norm = self.q_norm, self.k_norm

        def normalize_and_rotate(q: Tensor, k: Tensor, *weights: Tensor | None) -> tuple[Tensor, Tensor]:
            q, k = q if q_norm is None else q_norm(q), k if k_norm is None else k_norm(k)
            return self.apply_rotary(q, k, context)

        rotated = normalize_and_rotate(q, k)
        if not is_recording():
            return rotated
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        is_normalized = len(norms) == (2 if self.key_projections else 1)
        # Backward keeps the inputs of a norm. Rotation alone keeps neither inputs nor outputs.
        if is_normalized and all(is_plain(norm, RMSNorm, AllHeadsRMSNorm) for norm in norms):
            recomputable(rotated, normalize_and_rotate, q, k, *(norm.weight for norm in norms))
        return rotated

    def heads(self, features: Tensor) -> Tensor:
        """(B, T, heads * D) -> (B, T, heads, D)."""
        return features.view(*features.shape[:-1], -1, self.head_dim)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, H) -> queries (B, T, N * D), keys and values (B, T, K * D)."""
        check_features(self, x, self.hidden_size)
        projections = (getattr(self, name) for name in ("q_proj", *self.key_projections))
        return project(x, *projections, backend=self.backend)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None, context: Context) -> Tensor:
        """Computes `attend` with the options of this layer; stores the probabilities if the context asks for them."""
        call = self.attention_call(q, k, v, mask, context.parts)
        if (record := context.outputs.attentions) is not None:
            return attend_and_record(call, record)
        if context.cache is not None and context.cache.exact and (mask is not None or k.shape[1] > q.shape[1]):
            return self._attend_exactly(call, context)
        return compute(call)

    def attention_call(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None, parts: RowParts = WHOLE_ROWS
    ) -> AttentionCall:
        """Returns the arguments of `attend`, with the options of this layer, for the heads of this process."""
        return AttentionCall(q, k, v, mask, self.scale, self.softcap, self.is_causal)

    def _attend_exactly(self, call: AttentionCall, context: Context) -> Tensor:
        """Attends to cached keys with the bits of causal attention without a cache."""
        if context.last_visible is not None:
            raise ValueError("exact cache: got attention to later tokens; expected causal attention. Use exact=False")
        out, lse = exact_attention_with_lse(*call[:3], context.cache_position, self.scale, self.window, self.backend)
        return out if call.sinks is None else apply_sinks(out, lse, call.sinks, backend=self.backend)

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """Yields what prevents exact results of this layer, see `layers.exactness`."""
        if self.head_dim not in HEAD_SIZES:
            yield "head_dim", " or ".join(map(str, HEAD_SIZES)), f"is {self.head_dim}"
        if self.chunk is not None:
            yield "chunk", "None", f"is {self.chunk}"
        if self.softcap is not None or not self.is_causal:
            what = "has a soft cap" if self.is_causal else "is not causal"
            yield "", "causal attention without a soft cap", what

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.k_proj.out_features // self.head_dim

    def tensor_plan(self) -> TensorPlan:
        """Divides the heads over the processes of tensor parallelism."""
        norms = tuple(name for name in ("q_norm", "k_norm") if getattr(getattr(self, name), "spans_heads", False))
        shared = {"key-value heads": self.kv_heads} if self.key_projections else {}
        of_keys = (*self.key_projections, *(name for name in norms if name == "k_norm"))
        return TensorPlan(
            {"heads": self.o_proj.in_features // self.head_dim},
            ("q_proj", *self.key_projections),
            ("o_proj",),
            norms=norms,
            shared=shared,
            heads={name: Heads(self.kv_heads * self.head_dim, self.kv_heads) for name in of_keys},
        )

    def new_cache(self, capacity: int | None = None) -> LayerCache:
        """Returns an empty cache: of fixed size if `capacity` is given, else rolling with a window, else growing."""
        if capacity is None and self.window is not None:
            return RollingLayerCache(self.window)
        return TokenCache() if capacity is None else StaticLayerCache(capacity)

    @property
    def cached_features(self) -> int:
        """Numbers that its cache holds of each token."""
        return self.k_proj.out_features + self.v_proj.out_features

    def apply_rotary(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Returns queries (B, T, N, D) and keys (B, T, K, D), rotated by their positions."""
        rotary = self.rotary
        if rotary is None:
            return q, k
        return rope(q, k, *context.rotation(rotary, q.dtype), interleaved=rotary.interleaved, backend=self.backend)

    def extra_repr(self) -> str:
        shown = {"window": self.window, "chunk": self.chunk, "scale": self.scale, "softcap": self.softcap}
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


class RotaryNormAttention(Attention):
    """`Attention` that normalizes queries and keys after rotation (HunYuan, nanochat), instead of before.

    With weights in the norms, scores depend on absolute positions, see `Decoder`.
    """

    def position(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Returns queries (B, T, N, D) and keys (B, T, K, D), rotated and normalized."""
        q, k = self.apply_rotary(q, k, context)
        return q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k)


class SinkAttention(Attention):
    """Self-attention in which each head has a sink: a learned logit that joins its softmax (OpenAI 2025, gpt-oss).

    A head whose sink is large attends to little: the weights of its keys add up to less than one. The arguments are
    those of `Attention`.

    Attributes:
        sinks: (N,), the logits of the sinks.
    """

    def __init__(self, hidden_size: int, num_heads: int, *args: Any, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, *args, **options)
        device, dtype = options.get("device"), options.get("dtype")
        self.sinks = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        initialize(self, SinkAttention)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the sinks from N(0, std^2)."""
        nn.init.normal_(self.sinks, std=std)

    def attention_call(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None, parts: RowParts = WHOLE_ROWS
    ) -> AttentionCall:
        """See `Attention.attention_call`."""
        sinks = parts.own_heads(self.sinks)
        return AttentionCall(q, k, v, mask, self.scale, self.softcap, self.is_causal, sinks)

    def tensor_plan(self) -> TensorPlan:
        """See `Attention.tensor_plan`."""
        return replace(super().tensor_plan(), own=("sinks",))


class GatedAttention(Attention):
    """Self-attention with an output gate, `o_proj(attention(x) * sigmoid(gate(x)))` (Qiu et al. 2025).

    Takes the arguments of `Attention`.

    Attributes:
        q_proj: (2 * N * D, H), for each head the D rows of its queries, then those of its gate.
    """

    query_parts = 2

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H); see `Attention.forward`."""
        features, k, v = self.project(x)
        q, gate = features.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)  # type: ignore[no-untyped-call]
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (k, v))  # type: ignore[no-untyped-call]
        out = self.mix(q, k, v, context, cache)
        return self.o_proj((out * gate.sigmoid()).flatten(-2))  # type: ignore[no-any-return]


class GateProjectionAttention(Attention):
    """`GatedAttention` whose gate has its own projection (Muse Glimmer).

    Args:
        hidden_size: H.
        num_heads: N.
        arguments: the other positional arguments of `Attention`.
        gate_size: G, gates of each head: D, one for each feature, or 1; None for D.
        options: keyword arguments of `Attention`.

    Attributes:
        gate_proj: (N * G, H), without bias.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *arguments: Any, gate_size: int | None = None, **options: Any
    ) -> None:
        super().__init__(hidden_size, num_heads, *arguments, **options)
        device, dtype = options.get("device"), options.get("dtype")
        gates = num_heads * (self.head_dim if gate_size is None else gate_size)
        self.gate_proj = Linear(hidden_size, gates, bias=False, device=device, dtype=dtype)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the features of `Attention.project`, and the gates (B, T, N * G) before the sigmoid."""
        check_features(self, x, self.hidden_size)
        return project(x, self.q_proj, self.k_proj, self.v_proj, self.gate_proj, backend=self.backend)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H); see `Attention.forward`."""
        *features, gate = self.project(x)
        q, k, v = map(self.heads, features)
        out = self.mix(q, k, v, context, cache)
        return self.o_proj((out * gate.view(*out.shape[:-1], -1).sigmoid()).flatten(-2))  # type: ignore[no-any-return]

    def tensor_plan(self) -> TensorPlan:
        """See `Attention.tensor_plan`."""
        plan = super().tensor_plan()
        return replace(plan, columns=(*plan.columns, "gate_proj"))
