"""Attention as an ordered table of paths, of which the first that can computes a call.

Shapes: B batch, T tokens in the call, S keys (cached and new), N query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache as cached
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligerzoo.kernels import apply_sinks, decode_attention, large_head_attention, packed_attention, sink_attention
from ligerzoo.kernels.autograd import under_transform
from ligerzoo.kernels.dispatch import accumulation_dtype, uses_triton
from ligerzoo.kernels.exact_attention import follows_cudnn
from ligerzoo.kernels.fp8 import FP8, from_storage
from ligerzoo.kernels.fused_attention import attend_within, attention_kernel, has_boundaries, has_windows
from ligerzoo.layers.attention_on_meta import attention_on_meta
from ligerzoo.layers.documents import Documents
from ligerzoo.layers.masks import AttentionMask, DocumentMask, Mask, as_additive, single_query_interval

# Explicit, since the default choice differs between versions of torch. cuDNN is 1.7 times as fast on Hopper.
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

# For each of torch's kernels, functions that return whether it is enabled, and that enable or disable it.
_SWITCHES = [
    (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"))
    for name in ("cudnn", "flash", "mem_efficient", "math", "overrideable")
]
_CHOICE = [True, True, True, True, False], [backend.value for backend in (*_FASTEST_FIRST, SDPBackend.OVERRIDEABLE)]

_MAX_SCORES = 1024 * 1024
"""Largest T * S for which a GPU materializes the mask or the scores as a matrix."""

_MAX_SCORES_WITH_SINKS = 16 * _MAX_SCORES
"""Likewise, the scores of all heads and rows for attention with sinks that is not differentiated."""


_MAX_FUSED_HEAD = 256
"""Largest head size of the kernels of cuDNN and FlashAttention."""


class AttentionCall(NamedTuple):
    """The arguments of `attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask | Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    is_causal: bool = True
    sinks: Tensor | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the queries are on a CPU."""
        return self.q.is_cpu

    @property
    def scores(self) -> int:
        """T * S."""
        return self.q.shape[1] * self.k.shape[1]

    @property
    def documents(self) -> Documents | None:
        """The documents of a `CausalMask`, if the host knows them."""
        return getattr(self.mask, "documents", None)

    @property
    def is_differentiable(self) -> bool:
        """Whether backward may follow."""
        tensors = self.q, self.k, self.v, self.sinks
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    @property
    def masks_future(self) -> bool:
        """Whether a kernel must mask later tokens."""
        if self.q.shape[1] == 1:  # an `if`, since torch.compile would leave a comparison of the length symbolic
            return False
        return self.is_causal and self.mask is None

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """Returns the matrix to add to scores of `dtype`; None for no mask."""
        return as_additive(self.mask, dtype)


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
    return compute(AttentionCall(q, k, v, mask, scale, softcap, is_causal, sinks))


def compute(call: AttentionCall) -> Tensor:
    """`attend`, by the first path that can."""
    if call.k.dtype == FP8 and not _decodes(call):  # the other paths cannot read it
        call = call._replace(k=call.k.to(call.q.dtype), v=call.v.to(call.q.dtype))
    for path in PATHS:
        if path.can(call):
            return path.run(call)
    raise AssertionError("the last path computes every call")


def _decodes(call: AttentionCall) -> bool:
    """A single query per row on a GPU, without gradients."""
    return (
        call.q.is_cuda
        and call.q.shape[1] == 1
        and (call.mask is None or isinstance(call.mask, Mask))
        and not (call.is_differentiable or under_transform())
    )


def _decode_kernel(call: AttentionCall) -> Tensor:
    keys, values = call.k.transpose(1, 2), call.v.transpose(1, 2)
    interval = single_query_interval(call.mask)
    out = decode_attention(
        call.q[:, 0], keys, values, *interval, scale=call.scale, softcap=call.softcap, sinks=call.sinks
    )
    return out[:, None]


def _can_pack(call: AttentionCall) -> bool:
    """Whether documents, known to the host, run in batches: if that is faster than FlexAttention, or must be exact.

    Raises:
        ValueError: the documents must be exact, and no kernel computes this attention exactly.
    """
    documents = call.documents
    if documents is None or not (documents.exact or (_is_long(call) and call.softcap is None)):
        return False
    window = _window_of_documents(call)
    features = call.q.shape[2] * call.q.shape[3]
    can_pay = window is None and documents.rows is not None
    if not (documents.exact or (can_pay and documents.packing_pays(features))):
        return False
    reasons = {
        "padding within a row": documents.rows is None,
        f"a window of {window} tokens and documents of up to {documents.longest}": (
            window is not None and not has_windows(call.q, call.v)
        ),
        f"a soft cap of {call.softcap}": call.softcap is not None,
        f"{call.q.dtype} on {call.q.device.type} and a head size of {call.q.shape[-1]}": (
            window is None and attention_kernel(*call[:3], True) != "cudnn"
        ),
    }
    for reason, holds in reasons.items():
        if holds and documents.exact:
            raise ValueError(f"exact attention: got {reason}; expected what has known bits. Use exact=False")
    return not any(reasons.values())


def _window_of_documents(call: AttentionCall) -> int | None:
    """The sliding window; None if the documents are not longer, and cuDNN gives them the bits that they must have."""
    documents, window = call.documents, getattr(call.mask, "window", None)
    if documents is None or (window is not None and window < documents.longest):
        return window
    is_cudnn = follows_cudnn(call.q.shape[-1]) or not has_windows(call.q, call.v)
    return None if is_cudnn or not documents.exact else documents.longest


def _packed(call: AttentionCall) -> Tensor:
    documents, window = call.documents, _window_of_documents(call)
    assert documents is not None
    if documents.whole is not None and window is None:  # a row for each document
        q, k, v = (x.reshape(-1, documents.whole, *x.shape[2:]) for x in call[:3])
        return compute(call._replace(q=q, k=k, v=v, mask=None)).view(*call.q.shape[:3], call.v.shape[3])
    return packed_attention(*call[:3], documents.packing, scale=call.scale, window=window, sinks=call.sinks)


def _is_within_documents(call: AttentionCall) -> bool:
    """Attention to earlier and later tokens of documents that the host knows, in half precision on a GPU.

    FlexAttention computes blocks of 128 tokens of a row, of which short documents fill a part.
    """
    is_known = isinstance(call.mask, DocumentMask) and not torch.compiler.is_compiling()
    return is_known and call.sinks is None and call.softcap is None and has_boundaries(*call[:3])


def _within_documents(call: AttentionCall) -> Tensor:
    assert isinstance(call.mask, DocumentMask)
    return attend_within(*call[:3], call.mask.within.boundaries, call.scale, call.mask.window)


def _is_long(call: AttentionCall) -> bool:
    """A mask so large that a GPU does not create its matrix, or with sinks the scores."""
    if not isinstance(call.mask, AttentionMask) or call.on_cpu or call.q.shape[-1] < 16:
        return False
    if call.q.dtype == torch.float64 or under_transform():  # vmap does not support FlexAttention
        return False
    if call.sinks is None:
        return call.q.shape[1] > 1 and call.scores > _MAX_SCORES
    # No kernel for short masks has sinks: the scores of all heads are materialized.
    return call.is_differentiable or len(call.q) * call.q.shape[2] * call.scores > _MAX_SCORES_WITH_SINKS


def _flex_attention(call: AttentionCall) -> Tensor:
    q, k, v, mask, scale, softcap, _, sinks = call
    assert isinstance(mask, AttentionMask)
    if q.is_meta:
        out, lse = attention_on_meta(q, k, v, is_causal=True)
        return out if sinks is None else apply_sinks(out, lse, sinks)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    arguments = q, k, v, _softcapped(softcap), mask.block_mask(), scale, q.shape[1] != k.shape[1]
    tiles = flex_tiles(q)
    with nullcontext() if torch.compiler.is_compiling() else _many_flex_kernels():
        if sinks is None:
            plain: Tensor = _compiled_flex_attention()(*arguments, kernel_options=tiles)
            return plain.transpose(1, 2)
        from torch.nn.attention.flex_attention import AuxRequest

        out, aux = _compiled_flex_attention()(*arguments, return_aux=AuxRequest(lse=True), kernel_options=tiles)
    return apply_sinks(out.transpose(1, 2), aux.lse, sinks)


def flex_tiles(x: Tensor) -> dict[str, int] | None:
    """Returns FlexAttention's `kernel_options` for large heads, (..., D), whose own tiles exceed the shared memory."""
    if x.shape[-1] <= _MAX_FUSED_HEAD:
        return None
    has_large_memory = torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    queries, keys, tile, warps = (64, 64, 32, 8) if has_large_memory and x.itemsize == 2 else (32, 16, 16, 4)
    forward = {"fwd_BLOCK_M": queries, "fwd_BLOCK_N": keys, "fwd_num_stages": 1, "fwd_num_warps": warps}
    backward = {f"bwd_BLOCK_{name}": tile for name in ("M1", "N1", "M2", "N2")}
    return {**forward, **backward, "bwd_num_stages": 1, "bwd_num_warps": warps}


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


def _has_large_heads(call: AttentionCall) -> bool:
    """Heads larger than those of fused kernels, of many queries without a mask."""
    q, k, v, mask, scale, softcap, _, sinks = call
    is_plain = mask is None and softcap is None and sinks is None and (scale is None or scale > 0)
    is_large = q.shape[-1] > _MAX_FUSED_HEAD and q.shape[1] > 1 and k.shape == v.shape
    return is_plain and is_large and q.dtype == k.dtype == v.dtype and uses_triton(q, k, v)


def _large_heads(call: AttentionCall) -> Tensor:
    return large_head_attention(*call[:3], scale=call.scale, is_causal=call.is_causal)


def _is_divided_on_cpu(call: AttentionCall) -> bool:
    """Packed rows on a CPU, whose documents the host knows, in inference mode.

    All forwards of training have the bits of captured steps, which do not know the documents.
    """
    if torch.compiler.is_compiling() or not (call.on_cpu and torch.is_inference_mode_enabled()):
        return False
    divided = getattr(call.mask, "divided", None)
    return divided is not None and divided.rows is not None and call.q.shape[1] == call.k.shape[1]


def _document_by_document(call: AttentionCall) -> Tensor:
    """Computes each document alone, without the scores of tokens of different documents."""
    assert isinstance(call.mask, Mask)
    rows = []
    for row, parts in enumerate(call.mask.parts):
        outputs, end = [], 0
        for start, length, mask, is_causal in parts:
            outputs.append(_zeros(call, start - end))
            end = start + length
            q, k, v = (x[row : row + 1, start:end] for x in call[:3])
            outputs.append(compute(call._replace(q=q, k=k, v=v, mask=mask, is_causal=is_causal)))
        rows.append(torch.cat([*outputs, _zeros(call, call.q.shape[1] - end)], 1))
    return torch.cat(rows)


def _zeros(call: AttentionCall, tokens: int) -> Tensor:
    """Returns outputs for padding between documents, (1, tokens, N, D)."""
    return call.q.new_zeros(1, tokens, call.q.shape[2], call.v.shape[3])


def _is_half_on_cpu(call: AttentionCall) -> bool:
    return call.on_cpu and call.q.dtype in (torch.bfloat16, torch.float16)


def _in_fp32(call: AttentionCall) -> Tensor:
    """Computes in fp32 and rounds once.

    Scores in half precision would move probabilities where keys have large biases, as in Qwen2. The keys of each row
    come first and padding last, so that a row has the same sums as alone, whatever the padding on its left.
    """
    q, k, v, mask = call[:4]
    wide = accumulation_dtype(q.dtype)
    added = call.additive(wide)
    if isinstance(mask, Mask) and mask.padding_mask is not None and added is not None:
        order = mask.padding_mask.logical_not().byte().argsort(stable=True, dim=1)
        # Not take_along_dim, for which torch.compile compiles each size.
        k, v = (x.gather(1, order[:, :, None, None].expand_as(x)) for x in (k, v))
        added = added.gather(3, order[:, None, None].expand_as(added))
    return reference(call._replace(q=q.to(wide), k=k.to(wide), v=v.to(wide), mask=added)).to(q.dtype)


def _needs_scores(call: AttentionCall) -> bool:
    """No fused kernel computes soft caps, under transforms some tensors, and on a CPU masks accurately."""
    # vmap has no rule for the kernels of fp32 tensors, nor for that of a CPU.
    has_rule = not (under_transform() and (call.on_cpu or call.q.dtype == torch.float32))
    # On a CPU, torch's fused kernel gives rows without visible keys gradients many times too large.
    is_accurate = not call.on_cpu or call.mask is None or call.q.shape[1] == 1
    return call.softcap is not None or not has_rule or not is_accurate


def _reference(call: AttentionCall) -> Tensor:
    return reference(call._replace(mask=call.additive(call.q.dtype)))


def _on_meta(call: AttentionCall) -> Tensor:
    call.additive(call.q.dtype)  # allocated as on a GPU
    return attention_on_meta(call.q, call.k, call.v, call.is_causal)[0]


def _has_sink_kernel(call: AttentionCall) -> bool:
    if call.sinks is None or call.mask is not None:
        return False
    return attention_kernel(call.q, call.k, call.v, call.masks_future) is not None


def _sink_kernel(call: AttentionCall) -> Tensor:
    assert call.sinks is not None
    return sink_attention(call.q, call.k, call.v, call.sinks, scale=call.scale, is_causal=call.masks_future)


def _fused_sdpa(call: AttentionCall) -> Tensor:
    q, k, v = call.q, call.k, call.v
    # The only kernel that keeps no scores has equal numbers of heads.
    if q.is_cuda and (q.dtype == torch.float32 or q.shape[-1] > _MAX_FUSED_HEAD):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v, mask = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), call.additive(q.dtype)
    with _fastest_first(q) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(
            q, k, v, mask, scale=call.scale, is_causal=call.masks_future, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def _fastest_first(x: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which torch uses the fastest kernel on the GPU of x, and after which it chooses as before.

    torch sets its own order at the first choice of a process. A context around that choice would undo it.
    """
    if torch.compiler.is_compiling():
        return sdpa_kernel(_FASTEST_FIRST, set_priority=True)
    _let_torch_order_kernels(x.device)
    return _FASTEST


class _FastestFirst:
    """`sdpa_kernel(_FASTEST_FIRST, set_priority=True)` in a tenth of its time, 17 microseconds for each layer.

    torch's choice belongs to the process: the first thread that enters makes it, the last that leaves undoes it.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = [is_enabled() for is_enabled, _ in _SWITCHES], torch._C._get_sdp_priority_order()
                _choose_kernels(*_CHOICE)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _choose_kernels(*self._before)


_FASTEST = _FastestFirst()


def _choose_kernels(enabled: list[bool], order: list[int]) -> None:
    for (_, enable), is_enabled in zip(_SWITCHES, enabled, strict=True):
        enable(is_enabled)
    torch._C._set_sdp_priority_order(order)


@cached
def _let_torch_order_kernels(device: torch.device) -> None:
    x = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    torch._fused_sdp_choice(x, x, x)


class Path(NamedTuple):
    """A way to compute attention.

    Attributes:
        can: whether it can compute a call, or must, since the following ones cannot.
        run: (B, T, N, D).
    """

    can: Callable[[AttentionCall], bool]
    run: Callable[[AttentionCall], Tensor]


PATHS = (
    Path(_decodes, _decode_kernel),
    Path(_can_pack, _packed),
    Path(_is_within_documents, _within_documents),
    Path(_is_long, _flex_attention),
    Path(_has_large_heads, _large_heads),
    Path(_is_divided_on_cpu, _document_by_document),
    Path(_is_half_on_cpu, _in_fp32),
    Path(_needs_scores, _reference),
    Path(lambda call: call.q.is_meta, _on_meta),
    Path(_has_sink_kernel, _sink_kernel),
    Path(lambda call: call.sinks is not None, _reference),
    Path(lambda call: True, _fused_sdpa),
)


def attend_unequal(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None = None, scale: float | None = None
) -> Tensor:
    """`attend` for values with fewer features than keys, such as 128 and 192.

    Of the fused causal kernels only cuDNN's accepts this, on some GPUs and in some versions. Where it does not, values
    are padded with zeros: torch would choose a slower kernel that accepts unequal numbers.

    Args:
        q: (B, T, N, D).
        k: (B, S, N, D).
        v: (B, S, N, V), V <= D.
        mask: see `attend`.
        scale: factor of the scores; None for D^-0.5.

    Returns:
        (B, T, N, V).
    """
    missing, tokens = q.shape[-1] - v.shape[-1], q.shape[1]
    is_supported = missing <= 0 or (tokens > 1 and (mask is not None or _cudnn_accepts(q, k, v)))
    if is_supported or not q.is_cuda or under_transform():
        return attend(q, k, v, mask, scale)
    return attend(q, k, F.pad(v, (0, missing)), mask, scale)[..., : v.shape[-1]]


def _cudnn_accepts(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not q.is_cuda or torch.compiler.is_compiling():  # which cannot ask; cuDNN 9 accepts 192 and 128 on Hopper
        return True
    from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, False))


def attend_and_record(call: AttentionCall, record: list[Tensor]) -> Tensor:
    """`attend` in plain torch, which appends the probabilities (B, N, T, S) to `record`."""
    dtype = call.q.dtype
    k, v = from_storage(call.k, dtype), from_storage(call.v, dtype)
    probabilities = attention_probabilities(call._replace(k=k, v=v, mask=call.additive(dtype)))
    record.append(probabilities)
    return apply_probabilities(probabilities, v)


def reference(call: AttentionCall) -> Tensor:
    """`attend` in plain torch, with an additive mask or none; see `attention_probabilities`."""
    return apply_probabilities(attention_probabilities(call), call.v)


def attention_probabilities(call: AttentionCall) -> Tensor:
    """Returns the probabilities (B, N, T, S) of a call with an additive mask, or none.

    Scores are in the dtype of the inputs, the softmax in fp32.
    """
    q, k, _, mask, scale, softcap, is_causal, sinks = call
    q, k = q.transpose(1, 2), _repeat_heads(k, q.shape[2])
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask  # type: ignore[operator]
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
