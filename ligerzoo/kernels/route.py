"""Routes tokens to experts (Shazeer et al. 2017, section 2.1): any number in training, a few in each step of decoding.

`select_experts` and `route`: for each token t, with p = softmax(logits_t) in fp32, the experts with the k largest
logits, weighted by p, or by p over the sum of the k. Both give a token the same bits, whatever other tokens there are.

    dlogits = w (dw - sum_j w_j dw_j) for the chosen, if w is p over their sum;   else   [w dw] - p sum_j w_j dw_j

`route_sigmoid` (DeepSeek-V3, 2024, section 2.1.2): with s = sigmoid(logits_t) in fp32, the experts with the k largest
s + bias of the best groups of experts, those with the largest sums of their two best s + bias; weighted by a factor
times s, or times s over the sum of the k and a small number.

In both `route` functions, the pairs (token, expert) become rows, sorted by expert and then by token, as in `routing`;
but only experts with tokens are listed, so that a kernel's programs are as many as the experts that the tokens can
reach. The rows of one token are in the order of its choice. They are not differentiable.

One program holds the logits of all tokens. A chosen expert is a 1 in a matrix of tokens and experts: sums over tokens
count the rows of an expert, and prefix sums over tokens, experts and both number the rows. No atomics, no host sync,
and the shapes depend on the shapes of the logits only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.checks import AT_LEAST_1, FLAG, check
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, as_rows, cdiv, next_power_of_2, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats, check_tensor

_MAX_LOGITS = 32768
"""More logits do not fit in the registers of a program."""

_LOGITS = 2048
"""Logits of a program of `select_experts`."""


class Routing(NamedTuple):
    """The experts of T tokens, k each. Active expert i has the rows from bounds[i] to bounds[i + 1].

    Attributes:
        experts: (A,) int32, A = min(E, T * k): ids of the active experts, then zeros. They are ascending, but for one
            token the best is the first.
        bounds: (A + 1,) int32, first row of each active expert, then T * k.
        tokens: (T * k,) int32, the token of each row. The rows of an expert are in the order of tokens.
        weights: (T * k,) the expert weight of each row; fp32, or fp64 for logits in fp64.
        rows: (T, k) int32, the rows of each token, that of the best expert first.
        expert_ids: (T, k) int32, the experts of these rows.
    """

    experts: Tensor
    bounds: Tensor
    tokens: Tensor
    weights: Tensor
    rows: Tensor
    expert_ids: Tensor


def reference(logits: Tensor, num_experts_per_token: int, renormalize: bool = True) -> Routing:
    """`route` in plain torch: the specification, the CPU path and the test oracle."""
    return _sorted_by_expert(*select_reference(logits, num_experts_per_token, renormalize), logits.shape[1])


def select_reference(logits: Tensor, num_experts_per_token: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """`select_experts` in plain torch: the specification, the CPU path and the test oracle."""
    # A stable sort: of equal logits, `topk` may return any.
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_experts_per_token]
    weights = logits.softmax(-1, dtype=accumulation_dtype(logits.dtype)).gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) if renormalize else weights


class SigmoidOptions(NamedTuple):
    """Options of `route_sigmoid`, see there."""

    num_groups: int = 1
    num_selected_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    eps: float = 1e-20


def sigmoid_reference(logits: Tensor, bias: Tensor, num_experts_per_token: int, options: SigmoidOptions) -> Routing:
    """`route_sigmoid` in plain torch: the specification, the CPU path and the test oracle."""
    scores = logits.to(accumulation_dtype(logits.dtype)).sigmoid()
    selection = selection_scores(scores, bias, options.num_groups, options.num_selected_groups)
    ids = selection.sort(dim=-1, descending=True, stable=True).indices[:, :num_experts_per_token]
    weights = scores.gather(1, ids)
    if options.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + options.eps)
    return _sorted_by_expert(ids, weights * options.scale, logits.shape[1])


def selection_scores(scores: Tensor, bias: Tensor, num_groups: int = 1, num_selected_groups: int = 1) -> Tensor:
    """Returns the scores by which a sigmoid router selects experts, -inf outside of the selected groups.

    Args:
        scores: (T, E).
        bias: (E,).
        num_groups: number of groups of consecutive experts, of at least two experts each if there are several.
        num_selected_groups: number of groups from which a token's experts are selected.
    """
    biased = scores + bias
    if num_selected_groups == num_groups:
        return biased
    groups = biased.unflatten(1, (num_groups, -1))
    best = groups.topk(2).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, :num_selected_groups]
    is_selected = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, True)
    return groups.masked_fill(~is_selected[..., None], -torch.inf).flatten(1)


def _sorted_by_expert(ids: Tensor, weights: Tensor, n_experts: int) -> Routing:
    """Returns the rows of the pairs of token and expert, from expert ids (T, k) and expert weights."""
    indices = torch.arange(ids.numel() + 1, device=ids.device)
    sorted_ids, order = (ids[0], indices[: ids.numel()]) if len(ids) == 1 else ids.flatten().sort(stable=True)
    n_rows, n_active = len(order), min(n_experts, len(order))
    is_first = sorted_ids != sorted_ids.roll(1)
    is_first[:1] = True
    active = is_first.cumsum(0) - 1  # index of each row's expert among the active experts
    return Routing(
        experts=sorted_ids.new_zeros(n_active).scatter_(0, active, sorted_ids).int(),
        bounds=torch.searchsorted(active, indices[: n_active + 1], out_int32=True),
        tokens=(order // ids.shape[1]).int(),
        weights=weights.flatten()[order],
        rows=torch.empty_like(order).scatter_(0, order, indices[:n_rows]).view(ids.shape).int(),
        expert_ids=ids.int(),
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


@jit
def _ranks(keys, mask, COUNT: tl.constexpr):
    """The ranks of the COUNT largest distinct keys of a row, from 0 for the largest; COUNT for the other keys.

    `mask` is False for keys that are ignored. None of the keys is the smallest integer.
    """
    LOWEST: tl.constexpr = -(2 ** (keys.dtype.primitive_bitwidth - 1))
    keys = tl.where(mask, keys, LOWEST)
    ranks = tl.full(keys.shape, COUNT, tl.int32)
    for rank in range(COUNT):
        is_largest = (keys == tl.max(keys, axis=1)[:, None]) & (keys != LOWEST)
        ranks = tl.where(is_largest, rank, ranks)
        keys = tl.where(is_largest, LOWEST, keys)
    return ranks


@jit
def _sums(x):
    """The sums of rows of numbers from 0 to 1, (ROWS, 1). NaN stays NaN.

    In integers, so that the order of additions does not matter: it depends on the number of rows.
    """
    ONE: tl.constexpr = 2**40
    total = tl.sum((tl.where(x == x, x, 0.0) * ONE).to(tl.int64), axis=1)
    return (total.to(tl.float32) * (1 / ONE) + 0.0 * tl.sum(x, axis=1))[:, None]


class _Logits(NamedTuple):
    ptr: Tensor
    stride: int
    n_tokens: int
    n_experts: int


@jit
def _of_slot(x, ranks, slot):
    """The number of each token's expert with this rank, (TOKENS, 1)."""
    return tl.sum(tl.where(ranks == slot, x, 0), axis=1)[:, None]


@jit
def _store_rows(ranks, weights, token, routing, n_tokens, n_listed, EXPERTS: tl.constexpr, SLOTS: tl.constexpr):
    """Numbers the pairs of token and expert, and stores a `Routing`."""
    in_text = token < n_tokens
    chosen = ((ranks < SLOTS) & in_text).to(tl.int32)
    index = tl.arange(0, EXPERTS)
    counts = tl.sum(chosen, axis=0)
    starts = tl.cumsum(counts, axis=0) - counts
    is_one: tl.constexpr = token.shape[0] == 1
    rows = ranks if is_one else starts[None, :] + tl.cumsum(chosen, axis=0) - 1
    pairs = rows * EXPERTS + index[None, :]
    for slot in tl.range(SLOTS, loop_unroll_factor=4):
        pair, weight = _of_slot(pairs, ranks, slot), _of_slot(weights, ranks, slot)
        row, expert = pair // EXPERTS, pair % EXPERTS
        tl.store(routing.tokens + row, token, mask=in_text)
        tl.store(routing.weights + row, weight, mask=in_text)
        tl.store(routing.rows + token * SLOTS + slot, row, mask=in_text)
        tl.store(routing.expert_ids + token * SLOTS + slot, expert, mask=in_text)
        if is_one:
            tl.store(routing.experts + row, expert)
            tl.store(routing.bounds + row, row)
    tl.store(routing.bounds + n_listed, n_tokens * SLOTS)
    if not is_one:
        is_active = (counts > 0).to(tl.int32)
        n_active = tl.sum(is_active, axis=0)
        active = tl.cumsum(is_active, axis=0) - 1
        tl.store(routing.experts + active, index, mask=is_active > 0)
        tl.store(routing.bounds + active, starts, mask=is_active > 0)
        is_rest = (index >= n_active) & (index < n_listed)
        tl.store(routing.experts + index, tl.zeros_like(index), mask=is_rest)
        tl.store(routing.bounds + index, tl.zeros_like(index) + n_tokens * SLOTS, mask=is_rest)


@jit
def _load_logits(logits, other, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """The logits of a program, their tokens, from 0, their experts, and which experts exist.

    Tokens that do not exist have the logits of the last one.
    """
    token, expert = tl.arange(0, TOKENS)[:, None], tl.arange(0, EXPERTS)[None, :]
    row = tl.minimum(tl.program_id(0).to(tl.int64) * TOKENS + token, logits.n_tokens - 1)
    mask = expert < logits.n_experts
    return tl.load(logits.ptr + row * logits.stride + expert, mask=mask, other=other), token, expert, mask


@jit
def _chosen(logits, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, RENORMALIZE: tl.constexpr):
    """Of the logits of a program: the ranks of the experts, from 0 to SLOTS, their weights, the tokens, the experts."""
    scores, token, expert, mask = _load_logits(logits, -float("inf"), TOKENS, EXPERTS)
    ranks = _ranks(_sort_keys(scores, expert, EXPERTS), mask, SLOTS)
    scores = scores.to(tl.float32)
    exponentials = exp(scores - tl.max(scores, axis=1)[:, None], True)
    weights = exponentials / _sums(tl.where(ranks < SLOTS, exponentials, 0.0) if RENORMALIZE else exponentials)
    return ranks, weights, token, expert


@kernel
def _select_kernel(
    logits, ids_ptr, w_ptr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, RENORMALIZE: tl.constexpr
):
    ranks, weights, token, expert = _chosen(logits, TOKENS, EXPERTS, SLOTS, RENORMALIZE)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for slot in tl.range(SLOTS, loop_unroll_factor=4):
        offset, in_text = (first + token) * SLOTS + slot, first + token < logits.n_tokens
        tl.store(ids_ptr + offset, _of_slot(expert + tl.zeros_like(ranks), ranks, slot), mask=in_text)
        tl.store(w_ptr + offset, _of_slot(weights, ranks, slot), mask=in_text)


@kernel
def _route_kernel(
    logits, routing, n_listed,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    ranks, weights, token, _ = _chosen(logits, TOKENS, EXPERTS, SLOTS, RENORMALIZE)
    _store_rows(ranks, weights, token, routing, logits.n_tokens, n_listed, EXPERTS, SLOTS)


@kernel
def _route_sigmoid_kernel(
    logits, routing, n_listed, bias_ptr, scale, eps, group_size,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr,
    SELECTED_GROUPS: tl.constexpr,
):  # fmt: skip
    scores, token, expert, mask = _load_logits(logits, 0.0, TOKENS, EXPERTS)
    bias = tl.load(bias_ptr + expert, mask=expert < logits.n_experts, other=0.0)
    scores = 1.0 / (1.0 + exp(-scores.to(tl.float32), True))
    biased = scores + bias
    keys = _sort_keys(biased, expert, EXPERTS)
    selectable = mask
    if SELECTED_GROUPS < GROUPS:
        group = expert // group_size
        sums = tl.zeros((TOKENS, EXPERTS), tl.float32)  # of each expert's group
        for g in range(GROUPS):
            best = _ranks(keys, mask & (group == g), 2) < 2
            sums = tl.where(group == g, tl.sum(tl.where(best, biased, 0.0), axis=1)[:, None], sums)
        # The experts of a group have the same key, so each step takes a whole group.
        selectable = _ranks(_sort_keys(sums, group, EXPERTS), mask, SELECTED_GROUPS) < SELECTED_GROUPS
    ranks = _ranks(keys, selectable, SLOTS)

    weights = scores
    if RENORMALIZE:
        weights = weights / (tl.sum(tl.where(ranks < SLOTS, scores, 0.0), axis=1)[:, None] + eps)
    _store_rows(ranks, weights * scale, token, routing, logits.n_tokens, n_listed, EXPERTS, SLOTS)


def _allocate(logits: Tensor, num_experts_per_token: int) -> Routing:
    n_tokens, n_experts = logits.shape
    n_rows = n_tokens * num_experts_per_token
    n_listed = min(n_experts, n_rows)
    of_tokens = n_tokens, num_experts_per_token
    experts, bounds, tokens, rows, ids = (
        logits.new_empty(shape, dtype=torch.int32) for shape in (n_listed, n_listed + 1, n_rows, of_tokens, of_tokens)
    )
    return Routing(experts, bounds, tokens, logits.new_empty(n_rows, dtype=torch.float32), rows, ids)


def _strided(logits: Tensor) -> _Logits:
    logits = as_rows(logits)
    return _Logits(logits, logits.stride(0), *logits.shape)


def _warps(n_logits: int) -> int:
    return min(32, max(1, n_logits // 512))


def _launch_arguments(logits: Tensor, routing: Routing) -> tuple[tuple[object, ...], tuple[int, ...], int]:
    """The first arguments of the kernels of `route`, their first constants, and warps."""
    tokens, experts = map(next_power_of_2, logits.shape)
    arguments = _strided(logits), routing, len(routing.experts)
    return arguments, (tokens, experts, routing.rows.shape[1]), _warps(tokens * experts)


@register("route", fake=_allocate)
def _route(logits: Tensor, num_experts_per_token: int, renormalize: bool) -> Routing:
    routing = _allocate(logits, num_experts_per_token)
    arguments, constants, warps = _launch_arguments(logits, routing)
    _route_kernel[1](*arguments, *constants, renormalize, num_warps=warps)
    return routing


@register("route_sigmoid", fake=_allocate)
def _route_sigmoid(logits: Tensor, num_experts_per_token: int, bias: Tensor, options: SigmoidOptions) -> Routing:
    routing = _allocate(logits, num_experts_per_token)
    arguments, constants, warps = _launch_arguments(logits, routing)
    num_groups, num_selected_groups, renormalize, scale, eps = options
    selection = bias.contiguous(), scale, eps, logits.shape[1] // num_groups
    groups = num_groups, num_selected_groups
    _route_sigmoid_kernel[1](*arguments, *selection, *constants, renormalize, *groups, num_warps=warps)
    return routing


def fits_one_program(num_tokens: int, num_experts: int) -> bool:
    """Whether the kernel of `route` supports these numbers of tokens and experts."""
    return next_power_of_2(num_tokens) * next_power_of_2(num_experts) <= _MAX_LOGITS


def _allocate_selection(logits: Tensor, num_experts_per_token: int) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], num_experts_per_token
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


@register("select_experts", fake=_allocate_selection)
def _select(logits: Tensor, num_experts_per_token: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    ids, weights = _allocate_selection(logits, num_experts_per_token)
    if len(logits):
        experts = next_power_of_2(logits.shape[1])
        tokens = max(1, _LOGITS // experts)
        constants = tokens, experts, num_experts_per_token, renormalize
        _select_kernel[cdiv(len(logits), tokens)](
            _strided(logits), ids, weights, *constants, num_warps=_warps(tokens * experts)
        )
    return ids, weights


class _SelectExperts(FusedFunction):
    @staticmethod
    def forward(
        ctx: FusedContext, logits: Tensor, num_experts_per_token: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        ids, weights = _select(logits, num_experts_per_token, renormalize)
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(ids, weights, None if renormalize else logits)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return ids, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, _: Tensor, dweights: Tensor) -> tuple[Tensor | None, ...]:
        ids, weights, logits = ctx.saved_tensors
        products = weights * dweights
        total = products.sum(-1, keepdim=True)
        if logits is None:
            dlogits = weights.new_zeros(ctx.shape).scatter(1, ids, products - weights * total)
        else:
            dlogits = (-total * logits.softmax(-1, dtype=weights.dtype)).scatter_add(1, ids, products)
        return dlogits.to(ctx.dtype), None, None


def select_experts(
    logits: Tensor, num_experts_per_token: int, *, renormalize: bool, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Selects k of E experts for each token, for layers. Of equal logits, those of lower experts count as larger.

    Args:
        logits: (T, E) router logits, any strides.
        num_experts_per_token: k.
        renormalize: divide the k probabilities by their sum, so that a token's weights add up to one.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        Expert ids (T, k) int64, the most probable first, and their weights (T, k), fp32, or fp64 for logits in fp64.
    """
    if uses_triton(logits, backend=backend) and fits_one_program(1, logits.shape[1]):
        return _SelectExperts.apply(logits, num_experts_per_token, renormalize)
    return select_reference(logits, num_experts_per_token, renormalize)


def route(
    logits: Tensor, num_experts_per_token: int, *, renormalize: bool = True, backend: Backend = "auto"
) -> Routing:
    """Selects k of E experts for each token, and sorts the pairs of token and expert. Not differentiable.

    The weights are those of `ligerzoo.layers.routers.Router`, to the bit: the k largest of softmax(logits) in fp32. Of
    equal logits, those of lower experts count as larger. Causes no host sync.

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
    check("route", FLAG, renormalize=renormalize)
    _check_logits("route", logits, num_experts_per_token, backend)
    with torch.no_grad():
        if uses_triton(logits, backend=backend) and fits_one_program(*logits.shape) and len(logits):
            return _route(logits, num_experts_per_token, renormalize)
        return reference(logits, num_experts_per_token, renormalize)


def route_sigmoid(
    logits: Tensor,
    bias: Tensor,
    num_experts_per_token: int,
    *,
    num_groups: int = 1,
    num_selected_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    eps: float = 1e-20,
    backend: Backend = "auto",
) -> Routing:
    """Selects k of E experts for each token by biased sigmoid scores, and sorts the pairs of token and expert.

    The weights are those of `ligerzoo.layers.balanced_routers.SigmoidRouter`. Of equal biased scores, those of lower
    experts count as larger, and so do lower groups. Causes no host sync. Not differentiable.

    Args:
        logits: (T, E) router logits, any strides.
        bias: (E,) fp32, added to the scores for the selection only.
        num_experts_per_token: k, at most the number of experts in the selected groups.
        num_groups: number of groups of consecutive experts, a divisor of E. Several groups have two experts or more.
        num_selected_groups: number of groups from which a token's experts are selected.
        renormalize: divide the k scores by their sum plus `eps`.
        scale: factor of the weights.
        eps: a small positive number.
        backend: see `route`.

    Returns:
        The input of `decode_experts`.

    Raises:
        TypeError: an argument has another type.
        ValueError: as `route`; or `bias` has another shape, or the groups do not fit the experts.
    """
    check("route_sigmoid", FLAG, renormalize=renormalize)
    check("route_sigmoid", AT_LEAST_1, num_groups=num_groups)
    check("route_sigmoid", AT_LEAST_1, num_selected_groups=num_selected_groups)
    check_floats("route_sigmoid", bias=bias)
    _check_logits("route_sigmoid", logits, num_experts_per_token, backend)
    n_experts = logits.shape[1]
    group_size = n_experts // num_groups
    groups_fit = num_selected_groups <= num_groups and group_size * num_groups == n_experts
    if bias.shape != (n_experts,) or not groups_fit or (num_groups > 1 and group_size < 2):
        raise ValueError(
            f"route_sigmoid: logits are {tuple(logits.shape)}, bias {tuple(bias.shape)}, num_groups={num_groups} and "
            f"num_selected_groups={num_selected_groups}; expected (T, E), (E,), groups of E / num_groups >= 2 experts, "
            "and at most num_groups selected groups"
        )
    if num_experts_per_token > num_selected_groups * group_size:
        raise ValueError(
            f"route_sigmoid: num_experts_per_token={num_experts_per_token}; expected at most "
            f"{num_selected_groups * group_size}, the experts of {num_selected_groups} groups"
        )
    options = SigmoidOptions(num_groups, num_selected_groups, renormalize, float(scale), float(eps))
    with torch.no_grad():
        if uses_triton(logits, bias, backend=backend) and fits_one_program(*logits.shape) and len(logits):
            return _route_sigmoid(logits, num_experts_per_token, bias, options)
        return sigmoid_reference(logits, bias, num_experts_per_token, options)


def _check_logits(function: str, logits: Tensor, num_experts_per_token: int, backend: Backend) -> None:
    check_tensor(function, "logits", logits)
    check(function, AT_LEAST_1, num_experts_per_token=num_experts_per_token)
    if logits.dim() != 2 or num_experts_per_token > logits.shape[1]:
        raise ValueError(
            f"{function}: logits are {tuple(logits.shape)} and num_experts_per_token={num_experts_per_token}; expected "
            "shape (T, E) with at least that many experts E"
        )
    if backend == "triton" and not fits_one_program(*logits.shape):
        raise ValueError(
            f'{function}: backend="triton" with logits {tuple(logits.shape)}; expected at most {_MAX_LOGITS} logits, '
            'their dimensions rounded up to powers of 2, or backend="auto"'
        )
