"""Finds which tokens of each row top-k, top-p and min-p keep, without sorting and without a host sync.

All three keep the most likely tokens, so two numbers say which: the smallest logit that is kept, and the last of the
token ids with this logit. In this order, with p = softmax(x / T) of what the previous filter keeps:

    top-k   keeps x_i >= the k-th largest logit, and so all ties with it (Fan et al. 2018)
    top-p   keeps the fewest tokens whose total probability reaches top_p; of ties, the lower ids (Holtzman et al. 2019)
    min-p   keeps p_i >= min_p * max(p), which is x_i >= max(x) + T log(min_p) (Nguyen et al. 2024)

The kernel searches for the largest logit t such that enough tokens (top-k) or probabilities (top-p) are at least t. It
searches among the 2^32 floats: each of about 16 passes over the row, which stays in the L2 cache, divides the interval
by four. The sums of a row do not depend on the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, as_rows, next_power_of_2, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.row_chunks import in_row_chunks
from ligerzoo.kernels.tiling import StridedRows
from ligerzoo.tensor_checks import check_floats, check_tensor

_BLOCK = 8192  # columns that a program reads at a time


class FilterBounds(NamedTuple):
    """What `filter_bounds` returns. Tokens are kept whose logit is above `threshold`, or equal and the id not greater.

    Attributes:
        threshold: (R,) fp32, the smallest logit that is kept; -inf keeps all.
        last_token: (R,) int64, the last token with this logit that is kept.
    """

    threshold: Tensor
    last_token: Tensor


def reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> FilterBounds:
    """`filter_bounds` in plain torch: the specification, the CPU path and the test oracle."""
    temperature, top_k, top_p, min_p = (t[:, None] for t in (temperature, top_k, top_p, min_p))
    temperature = temperature.where(temperature > 0, 1)
    descending, order = logits.float().sort(descending=True, stable=True)
    kept = descending >= descending.gather(1, top_k.clamp(1, logits.shape[1]) - 1)
    scaled = (descending - descending[:, :1]) / temperature
    probabilities = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    kept &= (mass_before < top_p) | (top_p == 1)  # rounded probabilities may sum to 1 before the last token
    floor = descending[:, :1] + temperature * min_p.log()
    kept &= descending >= floor
    last = kept.sum(1, keepdim=True).clamp(min=1) - 1  # a tiny top_p may round to 0
    return FilterBounds(descending.gather(1, last)[:, 0], order.gather(1, last)[:, 0])


@jit
def _to_key(x):
    """32-bit integers in the order of the floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _from_key(key):
    """The float of `_to_key`."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@jit
def _load(row_ptr, start, n_cols, maximum, steepness, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of a block of a row, and weights: 1, or exp((x - maximum) / temperature). Weights beyond the end are 0."""
    cols = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
    weights = tl.exp2(steepness * (x - maximum)) if BY_MASS else tl.where(cols < n_cols, 1.0, 0.0)
    return _to_key(x), weights


@jit
def _weight_from(row_ptr, n_cols, key, maximum, steepness, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Total weight of the logits whose key is at least `key`."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        keys, weights = _load(row_ptr, start, n_cols, maximum, steepness, BY_MASS, BLOCK)
        total += tl.where(keys >= key, weights, 0.0)
    return tl.sum(total, axis=0)


@jit
def _search(row_ptr, n_cols, low, high, target, maximum, steepness, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from `low` to `high` such that the weight of the logits from it is at least `target`.

    The bounds are int64: their difference may not fit into 32 bits. Only keys of NaN reach 2^31 - 1.
    """
    while low < high:
        step = (high - low) // 4 + 1
        key1 = tl.minimum(low + step, 0x7FFFFFFF).to(tl.int32)
        key2 = tl.minimum(low + 2 * step, 0x7FFFFFFF).to(tl.int32)
        key3 = tl.minimum(low + 3 * step, 0x7FFFFFFF).to(tl.int32)
        total1 = tl.zeros((BLOCK,), dtype=tl.float32)
        total2 = tl.zeros((BLOCK,), dtype=tl.float32)
        total3 = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, n_cols, BLOCK):
            keys, weights = _load(row_ptr, start, n_cols, maximum, steepness, BY_MASS, BLOCK)
            total1 += tl.where(keys >= key1, weights, 0.0)
            total2 += tl.where(keys >= key2, weights, 0.0)
            total3 += tl.where(keys >= key3, weights, 0.0)
        quarters = (tl.sum(total1, axis=0) >= target).to(tl.int64)
        quarters += (tl.sum(total2, axis=0) >= target).to(tl.int64)
        quarters += (tl.sum(total3, axis=0) >= target).to(tl.int64)
        low = tl.minimum(low + quarters * step, high)
        high = tl.minimum(low + step - 1, high)
    return low


class _Options(NamedTuple):
    """The options of each row."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@kernel
def _kernel(logits, filters, bounds, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits.ptr + row * logits.row_stride
    top_k, top_p, min_p = tl.load(filters.top_k + row), tl.load(filters.top_p + row), tl.load(filters.min_p + row)
    temperature = tl.load(filters.temperature + row)
    temperature = tl.where(temperature > 0.0, temperature, 1.0)
    threshold = -float("inf")
    last_token = tl.full((), n_cols, dtype=tl.int64)
    if (top_k < n_cols) | (top_p < 1.0) | (min_p > 0.0):
        steepness = 1.4426950408889634 / temperature
        maxima = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
            maxima = tl.maximum(maxima, x)
        maximum = tl.max(maxima, axis=0)
        low = tl.full((), -0x7F800001, dtype=tl.int64)  # the key of -inf
        high = _to_key(maximum).to(tl.int64)
        if top_k < n_cols:
            low = _search(row_ptr, n_cols, low, high, top_k.to(tl.float32), maximum, steepness, False, BLOCK)
        if top_p < 1.0:
            target = top_p * _weight_from(row_ptr, n_cols, low, maximum, steepness, True, BLOCK)
            low = _search(row_ptr, n_cols, low, high, target, maximum, steepness, True, BLOCK)
            missing = target - _weight_from(row_ptr, n_cols, low + 1, maximum, steepness, True, BLOCK)
            weight = tl.exp2(steepness * (_from_key(low) - maximum))
            n_ties = tl.where(weight > 0.0, missing / weight, 1.0)
            n_ties = tl.ceil(tl.minimum(tl.maximum(n_ties, 1.0), n_cols * 1.0))
            last_token = _nth_tie(row_ptr, n_cols, low, n_ties.to(tl.int32), BLOCK)
        threshold = _from_key(low)
        floor = maximum + temperature * tl.log(min_p)
        if floor > threshold:
            threshold = floor
            last_token = tl.full((), n_cols, dtype=tl.int64)
    tl.store(bounds.threshold + row, threshold)
    tl.store(bounds.last_token + row, last_token)


@jit
def _nth_tie(row_ptr, n_cols, key, n, BLOCK: tl.constexpr):
    """The n-th column, counted from 1, whose logit has this key; `n_cols` if there are fewer."""
    found = tl.full((BLOCK,), n_cols, dtype=tl.int64)
    seen = tl.zeros((), dtype=tl.int32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=float("nan")).to(tl.float32)
        is_tie = ((x == x) & (_to_key(x) == key)).to(tl.int32)
        is_nth = (is_tie != 0) & (seen + tl.cumsum(is_tie, axis=0) == n)
        found = tl.where(is_nth, cols.to(tl.int64), found)
        seen += tl.sum(is_tie, axis=0)
    return tl.min(found, axis=0)


def _allocate(logits: Tensor) -> FilterBounds:
    threshold, last_token = (logits.new_empty(logits.shape[0], dtype=dtype) for dtype in (torch.float32, torch.int64))
    return FilterBounds(threshold, last_token)


@register("filter_bounds", fake=_allocate)
def _bounds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> FilterBounds:
    bounds = _allocate(logits)
    n_rows, n_cols = logits.shape
    block = min(_BLOCK, max(128, next_power_of_2(n_cols)))
    options, warps = _Options(temperature, top_k, top_p, min_p), max(4, block // 512)
    _kernel[n_rows](StridedRows(logits, logits.stride(0)), options, bounds, n_cols, block, num_warps=warps)
    return bounds


def filter_bounds(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    backend: Backend = "auto",
) -> FilterBounds:
    """Finds which tokens of each row top-k, then top-p, then min-p keep. Not differentiable, and no host sync.

    Args:
        logits: (R, V), before division by the temperature.
        temperature: (R,) fp32. 0 counts as 1.
        top_k: (R,) int64, at least 1; V or more keeps all tokens.
        top_p: (R,) fp32, in (0, 1]; 1 keeps all tokens.
        min_p: (R,) fp32, from 0 to 1; 0 keeps all tokens.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        The bounds that `sample_tokens` takes. They are undefined for a row with a NaN or inf.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes or dtypes are wrong, or `backend` is unknown or does not support the tensors.
    """
    check_floats("filter_bounds", logits=logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"filter_bounds: logits has shape {tuple(logits.shape)}; expected (R, V) with V > 0")
    of_rows = [(len(logits),)]
    for argument, value in {"temperature": temperature, "top_p": top_p, "min_p": min_p}.items():
        check_tensor("filter_bounds", argument, value, shapes=of_rows, device=logits.device)
    check_tensor("filter_bounds", "top_k", top_k, "integer", of_rows, logits.device)
    with torch.no_grad():
        if not uses_triton(logits, backend=backend):
            return in_row_chunks(reference, logits, temperature, top_k, top_p, min_p)
        return _bounds(as_rows(logits), temperature, top_k, top_p, min_p)
