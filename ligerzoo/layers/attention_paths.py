"""Attention as an ordered table of paths, of which the first that can computes a call.

Shapes: B batch, T tokens in the call, S keys (cached and new), N query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import decode_attention, large_head_attention, packed_attention, sink_attention
from ligerzoo.kernels.autograd import under_transform
from ligerzoo.kernels.dispatch import accumulation_dtype, uses_triton
from ligerzoo.kernels.exact_attention import follows_cudnn
from ligerzoo.kernels.fp8 import FP8
from ligerzoo.kernels.fused_attention import attend_within, attention_kernel, has_boundaries, has_windows
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.layers.attention_on_meta import attention_on_meta
from ligerzoo.layers.flex_attention import run_flex_attention
from ligerzoo.layers.fused_sdpa import MAX_FUSED_HEAD, fused_sdpa
from ligerzoo.layers.masks import AttentionMask, DocumentMask, Mask, single_query_interval
from ligerzoo.layers.plain_attention import reference

_MAX_SCORES = 1024 * 1024
"""Largest T * S for which a GPU materializes the mask or the scores as a matrix."""

_MAX_SCORES_WITH_SINKS = 16 * _MAX_SCORES
"""Likewise, the scores of all heads and rows for attention with sinks that is not differentiated."""


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


def _has_large_heads(call: AttentionCall) -> bool:
    """Heads larger than those of fused kernels, of many queries without a mask."""
    q, k, v, mask, scale, softcap, _, sinks = call
    is_plain = mask is None and softcap is None and sinks is None and (scale is None or scale > 0)
    is_large = q.shape[-1] > MAX_FUSED_HEAD and q.shape[1] > 1 and k.shape == v.shape
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
    Path(_is_long, run_flex_attention),
    Path(_has_large_heads, _large_heads),
    Path(_is_divided_on_cpu, _document_by_document),
    Path(_is_half_on_cpu, _in_fp32),
    Path(_needs_scores, _reference),
    Path(lambda call: call.q.is_meta, _on_meta),
    Path(_has_sink_kernel, _sink_kernel),
    Path(lambda call: call.sinks is not None, _reference),
    Path(lambda call: True, fused_sdpa),
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
