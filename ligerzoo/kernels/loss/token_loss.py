"""What one row of logits gives: statistics, a loss, and the gradient of them all in one further pass.

With logits z, scale a, softcap c and temperature T:

    x_v = a z_v / T,  or  c tanh(a z_v / c) / T  with a softcap;
    m = max_v x_v,  s = log sum_v exp(x_v - m),  p_v = exp(x_v - m - s)      (m + s would swallow s where m is large);
    logp = x_y - m - s  of the target y,   logsumexp = m + s,   entropy = s - sum_v p_v (x_v - m);
    loss = -(1 - e) w_y logp + (e / V) sum_v w_v (logsumexp - x_v) + k logsumexp^2

for class weights w (1 without), label smoothing e (Szegedy et al. 2016, section 7) and z-loss k (Chowdhery et al. 2022,
section 5). For upstream gradients g of the loss, and l, h and q of logp, entropy and logsumexp,

    dx_v = p_v (A - h (x_v - m - s + entropy)) - B [v = y] - C w_v,
    A = g ((1 - e) w_y + e mean(w) + 2 k logsumexp) - l + q,   B = g (1 - e) w_y - l,   C = g e / V.

The smoothed part of the loss is computed as e mean(w) (logsumexp - r) - (e / V) sum_v w_v (x_v - r) with r = x_y, so
that a large number that all logits have in common cancels before it is summed. mean(w) is the same for all rows.

All is computed in fp32. A row that is ignored gives zeros, whatever its logits; a target outside [0, V) gives NaN.

The gradient of a head's bias is the sum of dx over the rows, taken before dx is rounded (`sums` of `walk_rows_`). Then
the walk over a row stores only the row's coefficients (A, B, C and what else dx needs), and a second kernel walks down
the columns, where it writes dx and sums it in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype, cdiv, multiprocessors, next_power_of_2
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.loss.wgrad_accumulator import ROW_TILE
from ligerzoo.kernels.math import fast_exp, tanh_and_slope


class Terms(NamedTuple):
    """How logits are transformed, and what the loss consists of beside the target's log-probability."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = Terms()


class RowResults(NamedTuple):
    """Per row: fp32 (fp64 for fp64 logits), but for `argmax`, int64. Zeros where the row is ignored."""

    loss: Tensor
    logp: Tensor
    entropy: Tensor
    logsumexp: Tensor
    argmax: Tensor


class Upstream(NamedTuple):
    """The gradients of some objective with respect to the rows' results; None for those it doesn't depend on."""

    loss: Tensor | None = None
    logp: Tensor | None = None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None


NOTHING = Upstream()


@dataclass(frozen=True)
class TokenStatistics:
    """What the model's distribution over the vocabulary says of each token; 0 for a token that does not count.

    Attributes:
        logps: (...) fp32 (fp64 for fp64 input), the target's log-probability.
        entropy: (...) fp32, the entropy of the distribution, in nats.
        logsumexp: (...) fp32, the logarithm of the sum of the exponentials of the logits.
        argmax: (...) int64, the likeliest token.
        accuracy: 0-d fp32, of the tokens that count the share whose target is the likeliest one; 0 if none counts.
    """

    logps: Tensor
    entropy: Tensor
    logsumexp: Tensor
    argmax: Tensor
    accuracy: Tensor


def statistics_of(results: Sequence[Tensor], target: Tensor, ignore_index: int) -> TokenStatistics:
    """The statistics in the targets' shape, from `RowResults` of the flattened targets."""
    _, logps, entropy, logsumexp, argmax = (t.view(target.shape) for t in results)
    counts = target != ignore_index
    accuracy = ((argmax == target) & counts).sum() / counts.sum().clamp(min=1)
    return TokenStatistics(logps, entropy, logsumexp, argmax, accuracy)


def _transformed(logits: Tensor, valid: Tensor, terms: Terms) -> tuple[Tensor, Tensor | float]:
    """x and dx/dz; those of zeros for a row that is ignored, where NaN or inf would reach the gradient as NaN."""
    z = logits.to(accumulation_dtype(logits.dtype)).masked_fill(~valid[:, None], 0.0)
    if terms.softcap is None:
        return z * (terms.scale / terms.temperature), terms.scale / terms.temperature
    t = torch.tanh(z * (terms.scale / terms.softcap))
    return t * (terms.softcap / terms.temperature), (1 - t * t) * (terms.scale / terms.temperature)


def _looked_up(x: Tensor, target: Tensor, valid: Tensor, class_weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(whether a row's target is a class, (M, 1) columns of the targets, class weights)."""
    inside = (target >= 0) & (target < x.shape[-1])
    y = torch.where(valid & inside, target, 0)[:, None]
    return inside, y, x.new_ones(x.shape[-1]) if class_weight is None else class_weight.to(x.dtype)


def reference(
    logits: Tensor,
    target: Tensor,
    terms: Terms = PLAIN,
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
    *,
    statistics: bool = True,
) -> RowResults:
    """The results of (M, V) logits in plain torch, differentiable: the specification and the tests' oracle.

    Without `statistics` there are neither entropies nor argmaxes.
    """
    valid = target != ignore_index
    x, _ = _transformed(logits, valid, terms)
    inside, y, weights = _looked_up(x, target, valid, class_weight)
    logps = x.log_softmax(-1)
    logp = torch.where(inside, logps.gather(-1, y)[:, 0], torch.nan)
    logsumexp = x.logsumexp(-1)
    loss = -(1 - terms.label_smoothing) * weights[y[:, 0]] * logp
    if terms.label_smoothing:
        loss = loss - terms.label_smoothing / x.shape[-1] * (weights * logps).sum(-1)
    if terms.z_loss:
        loss = loss + terms.z_loss * logsumexp.square()
    return RowResults(
        torch.where(valid, loss, 0.0),
        torch.where(valid, logp, 0.0),
        torch.where(valid, -_weighted(logps.exp(), logps).sum(-1), 0.0) if statistics else x.new_empty(0),
        torch.where(valid, logsumexp, 0.0),
        torch.where(valid, x.argmax(-1), 0) if statistics else target.new_empty(0),
    )


def _weighted(probabilities: Tensor, logps: Tensor) -> Tensor:
    """p log p of each class, whose sum is less the entropy; 0 where p is."""
    return torch.where(probabilities > 0, probabilities * logps, 0.0)


def reference_gradient(
    logits: Tensor,
    target: Tensor,
    upstream: Upstream,
    terms: Terms = PLAIN,
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
) -> Tensor:
    """The gradient with respect to (M, V) logits in plain torch, in fp32 (fp64 for fp64 logits)."""
    valid = target != ignore_index
    x, slope = _transformed(logits, valid, terms)
    inside, y, weights = _looked_up(x, target, valid, class_weight)
    zero = x.new_zeros(x.shape[0])
    g, of_logp, of_entropy, of_logsumexp = (zero if u is None else u.to(x.dtype) for u in upstream)
    logps = x.log_softmax(-1)
    probabilities = logps.exp()
    smoothing, target_weight = terms.label_smoothing, torch.where(inside, weights[y[:, 0]], torch.nan)
    a = g * ((1 - smoothing) * target_weight + smoothing * weights.mean() + 2 * terms.z_loss * x.logsumexp(-1))
    dx = probabilities * (a - of_logp + of_logsumexp)[:, None]
    if upstream.entropy is not None:
        weighted = _weighted(probabilities, logps)
        dx = dx - of_entropy[:, None] * (weighted - probabilities * weighted.sum(-1, keepdim=True))
    if smoothing:
        dx = dx - (g * smoothing / x.shape[-1])[:, None] * weights
    dx = dx.scatter_add(-1, y, (of_logp - g * (1 - smoothing) * target_weight)[:, None])
    return torch.where(valid[:, None], dx * slope, 0.0)


@jit
def _at(row_ptr, cols, n_cols, scale, softcap, inverse_temperature, MASKED: tl.constexpr):
    """(x, dx/dz) in these columns; x is -inf in columns that are none."""
    if MASKED:
        z = tl.load(row_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    else:
        z = tl.load(row_ptr + cols).to(tl.float32)
    slope = scale * inverse_temperature
    if softcap is None:
        x = z * slope
    else:
        t, tanh_slope = tanh_and_slope(z * (scale / softcap))
        x = t * (softcap * inverse_temperature)
        slope = slope * tanh_slope
    if MASKED:
        x = tl.where(cols < n_cols, x, -float("inf"))
    return x, slope


@jit
def _class_weights(class_weight_ptr, cols, n_cols):
    if class_weight_ptr is None:
        return tl.where(cols < n_cols, 1.0, 0.0)
    else:
        return tl.load(class_weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)


@jit
def _absorb(
    start, maximum, total, moment, index, spread,
    row_ptr, class_weight_ptr, anchor, n_cols, scale, softcap, inverse_temperature,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SMOOTHING: tl.constexpr,
    LANES: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Each lane takes GROUP neighbouring columns into its running maximum m, sum of exp(x - m), sum of exp(x - m)
    (x - m), place of the maximum, and sum of w (x - anchor)."""
    cols = start + tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x, _ = _at(row_ptr, cols, n_cols, scale, softcap, inverse_temperature, MASKED)
    new_maximum = tl.maximum(maximum, tl.max(x, axis=1))
    # A lane that has seen nothing but -inf would subtract inf from inf.
    pivot = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    decay = fast_exp(maximum - pivot)
    terms = fast_exp(x - pivot[:, None])
    if ENTROPY:
        carried = tl.where(total > 0.0, moment + (maximum - pivot) * total, 0.0)
        moment = carried * decay + tl.sum(tl.where(terms > 0.0, terms * (x - pivot[:, None]), 0.0), axis=1)
    if ARGMAX:
        place = tl.min(tl.where(x == new_maximum[:, None], cols, n_cols), axis=1)
        index = tl.where(new_maximum > maximum, place, index)
    if SMOOTHING:
        weights = _class_weights(class_weight_ptr, cols, n_cols)
        spread += tl.sum(tl.where(cols < n_cols, weights * (x - anchor), 0.0), axis=1)
    return new_maximum, total * decay + tl.sum(terms, axis=1), moment, index, spread


@jit
def _statistics(
    row_ptr, class_weight_ptr, anchor, n_cols, scale, softcap, inverse_temperature,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SMOOTHING: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """(m, s, entropy, argmax, sum of w (x - anchor)) of a row; what is not asked for is no number to use."""
    maximum = tl.full((LANES,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    moment = tl.zeros((LANES,), dtype=tl.float32)
    index = tl.zeros((LANES,), dtype=tl.int32)
    spread = tl.zeros((LANES,), dtype=tl.float32)
    whole = n_cols // (LANES * GROUP) * (LANES * GROUP)
    for start in range(0, whole, LANES * GROUP):
        maximum, total, moment, index, spread = _absorb(
            start, maximum, total, moment, index, spread, row_ptr, class_weight_ptr, anchor, n_cols, scale,
            softcap, inverse_temperature, ENTROPY, ARGMAX, SMOOTHING, LANES, GROUP, False,
        )  # fmt: skip
    if whole < n_cols:
        maximum, total, moment, index, spread = _absorb(
            whole, maximum, total, moment, index, spread, row_ptr, class_weight_ptr, anchor, n_cols, scale,
            softcap, inverse_temperature, ENTROPY, ARGMAX, SMOOTHING, LANES, GROUP, True,
        )  # fmt: skip

    m = tl.max(maximum, axis=0)
    decay = fast_exp(maximum - m)
    sum_exp = tl.sum(total * decay, axis=0)
    s = tl.log(sum_exp)
    entropy, argmax = s, 0
    if ENTROPY:
        shifted = tl.where(total > 0.0, moment + (maximum - m) * total, 0.0)
        entropy = s - tl.sum(shifted * decay, axis=0) / sum_exp
    if ARGMAX:
        argmax = tl.minimum(tl.min(tl.where(maximum == m, index, n_cols), axis=0), n_cols - 1)
    return m, s, entropy, argmax, tl.sum(spread, axis=0)


@jit
def _store_gradient(
    start, row_ptr, out_ptr, class_weight_ptr, n_cols, scale, softcap, inverse_temperature,
    m, s, entropy, a, c, of_entropy,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    cols = start + tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x, slope = _at(row_ptr, cols, n_cols, scale, softcap, inverse_temperature, MASKED)
    gradient = _without_target(x, m, s, entropy, a, of_entropy, ENTROPY)
    if SMOOTHING:
        gradient -= c * _class_weights(class_weight_ptr, cols, n_cols)
    gradient = (gradient * slope).to(out_ptr.dtype.element_ty)
    if MASKED:
        tl.store(out_ptr + cols, gradient, mask=cols < n_cols)
    else:
        tl.store(out_ptr + cols, gradient)


@jit
def _without_target(x, m, s, entropy, a, of_entropy, ENTROPY: tl.constexpr):
    """p_v (A - h (log p_v + entropy))"""
    logp = (x - m) - s
    p = fast_exp(logp)
    if ENTROPY:
        return p * a - tl.where(p > 0.0, p * (logp + entropy), 0.0) * of_entropy
    else:
        return p * a


@jit
def _clear(cleared, out_ptr, n_cols, LANES: tl.constexpr, GROUP: tl.constexpr):
    if cleared:
        for start in range(0, n_cols, LANES * GROUP):
            cols = start + tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            tl.store(out_ptr + cols, tl.zeros((LANES, GROUP), dtype=out_ptr.dtype.element_ty), mask=cols < n_cols)


@jit
def _upstream(pointer, token, stride):
    return 0.0 if pointer is None else tl.load(pointer + token * stride).to(tl.float32)


@kernel
def _rows_kernel(
    logits_ptr, out_ptr, target_ptr, class_weight_ptr, mean_weight_ptr, order_ptr, count_ptr,
    loss_ptr, logp_ptr, entropy_ptr, logsumexp_ptr, argmax_ptr, normalizer_ptr, column_ptr, coefficient_ptr,
    of_loss_ptr, of_logp_ptr, of_entropy_ptr, of_logsumexp_ptr, of_loss_stride,
    logits_stride, out_stride, n_tokens, n_rows, n_cols, first_row, ignore_index,
    scale, softcap, inverse_temperature, smoothing, z_loss,
    IS_KNOWN: tl.constexpr, SMOOTHING: tl.constexpr, ROW_TILE: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program walks one row: for its statistics, if they are not known, and for its gradient, if it is wanted, or
    for the coefficients from which `_columns_kernel` computes the gradient."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    token = first_row + row if order_ptr is None else tl.load(order_ptr + first_row + row)
    target = tl.load(target_ptr + token)
    if count_ptr is None:
        counts = target != ignore_index
        cleared = True
    else:
        count = tl.load(count_ptr) - first_row
        counts = row < count
        cleared = row < tl.cdiv(count, ROW_TILE) * ROW_TILE  # nobody looks at the rows after those

    if counts:
        inside = (target >= 0) & (target < n_cols)
        y = tl.where(inside, target, 0)
        x_y, slope_y = _at(row_ptr, y, n_cols, scale, softcap, inverse_temperature, False)
        x_y = tl.where(inside, x_y, float("nan"))
        w_y = _class_weights(class_weight_ptr, y, n_cols)
        mean_weight = 1.0 if mean_weight_ptr is None else tl.load(mean_weight_ptr)
        if IS_KNOWN:
            m, s = tl.load(normalizer_ptr + token), tl.load(normalizer_ptr + n_tokens + token)
            logsumexp, entropy = m + s, 0.0
        else:
            anchor = tl.where(x_y == -float("inf"), 0.0, x_y)
            m, s, entropy, argmax, spread = _statistics(
                row_ptr, class_weight_ptr, anchor, n_cols, scale, softcap, inverse_temperature,
                (entropy_ptr is not None) or (of_entropy_ptr is not None), argmax_ptr is not None, SMOOTHING,
                LANES, GROUP,
            )  # fmt: skip
            nll = (m - x_y) + s
            logsumexp = m + s
            loss = (1.0 - smoothing) * w_y * nll
            if SMOOTHING:
                loss += smoothing * (mean_weight * ((m - anchor) + s) - spread / n_cols)
            if z_loss is not None:
                loss += z_loss * logsumexp * logsumexp
            tl.store(loss_ptr + token, loss)
            tl.store(logp_ptr + token, -nll)
            tl.store(logsumexp_ptr + token, logsumexp)
            if entropy_ptr is not None:
                tl.store(entropy_ptr + token, entropy)
            if argmax_ptr is not None:
                tl.store(argmax_ptr + token, argmax.to(tl.int64))
            if normalizer_ptr is not None:
                tl.store(normalizer_ptr + token, m)
                tl.store(normalizer_ptr + n_tokens + token, s)

        if out_ptr is not None:
            g = _upstream(of_loss_ptr, token, of_loss_stride)
            of_logp = _upstream(of_logp_ptr, token, 1)
            of_entropy = _upstream(of_entropy_ptr, token, 1)
            of_logsumexp = _upstream(of_logsumexp_ptr, token, 1)
            a = (1.0 - smoothing) * w_y
            if z_loss is not None:
                a += 2.0 * z_loss * logsumexp
            if SMOOTHING:
                a += smoothing * mean_weight
            a = tl.where(inside, g * a - of_logp + of_logsumexp, float("nan"))
            b = g * (1.0 - smoothing) * w_y - of_logp
            c = g * smoothing / n_cols
            if coefficient_ptr is not None:
                tl.store(column_ptr + row, y.to(tl.int32))
                tl.store(coefficient_ptr + row, m)
                tl.store(coefficient_ptr + n_rows + row, s)
                tl.store(coefficient_ptr + 2 * n_rows + row, entropy)
                tl.store(coefficient_ptr + 3 * n_rows + row, a)
                tl.store(coefficient_ptr + 4 * n_rows + row, b)
                tl.store(coefficient_ptr + 5 * n_rows + row, c)
                tl.store(coefficient_ptr + 6 * n_rows + row, of_entropy)
            else:
                at_target = _without_target(x_y, m, s, entropy, a, of_entropy, of_entropy_ptr is not None) - b
                if SMOOTHING:
                    at_target -= c * w_y

                out_row_ptr = out_ptr + row * out_stride
                tl.debug_barrier()  # `out` may be `logits`, of which now all have read what they need
                whole = n_cols // (LANES * GROUP) * (LANES * GROUP)
                for start in range(0, whole, LANES * GROUP):
                    _store_gradient(
                        start, row_ptr, out_row_ptr, class_weight_ptr, n_cols, scale, softcap, inverse_temperature,
                        m, s, entropy, a, c, of_entropy,
                        of_entropy_ptr is not None, SMOOTHING, LANES, GROUP, False,
                    )  # fmt: skip
                if whole < n_cols:
                    _store_gradient(
                        whole, row_ptr, out_row_ptr, class_weight_ptr, n_cols, scale, softcap, inverse_temperature,
                        m, s, entropy, a, c, of_entropy,
                        of_entropy_ptr is not None, SMOOTHING, LANES, GROUP, True,
                    )  # fmt: skip
                tl.debug_barrier()  # the target's own gradient comes last
                tl.store(out_row_ptr + y, (at_target * slope_y).to(out_ptr.dtype.element_ty))
    elif out_ptr is not None:
        if column_ptr is not None:
            tl.store(column_ptr + row, -1)
        _clear(cleared, out_ptr + row * out_stride, n_cols, LANES, GROUP)


@kernel
def _columns_kernel(
    logits_ptr, out_ptr, sums_ptr, class_weight_ptr, column_ptr, coefficient_ptr, logits_stride, out_stride,
    n_rows, n_cols, rows_per_program, scale, softcap, inverse_temperature,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program walks down COLS columns of `rows_per_program` rows: it writes their gradient, and its sum."""
    n_blocks = tl.cdiv(n_cols, COLS)
    part, block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
    cols = block * COLS + tl.arange(0, COLS)
    across = cols[None, :]
    first = part * rows_per_program
    end = tl.minimum(first + rows_per_program, n_rows)
    sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(first, end, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        y = tl.load(column_ptr + rows, mask=rows < end, other=-1)
        counts = y >= 0
        rows = tl.where(counts, rows, 0).to(tl.int64)  # of the others nothing is used
        m, s = tl.load(coefficient_ptr + rows), tl.load(coefficient_ptr + n_rows + rows)
        entropy, a = tl.load(coefficient_ptr + 2 * n_rows + rows), tl.load(coefficient_ptr + 3 * n_rows + rows)
        b, c = tl.load(coefficient_ptr + 4 * n_rows + rows), tl.load(coefficient_ptr + 5 * n_rows + rows)
        of_entropy = tl.load(coefficient_ptr + 6 * n_rows + rows)
        x, slope = _at(logits_ptr + rows * logits_stride, across, n_cols, scale, softcap, inverse_temperature, True)
        gradient = _without_target(x, m, s, entropy, a, of_entropy, ENTROPY)
        if SMOOTHING:
            gradient -= c * _class_weights(class_weight_ptr, across, n_cols)
        gradient = tl.where(counts, tl.where(across == y, gradient - b, gradient) * slope, 0.0)
        out = out_ptr + rows * out_stride + across
        tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=counts & (across < n_cols))
        sums += gradient
    tl.store(sums_ptr + part.to(tl.int64) * n_cols + cols, tl.sum(sums, axis=0), mask=cols < n_cols)


def empty_results(target: Tensor, dtype: torch.dtype, *, statistics: bool) -> RowResults:
    """Zeros to be filled by `walk_rows_`; without `statistics` no entropies and argmaxes."""
    wanted = target.shape if statistics else (0,)
    return RowResults(
        loss=target.new_zeros(target.shape, dtype=dtype),
        logp=target.new_zeros(target.shape, dtype=dtype),
        entropy=target.new_zeros(wanted, dtype=dtype),
        logsumexp=target.new_zeros(target.shape, dtype=dtype),
        argmax=target.new_zeros(wanted),
    )


def walk_rows_(
    logits: Tensor,
    target: Tensor,
    results: RowResults | None,
    upstream: Upstream = NOTHING,
    terms: Terms = PLAIN,
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
    *,
    out: Tensor | None = None,
    sums: Tensor | None = None,
    order: Tensor | None = None,
    count: Tensor | None = None,
    first_row: int = 0,
    normalizer: Tensor | None = None,
    triton: bool,
) -> None:
    """Fills in `results`, which `empty_results` made, and `out` with the gradient for `upstream`.

    Args:
        logits: (M, V) with unit stride along V: of all tokens, or of a chunk of them.
        target: (T,) of all tokens, as are `results` and `upstream`.
        out: like `logits`, possibly `logits` itself; None for no gradient.
        sums: (V,) in fp32 (fp64 for fp64 logits), to which the sum of the gradient over the rows is added, as it is
            before it is rounded to the dtype of `out`; None for no sum.
        order: row i belongs to token order[first_row + i]; without an order, to token first_row + i.
        count: (1,) int32; row i counts if first_row + i < count. Without, if its target is not `ignore_index`.
        first_row: the number of row 0.
        normalizer: (2, T) fp32, filled in with m and s. Without `results`, what an earlier walk left there, which saves
            this one a pass over the logits; but not for entropies.
        triton: by Triton, or by plain torch, which has no use for a normalizer.
    """
    if triton:
        _launch(
            logits, target, results, upstream, terms, ignore_index, class_weight, out, sums, order, count, first_row,
            normalizer,
        )  # fmt: skip
        return
    assert results is not None
    rows = slice(first_row, first_row + logits.shape[0])
    tokens = rows if order is None else order[rows]
    statistics = bool(results.argmax.numel())
    of_rows = reference(logits, target[tokens], terms, ignore_index, class_weight, statistics=statistics)
    for result, values in zip(results, of_rows, strict=True):
        if result.numel():
            result[tokens] = values
    if out is not None:
        upstream = Upstream(*(u if u is None else u[tokens] for u in upstream))
        gradient = reference_gradient(logits, target[tokens], upstream, terms, ignore_index, class_weight)
        out.copy_(gradient)
        if sums is not None:
            sums += gradient.sum(0)


_SUMMED_ROWS, _SUMMED_COLUMNS = 16, 256
"""What a program of `_columns_kernel` takes at a time."""


def _launch(
    logits: Tensor, target: Tensor, results: RowResults | None, upstream: Upstream, terms: Terms, ignore_index: int,
    class_weight: Tensor | None, out: Tensor | None, sums: Tensor | None, order: Tensor | None, count: Tensor | None,
    first_row: int, normalizer: Tensor | None,
) -> None:  # fmt: skip
    n_rows, n_cols = logits.shape
    if n_rows == 0:  # empty results have no memory to be written to
        return
    target = target.contiguous()
    smoothing = terms.label_smoothing > 0
    mean_weight = None
    if class_weight is not None:
        class_weight = class_weight.contiguous()
        mean_weight = class_weight.mean(dtype=torch.float32) if smoothing else None
    block = min(8192, next_power_of_2(n_cols))
    group = min(8, block)
    pointers = [None] * 5 if results is None else [t if t.numel() else None for t in results]
    of_loss, *others = upstream
    of_logp, of_entropy, of_logsumexp = (u if u is None else u.contiguous() for u in others)
    columns = coefficients = None
    if sums is not None:
        columns, coefficients = target.new_empty(n_rows, dtype=torch.int32), sums.new_empty((7, n_rows))
    transform = terms.scale, terms.softcap, 1.0 / terms.temperature
    _rows_kernel[n_rows](
        logits, out, target, class_weight, mean_weight, order, count,
        *pointers, normalizer, columns, coefficients,
        of_loss, of_logp, of_entropy, of_logsumexp, 0 if of_loss is None else of_loss.stride(0),
        logits.stride(0), 0 if out is None else out.stride(0), target.shape[0], n_rows, n_cols, first_row, ignore_index,
        *transform, terms.label_smoothing, terms.z_loss or None,
        results is None, smoothing, ROW_TILE, block // group, group, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip
    if sums is None:
        return
    assert out is not None
    n_blocks = cdiv(n_cols, _SUMMED_COLUMNS)
    parts = min(cdiv(n_rows, 4 * _SUMMED_ROWS), cdiv(8 * multiprocessors(logits), n_blocks))
    sums_of_parts = sums.new_empty((parts, n_cols))
    _columns_kernel[parts * n_blocks](
        logits, out, sums_of_parts, class_weight, columns, coefficients, logits.stride(0), out.stride(0),
        n_rows, n_cols, cdiv(n_rows, parts), *transform,
        of_entropy is not None, smoothing, _SUMMED_ROWS, _SUMMED_COLUMNS, num_warps=4,
    )  # fmt: skip
    sums += sums_of_parts.sum(0)
