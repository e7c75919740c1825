"""Routes a few tokens to experts, as in each step of decoding a mixture of experts (Shazeer et al. 2017, section 2.1).

For each token t, with p = softmax(logits_t) in fp32, the experts with the k largest logits, weighted by p, or by p over
the sum of the k. The pairs (token, expert) become rows, sorted by expert and then by token, as in `routing`; but only
experts with tokens are listed, so that a kernel's programs are as many as the experts that the tokens can reach.

One program holds the logits of all tokens. A chosen expert is a 1 in a matrix of tokens and experts: sums over tokens
count the rows of an expert, and prefix sums over tokens, experts and both number the rows. There are no atomics, no
host sync, and the shapes depend on the shapes of the logits only.

Not differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.checks import check_flag, check_integer, check_tensor
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, as_rows, next_power_of_2, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp
from ligerzoo.kernels.registration import register

_MAX_LOGITS = 32768
"""More logits do not fit in the registers of a program."""


class Routing(NamedTuple):
    """The experts of T tokens, k each. Active expert i has the rows from bounds[i] to bounds[i + 1].

    Attributes:
        experts: (A,) int32, A = min(E, T * k): ids of the active experts, ascending, then zeros.
        bounds: (A + 1,) int32, first row of each active expert, then T * k.
        tokens: (T * k,) int32, the token of each row. The rows of an expert are in the order of tokens.
        weights: (T * k,) the expert weight of each row; fp32, or fp64 for logits in fp64.
        rows: (T, k) int32, the rows of each token, in the order of experts.
    """

    experts: Tensor
    bounds: Tensor
    tokens: Tensor
    weights: Tensor
    rows: Tensor


def reference(logits: Tensor, num_experts_per_token: int, renormalize: bool = True) -> Routing:
    """`route` in plain torch: the specification, the CPU path and the test oracle."""
    # A stable sort: of equal logits, `topk` may return any.
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_experts_per_token].sort(-1).values
    weights = logits.softmax(-1, dtype=accumulation_dtype(logits.dtype)).gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    sorted_ids, order = ids.flatten().sort(stable=True)
    n_rows, n_active = len(order), min(logits.shape[1], len(order))
    is_first = sorted_ids != sorted_ids.roll(1)
    is_first[:1] = True
    active = is_first.cumsum(0) - 1  # index of each row's expert among the active experts
    indices = torch.arange(max(n_rows, n_active + 1), device=logits.device)
    return Routing(
        experts=sorted_ids.new_zeros(n_active).scatter_(0, active, sorted_ids).int(),
        bounds=torch.searchsorted(active, indices[: n_active + 1], out_int32=True),
        tokens=(order // num_experts_per_token).int(),
        weights=weights.flatten()[order],
        rows=torch.empty_like(order).scatter_(0, order, indices[:n_rows]).view(ids.shape).int(),
    )


@jit
def _sort_keys(logits, expert, EXPERTS: tl.constexpr):
    """Integers in the order of the logits, NaN above all. Of equal logits, that of the lower expert is larger.

    The smallest integer is not among them.
    """
    BITS: tl.constexpr = logits.dtype.primitive_bitwidth
    if BITS == 16:
        bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = logits.to(tl.int32, bitcast=True).to(tl.int64)
    LARGEST: tl.constexpr = 2 ** (BITS - 1) - 1
    ordered = tl.where(bits < 0, bits ^ LARGEST, bits)
    ordered = tl.where(logits == 0.0, 0, tl.where(logits == logits, ordered, LARGEST))
    return (ordered << BITS) | (EXPERTS - 1 - expert)


@kernel
def _route_kernel(
    logits_ptr, experts_ptr, bounds_ptr, tokens_ptr, weights_ptr, rows_ptr, stride, n_tokens, n_experts, n_listed,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    token, expert = tl.arange(0, TOKENS)[:, None], tl.arange(0, EXPERTS)[None, :]
    mask = (token < n_tokens) & (expert < n_experts)
    logits = tl.load(logits_ptr + token * stride + expert, mask=mask, other=-float("inf"))

    keys = _sort_keys(logits, expert, EXPERTS)
    taken = tl.full((TOKENS, EXPERTS), -(2 ** (keys.dtype.primitive_bitwidth - 1)), keys.dtype)
    keys = tl.where(mask, keys, taken)
    for _ in range(SLOTS):
        keys = tl.where(keys == tl.max(keys, axis=1)[:, None], taken, keys)
    is_chosen = mask & (keys == taken)

    logits = logits.to(tl.float32)
    exponentials = exp(logits - tl.max(logits, axis=1)[:, None], True)
    total = tl.sum(tl.where(is_chosen, exponentials, 0.0) if RENORMALIZE else exponentials, axis=1)
    weights = exponentials / total[:, None]

    chosen = is_chosen.to(tl.int32)
    counts = tl.sum(chosen, axis=0)
    starts = tl.cumsum(counts, axis=0) - counts
    rows = starts[None, :] + tl.cumsum(chosen, axis=0) - 1
    nth_of_token = tl.cumsum(chosen, axis=1) - 1
    tl.store(tokens_ptr + rows, token + tl.zeros_like(rows), mask=is_chosen)
    tl.store(weights_ptr + rows, weights, mask=is_chosen)
    tl.store(rows_ptr + token * SLOTS + nth_of_token, rows, mask=is_chosen)

    index = tl.arange(0, EXPERTS)
    is_active = (counts > 0).to(tl.int32)
    n_active = tl.sum(is_active, axis=0)
    active = tl.cumsum(is_active, axis=0) - 1
    tl.store(experts_ptr + active, index, mask=is_active > 0)
    tl.store(bounds_ptr + active, starts, mask=is_active > 0)
    is_rest = (index >= n_active) & (index < n_listed)
    tl.store(experts_ptr + index, tl.zeros_like(index), mask=is_rest)
    tl.store(bounds_ptr + index, tl.zeros_like(index) + n_tokens * SLOTS, mask=is_rest)
    tl.store(bounds_ptr + n_listed, n_tokens * SLOTS)


def _allocate(logits: Tensor, num_experts_per_token: int) -> Routing:
    n_tokens, n_experts = logits.shape
    n_rows = n_tokens * num_experts_per_token
    experts, bounds, tokens, rows = (
        logits.new_empty(shape, dtype=torch.int32)
        for shape in (
            min(n_experts, n_rows),
            min(n_experts, n_rows) + 1,
            n_rows,
            (n_tokens, num_experts_per_token),
        )
    )
    return Routing(experts, bounds, tokens, logits.new_empty(n_rows, dtype=torch.float32), rows)


@register("route", fake=_allocate)
def _route(logits: Tensor, num_experts_per_token: int, renormalize: bool) -> Routing:
    routing, logits = _allocate(logits, num_experts_per_token), as_rows(logits)
    (n_tokens, n_experts), (tokens, experts) = logits.shape, map(next_power_of_2, logits.shape)
    _route_kernel[1](
        logits, *routing, logits.stride(0), n_tokens, n_experts, len(routing.experts), tokens, experts,
        num_experts_per_token, renormalize, num_warps=min(32, max(1, tokens * experts // 512)),
    )  # fmt: skip
    return routing


def fits_one_program(num_tokens: int, num_experts: int) -> bool:
    """Whether the kernel of `route` supports these numbers of tokens and experts."""
    return next_power_of_2(num_tokens) * next_power_of_2(num_experts) <= _MAX_LOGITS


def route(
    logits: Tensor, num_experts_per_token: int, *, renormalize: bool = True, backend: Backend = "auto"
) -> Routing:
    """Selects k of E experts for each token, and sorts the pairs of token and expert. Not differentiable.

    The weights are those of `ligerzoo.layers.routers.Router`: the k largest of softmax(logits) in fp32. Of equal
    logits, those of lower experts count as larger. Causes no host sync.

    Args:
        logits: (T, E) router logits, any strides.
        num_experts_per_token: k.
        renormalize: divide the k probabilities by their sum, so that a token's weights add up to one.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference). Triton supports up to 64 tokens
            and 512 experts, or as many logits in another shape.

    Returns:
        The input of `decode_experts`.

    Raises:
        TypeError: an argument has another type.
        ValueError: `logits` is not (T, E) or not floating-point, k is not between 1 and E, or `backend` is unknown or
            does not support the logits.
    """
    check_tensor("route", "logits", logits)
    check_integer("route", "num_experts_per_token", num_experts_per_token, 1)
    check_flag("route", renormalize=renormalize)
    if logits.dim() != 2 or num_experts_per_token > logits.shape[1]:
        raise ValueError(
            f"route: logits are {tuple(logits.shape)} and num_experts_per_token={num_experts_per_token}; expected "
            "shape (T, E) with at least that many experts E"
        )
    fits = fits_one_program(*logits.shape)
    if backend == "triton" and not fits:
        raise ValueError(
            f'route: backend="triton" with logits {tuple(logits.shape)}; expected at most {_MAX_LOGITS} logits, their '
            'dimensions rounded up to powers of 2, or backend="auto"'
        )
    with torch.no_grad():
        if uses_triton(logits, backend=backend) and fits and len(logits):
            return _route(logits, num_experts_per_token, renormalize)
        return reference(logits, num_experts_per_token, renormalize)
