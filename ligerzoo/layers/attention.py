"""Scaled dot-product attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023).

Shapes: B batch, T tokens in the call, S keys (cached and new), N query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache as cached
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligerzoo.kernels import apply_sinks, decode_attention, exact_attention, rope, sink_attention
from ligerzoo.kernels.attention_sinks import attention_kernel
from ligerzoo.kernels.autograd import under_transform
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, check_backend
from ligerzoo.kernels.fp8 import from_storage
from ligerzoo.kernels.recompute import is_recording, recomputable
from ligerzoo.layers.attention_on_meta import attention_on_meta
from ligerzoo.layers.cache import LayerCache, RollingLayerCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.linear import INIT_STD, Linear, check_features
from ligerzoo.layers.lora import project_jointly
from ligerzoo.layers.masks import AttentionMask, Mask, additive_mask
from ligerzoo.layers.norm import AllHeadsRMSNorm, RMSNorm
from ligerzoo.layers.plain import is_plain
from ligerzoo.layers.rotary import RotaryEmbedding
from ligerzoo.layers.static_cache import StaticLayerCache

# Explicit, since the default choice differs between versions of torch. cuDNN is 1.7 times as fast on Hopper.
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

_MAX_SCORES = 1024 * 1024
"""Largest T * S for which a GPU materializes the mask or the scores as a matrix."""

_MAX_SCORES_WITH_SINKS = 16 * _MAX_SCORES
"""Likewise, the scores of all heads and rows for attention with sinks that is not differentiated."""


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` in plain torch, with an additive mask; see `attention_probabilities`."""
    return apply_probabilities(attention_probabilities(q, k, mask, scale, softcap, is_causal, sinks), v)


def attention_probabilities(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns the attention probabilities (B, N, T, S): scores in the dtype of the inputs, softmax in fp32.

    The arguments are those of `attend`, with an additive mask.
    """
    q, k = q.transpose(1, 2), _repeat_heads(k, q.shape[2])
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    elif is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(
            1 + scores.shape[-1] - scores.shape[-2]
        )
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    wide = accumulation_dtype(q.dtype)
    if sinks is None:
        return scores.softmax(-1, dtype=wide).to(q.dtype)
    column = sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores.to(wide), column], -1).softmax(-1)[..., :-1].to(q.dtype)


def apply_probabilities(probabilities: Tensor, v: Tensor) -> Tensor:
    """probabilities: (B, N, T, S), v: (B, S, K, D) -> (B, T, N, D)."""
    return (probabilities @ _repeat_heads(v, probabilities.shape[1])).transpose(1, 2)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, S, K, D) -> (B, N, S, D): repeats each key-value head for its N / K query heads."""
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes softmax(cap(q k^T * scale) + mask) v, with cap(s) = softcap * tanh(s / softcap) or the identity.

    Args:
        q: (B, T, N, D).
        k: (B, S, K, D), K a divisor of N: query heads j*N/K to (j+1)*N/K - 1 share key head j. Keys and values of a KV
            cache may be in float8_e4m3fn.
        v: (B, S, K, D).
        mask: an `AttentionMask`, or (B or 1, 1, T, S): boolean (True: visible), or added to the scores. None requires
            T = S, or a single query (T = 1), which attends to all keys.
        scale: factor of the scores; None for D^-0.5.
        softcap: soft cap of the scores (Gemma Team 2024, section 2); None for no cap.
        is_causal: without a mask, a query attends to the keys up to its own; False: to all keys.
        sinks: (N,), for each head a logit that takes part in the softmax but has no value (OpenAI 2025, gpt-oss); None
            for none.

    Returns:
        (B, T, N, D).
    """
    tokens, keys = q.shape[1], k.shape[1]
    is_differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    transformed = under_transform()  # vmap does not support FlexAttention
    is_decoding = tokens == 1 and not (is_differentiable or transformed)
    if is_decoding and q.is_cuda and (mask is None or isinstance(mask, Mask)):
        return _attend_to_cache(q, k, v, mask, scale, softcap, sinks)
    k, v = from_storage(k, q.dtype), from_storage(v, q.dtype)
    on_cpu, is_short = q.device.type == "cpu", tokens == 1 or tokens * keys <= _MAX_SCORES
    if sinks is not None:  # no kernel for short masks has sinks: the scores of all heads are materialized
        is_short = not is_differentiable and len(q) * q.shape[2] * tokens * keys <= _MAX_SCORES_WITH_SINKS
    has_flex_kernel = q.shape[-1] >= 16 and q.dtype != torch.float64
    if isinstance(mask, AttentionMask) and has_flex_kernel and not (on_cpu or is_short or transformed):
        return _flex_attention(q, k, v, mask, scale, softcap, sinks)
    if on_cpu and q.dtype in (torch.bfloat16, torch.float16):
        return _attend_in_fp32(q, k, v, mask, scale, softcap, is_causal, sinks)
    mask = _additive(mask, q.dtype)
    # On a CPU, torch's fused kernel gives rows without visible keys gradients many times too large.
    is_accurate_on_cpu = mask is None or tokens == 1
    # vmap has no rule for the kernels of fp32 tensors, nor for that of a CPU.
    has_rule = not (transformed and (on_cpu or q.dtype == torch.float32))
    if softcap is not None or not has_rule or (on_cpu and not is_accurate_on_cpu):
        return reference(q, k, v, mask, scale, softcap, is_causal, sinks)
    if q.is_meta:
        return attention_on_meta(q, k, v, is_causal)[0]
    is_causal = is_causal and mask is None
    if tokens == 1:  # an `if`, since torch.compile would leave a comparison of the length symbolic
        is_causal = False
    if sinks is not None:
        if mask is None and attention_kernel(q, k, v, is_causal) is not None:
            return sink_attention(q, k, v, sinks, scale=scale, is_causal=is_causal)
        return reference(q, k, v, mask, scale, softcap, is_causal, sinks)
    if q.is_cuda and q.dtype == torch.float32:  # its only kernel that keeps no scores has equal numbers of heads
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with _fastest_first(q) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(
            q, k, v, mask, scale=scale, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def _attend_in_fp32(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None, scale: float | None, softcap: float | None,
    is_causal: bool, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`attend` in half precision on a CPU: in fp32, rounded once.

    Scores in half precision would move probabilities where keys have large biases, as in Qwen2. The keys of each row
    come first and padding last, so that a row has the same sums as alone, whatever the padding on its left.
    """
    wide = accumulation_dtype(q.dtype)
    added = _additive(mask, wide)
    if isinstance(mask, Mask) and mask.padding_mask is not None and added is not None:
        order = mask.padding_mask.logical_not().byte().argsort(stable=True, dim=1)
        # Not take_along_dim, for which torch.compile compiles each size.
        k, v = (x.gather(1, order[:, :, None, None].expand_as(x)) for x in (k, v))
        added = added.gather(3, order[:, None, None].expand_as(added))
    out = reference(q.to(wide), k.to(wide), v.to(wide), added, scale, softcap, is_causal, sinks)
    return out.to(q.dtype)


def _fastest_first(x: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which torch uses the fastest kernel on the GPU of x, and after which it chooses as before.

    torch sets its own order at the first choice of a process. A context around that choice would undo it.
    """
    if not torch.compiler.is_compiling():
        _let_torch_order_kernels(x.device)
    return sdpa_kernel(_FASTEST_FIRST, set_priority=True)


@cached
def _let_torch_order_kernels(device: torch.device) -> None:
    x = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    torch._fused_sdp_choice(x, x, x)


def _attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`attend` for a single query per row."""
    first = last = padding_mask = fallback = None
    if mask is not None:
        first, last, padding_mask = mask.first[:, 0], mask.last[:, 0], mask.padding_mask
        fallback = None if mask.fallback is None else mask.fallback[:, 0]
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    out = decode_attention(
        q[:, 0], keys, values, first, last, padding_mask, fallback, scale=scale, softcap=softcap, sinks=sinks
    )
    return out[:, None]


def _additive(mask: AttentionMask | Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns the matrix to add to scores of `dtype`; None for no mask."""
    if isinstance(mask, AttentionMask):
        return mask.additive(dtype)
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return additive_mask(mask, dtype)
    if mask.dtype == dtype:
        return mask
    is_masked = mask == torch.finfo(mask.dtype).min
    return mask.to(dtype).masked_fill(is_masked, torch.finfo(dtype).min)


def _flex_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    if q.is_meta:
        out, lse = attention_on_meta(q, k, v, is_causal=True)
        return out if sinks is None else apply_sinks(out, lse, sinks)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    arguments = q, k, v, _softcapped(softcap), mask.block_mask(), scale, q.shape[1] != k.shape[1]
    with nullcontext() if torch.compiler.is_compiling() else _many_flex_kernels():
        if sinks is None:
            plain: Tensor = _compiled_flex_attention()(*arguments)
            return plain.transpose(1, 2)
        from torch.nn.attention.flex_attention import AuxRequest

        out, aux = _compiled_flex_attention()(*arguments, return_aux=AuxRequest(lse=True))
    return apply_sinks(out.transpose(1, 2), aux.lse, sinks)


@cached
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@contextmanager
def _many_flex_kernels() -> Iterator[None]:
    """Within this context, torch compiles up to 128 variants of a function, instead of 8.

    Each mask, cap, dtype, head size and grad mode is a variant. Above the limit, torch would run FlexAttention without
    a kernel, with all scores in memory.
    """
    config = torch._dynamo.config
    limit = config.recompile_limit
    config.recompile_limit = max(limit, 128)
    try:
        yield
    finally:
        config.recompile_limit = limit


@cached  # one function per cap, so that it is compiled once
def _softcapped(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None
    return lambda score, batch, head, query, key: softcap * torch.tanh(score / softcap)


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
        scale: factor of the scores; None for D^-0.5.
        softcap: see `attend`.
        is_causal: mask later tokens.
        qkv_bias: add biases to the query, key and value projections.
        output_bias: add a bias to the output projection.
        backend: of rotation and projections: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        ValueError: N is not a multiple of K, H is not a multiple of N and `head_dim` is None, `window` or `softcap` is
            not positive, or `backend` is unknown.
    """

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
        num_kv_heads = num_kv_heads or num_heads
        self.hidden_size, self.head_dim = hidden_size, head_dim or hidden_size // num_heads
        self.window, self.scale, self.softcap, self.is_causal = window, scale, softcap, is_causal
        self.backend: Backend = check_backend(backend)
        if num_heads % num_kv_heads:
            raise ValueError(f"Attention: num_heads={num_heads}; expected a multiple of num_kv_heads={num_kv_heads}")
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"Attention: hidden_size={hidden_size}; expected a multiple of num_heads={num_heads}, or head_dim"
            )
        if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
            raise ValueError(
                f"Attention: window={window}, softcap={softcap}; expected window >= 1 and softcap > 0, or None"
            )
        q_size, kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = Linear(hidden_size, q_size, bias=qkv_bias, device=device, dtype=dtype)
        self.k_proj = Linear(hidden_size, kv_size, bias=qkv_bias, device=device, dtype=dtype)
        self.v_proj = Linear(hidden_size, kv_size, bias=qkv_bias, device=device, dtype=dtype)
        self.o_proj = Linear(q_size, hidden_size, bias=output_bias, device=device, dtype=dtype)
        self.q_norm, self.k_norm, self.rotary = q_norm, k_norm, rotary
        self.sinks: nn.Parameter | None
        self.register_parameter("sinks", None)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """x: (B, T, H) -> (B, T, H).

        Args:
            x: the hidden states of T new tokens.
            context: positions and mask of these tokens.
            cache: keys and values of earlier tokens; the new ones are appended.
        """
        check_features(self, x, self.hidden_size)
        q, k, v = (
            features.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
            for features in self.project(x)
        )
        return self.o_proj(self.mix(q, k, v, context, cache).flatten(-2))  # type: ignore[no-any-return]

    def mix(self, q: Tensor, k: Tensor, v: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        """Attends from the queries (B, T, N, D) to the new and cached keys and values -> (B, T, N, D)."""
        q, k = self.position(q, k, context)
        if cache is not None:
            k, v = cache.append(k, v)
        mask = context.mask(
            k.shape[1],
            window=self.window,
            is_causal=self.is_causal,
            cache=cache,
            force=self.softcap is not None,  # only FlexAttention fuses soft caps, and it needs a mask
        )
        return self.attend(q, k, v, mask, context)

    def position(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Returns queries (B, T, N, D) and keys (B, T, K, D), normalized and rotated."""

        def normalize_and_rotate(q: Tensor, k: Tensor, *weights: Tensor | None) -> tuple[Tensor, Tensor]:
            q = q if self.q_norm is None else self.q_norm(q)
            k = k if self.k_norm is None else self.k_norm(k)
            return self.apply_rotary(q, k, context)

        rotated = normalize_and_rotate(q, k)
        if is_recording():  # backward keeps the inputs of a norm; rotation alone keeps neither inputs nor outputs
            norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
            if len(norms) == 2 and all(is_plain(norm, RMSNorm, AllHeadsRMSNorm) for norm in norms):
                recomputable(rotated, normalize_and_rotate, q, k, *(norm.weight for norm in norms))
        return rotated

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, H) -> queries (B, T, N * D), keys and values (B, T, K * D)."""
        return project_jointly(x, self.q_proj, self.k_proj, self.v_proj, backend=self.backend)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None, context: Context) -> Tensor:
        """Computes `attend` with the options of this layer; stores the probabilities if the context asks for them."""
        options = self.scale, self.softcap, self.is_causal, self.sinks
        if context.attentions is None:
            if context.cache is not None and context.cache.exact and (mask is not None or k.shape[1] > q.shape[1]):
                return self._attend_exactly(q, k, v, context)
            return attend(q, k, v, mask, *options)
        k, v = from_storage(k, q.dtype), from_storage(v, q.dtype)
        probabilities = attention_probabilities(q, k, _additive(mask, q.dtype), *options)
        context.attentions.append(probabilities)
        return apply_probabilities(probabilities, v)

    def _attend_exactly(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attends to cached keys with the bits of causal attention without a cache."""
        if self.window is not None and k.shape[1] > self.window:
            raise ValueError(
                f"exact cache: got {k.shape[1]} tokens; expected at most {self.window}, the sliding window. "
                "Use exact=False"
            )
        return exact_attention(q, k, v, context.cache_position, scale=self.scale)

    def new_cache(self, capacity: int | None = None) -> LayerCache:
        """Returns an empty cache: of fixed size if `capacity` is given, else rolling with a window, else growing."""
        if capacity is None and self.window is not None:
            return RollingLayerCache(self.window)
        return LayerCache() if capacity is None else StaticLayerCache(capacity)

    def apply_rotary(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Returns queries (B, T, N, D) and keys (B, T, K, D), rotated by their positions."""
        if self.rotary is None:
            return q, k
        rotation = context.rotation(self.rotary, q.dtype)
        return rope(q, k, *rotation, interleaved=self.rotary.interleaved, backend=self.backend)

    def extra_repr(self) -> str:
        shown = {"window": self.window, "scale": self.scale, "softcap": self.softcap}
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
        self.init_weights()

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the sinks from N(0, std^2)."""
        if self.sinks is not None:
            nn.init.normal_(self.sinks, std=std)
