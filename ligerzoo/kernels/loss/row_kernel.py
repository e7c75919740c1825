"""The Triton kernel for the formulas of `token_loss`: one program computes one row's results and its gradient.

A first pass over the row computes the softmax's normalizer (m, s) and the results, a second one the gradient, which may
overwrite the logits. The kernel is portable: it uses no tensor cores and no TMA.

The smoothed part of the loss is computed as e mean(w) (logsumexp - r) - (e / V) sum_v w_v (x_v - r) with r = x_y. A
large constant shared by all logits then cancels before the sum. mean(w) is the same for all rows.

The gradient of a head's bias is the sum of dx over the rows, before dx is rounded (`dbias` of `compute_rows_`). The
first kernel then stores only a row's coefficients (A, B, C and what else dx needs). A second kernel loops over rows for
a block of columns, writes dx, and sums it in the same pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import cdiv, multiprocessors, next_power_of_2
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.loss.token_loss import RowResults, Terms, Upstream, reference, reference_gradient
from ligerzoo.kernels.math import fast_exp, load_softcapped
from ligerzoo.kernels.tiling import StridedRows

ROW_TILE = 64
"""With an end of the valid rows, the gradient is zeroed in the ignored rows up to the next multiple of this. Matrix
products over the valid rows may then read whole tiles of rows."""


@jit
def _class_weights(class_weight_ptr, cols, n_cols):
    if class_weight_ptr is None:
        return tl.where(cols < n_cols, 1.0, 0.0)
    else:
        return tl.load(class_weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)


@jit
def _load_logits(row, cols, MASKED: tl.constexpr):
    """Returns x and dx/dz, see `load_softcapped`. `row` holds the first logit's pointer, the number of columns, the
    scale, the softcap and the inverse of the temperature."""
    row_ptr, n_cols, scale, softcap, inverse_temperature = row
    return load_softcapped(row_ptr, cols, n_cols, scale, softcap, inverse_temperature, MASKED)


@jit
def _update_statistics(
    start,
    state,
    row,
    weights,
    ENTROPY: tl.constexpr,
    ARGMAX: tl.constexpr,
    SMOOTHING: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Updates each lane's running statistics with GROUP adjacent columns: the maximum m, the sum of exp(x - m), the sum
    of exp(x - m) (x - m), the column of the maximum, and the sum of w (x - anchor)."""
    maximum, total, moment, index, smoothing_sum = state
    class_weight_ptr, anchor = weights
    n_cols = row[1]
    cols = start + tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x, _ = _load_logits(row, cols, MASKED)
    new_maximum = tl.maximum(maximum, tl.max(x, axis=1))
    # A lane with only -inf so far would compute inf - inf.
    pivot = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    decay = fast_exp(maximum - pivot)
    terms = fast_exp(x - pivot[:, None])
    if ENTROPY:
        carried = tl.where(total > 0.0, moment + (maximum - pivot) * total, 0.0)
        moment = carried * decay + tl.sum(tl.where(terms > 0.0, terms * (x - pivot[:, None]), 0.0), axis=1)
    if ARGMAX:
        column = tl.min(tl.where(x == new_maximum[:, None], cols, n_cols), axis=1)
        index = tl.where(new_maximum > maximum, column, index)
    if SMOOTHING:
        w = _class_weights(class_weight_ptr, cols, n_cols)
        smoothing_sum += tl.sum(tl.where(cols < n_cols, w * (x - anchor), 0.0), axis=1)
    return new_maximum, total * decay + tl.sum(terms, axis=1), moment, index, smoothing_sum


@jit
def _statistics(
    row,
    weights,
    ENTROPY: tl.constexpr,
    ARGMAX: tl.constexpr,
    SMOOTHING: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Returns (m, s, entropy, argmax, sum of w (x - anchor)) of a row. Results that are not requested are undefined."""
    zeros = tl.zeros((LANES,), dtype=tl.float32)
    state = (
        tl.full((LANES,), -float("inf"), dtype=tl.float32),
        zeros,
        zeros,
        tl.zeros((LANES,), dtype=tl.int32),
        zeros,
    )
    n_cols = row[1]
    whole = n_cols // (LANES * GROUP) * (LANES * GROUP)
    for start in range(0, whole, LANES * GROUP):
        state = _update_statistics(start, state, row, weights, ENTROPY, ARGMAX, SMOOTHING, LANES, GROUP, False)
    if whole < n_cols:
        state = _update_statistics(whole, state, row, weights, ENTROPY, ARGMAX, SMOOTHING, LANES, GROUP, True)

    maximum, total, moment, index, smoothing_sum = state
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
    return m, s, entropy, argmax, tl.sum(smoothing_sum, axis=0)


@jit
def _store_gradient(
    start,
    row,
    out_ptr,
    class_weight_ptr,
    gradient_terms,
    ENTROPY: tl.constexpr,
    SMOOTHING: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    m, s, entropy, a, c, grad_entropy = gradient_terms
    n_cols = row[1]
    cols = start + tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x, slope = _load_logits(row, cols, MASKED)
    gradient = _gradient_without_target(x, m, s, entropy, a, grad_entropy, ENTROPY)
    if SMOOTHING:
        gradient -= c * _class_weights(class_weight_ptr, cols, n_cols)
    gradient = (gradient * slope).to(out_ptr.dtype.element_ty)
    if MASKED:
        tl.store(out_ptr + cols, gradient, mask=cols < n_cols)
    else:
        tl.store(out_ptr + cols, gradient)


@jit
def _gradient_without_target(x, m, s, entropy, a, grad_entropy, ENTROPY: tl.constexpr):
    """Returns p_v (A - h (log p_v + entropy))."""
    logp = (x - m) - s
    p = fast_exp(logp)
    if ENTROPY:
        return p * a - tl.where(p > 0.0, p * (logp + entropy), 0.0) * grad_entropy
    else:
        return p * a


@jit
def _store_zeros(is_zeroed, out_ptr, n_cols, LANES: tl.constexpr, GROUP: tl.constexpr):
    if is_zeroed:
        for start in range(0, n_cols, LANES * GROUP):
            cols = start + tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            tl.store(out_ptr + cols, tl.zeros((LANES, GROUP), dtype=out_ptr.dtype.element_ty), mask=cols < n_cols)


@jit
def _load_upstream(pointer, token, stride):
    return 0.0 if pointer is None else tl.load(pointer + token * stride).to(tl.float32)


class _Tokens(NamedTuple):
    """The tokens of the rows: their targets, and the fields of `Rows`."""

    target: Tensor
    first: int
    order: Tensor | None
    end: Tensor | None


class _ClassWeights(NamedTuple):
    """The class weights and their mean; None for weights of 1, and for a mean that is not needed."""

    ptr: Tensor | None
    mean: Tensor | None


class _Outputs(NamedTuple):
    """The fields of `RowResults` and the normalizer; None for what is not needed."""

    loss: Tensor | None
    logp: Tensor | None
    entropy: Tensor | None
    logsumexp: Tensor | None
    argmax: Tensor | None
    normalizer: Tensor | None


class _Coefficients(NamedTuple):
    """The target's column, -1 for an ignored row, and the seven numbers of each row, (7, M), from which dx follows."""

    column: Tensor | None
    numbers: Tensor | None


class _Upstream(NamedTuple):
    """The fields of `Upstream`, and the stride of the first."""

    loss: Tensor | None
    logp: Tensor | None
    entropy: Tensor | None
    logsumexp: Tensor | None
    loss_stride: int


class _Terms(NamedTuple):
    """`Terms` as the kernels take them; None for a softcap or a z-loss that is left out."""

    scale: float
    softcap: float | None
    inverse_temperature: float
    smoothing: float
    target_share: float
    z_loss: float | None
    ignore_index: int


class _Sizes(NamedTuple):
    """Numbers of tokens, rows and columns."""

    n_tokens: int
    n_rows: int
    n_cols: int


class _Sums(NamedTuple):
    """Sums of parts of the rows, (parts, V), and the number of rows of a part."""

    ptr: Tensor
    n_rows: int


@kernel
def _rows_kernel(
    logits, out, tokens, weight, outputs, coefficients, upstream, terms, sizes, SMOOTH: tl.constexpr, TILE: tl.constexpr
):
    """One program computes one row: its statistics, unless the normalizer is given; then, if there is an `out`, its
    gradient, or the coefficients from which `_columns_kernel` computes the gradient."""
    ROW_TILE: tl.constexpr = TILE[0]
    LANES: tl.constexpr = TILE[1]
    GROUP: tl.constexpr = TILE[2]
    n_tokens, n_rows, n_cols = sizes
    smoothing, target_share, z_loss = terms.smoothing, terms.target_share, terms.z_loss
    row = tl.program_id(0).to(tl.int64)
    x = (logits.ptr + row * logits.row_stride, n_cols, terms.scale, terms.softcap, terms.inverse_temperature)
    token = tokens.first + row if tokens.order is None else tl.load(tokens.order + tokens.first + row)
    target = tl.load(tokens.target + token)
    if tokens.end is None:
        valid = target != terms.ignore_index
        is_zeroed = True
    else:
        count = tl.load(tokens.end) - tokens.first
        valid = row < count
        is_zeroed = row < tl.cdiv(count, ROW_TILE) * ROW_TILE  # later rows are never read

    if valid:
        in_vocabulary = (target >= 0) & (target < n_cols)
        y = tl.where(in_vocabulary, target, 0)
        x_y, slope_y = _load_logits(x, y, False)
        x_y = tl.where(in_vocabulary, x_y, float("nan"))
        w_y = _class_weights(weight.ptr, y, n_cols)
        mean_weight = 1.0 if weight.mean is None else tl.load(weight.mean)
        if outputs.loss is None:
            m, s = tl.load(outputs.normalizer + token), tl.load(outputs.normalizer + n_tokens + token)
            logsumexp, entropy = m + s, 0.0
        else:
            ENTROPY: tl.constexpr = (outputs.entropy is not None) or (upstream.entropy is not None)
            anchor = tl.where(x_y == -float("inf"), 0.0, x_y)
            m, s, entropy, argmax, smoothing_sum = _statistics(
                x, (weight.ptr, anchor), ENTROPY, outputs.argmax is not None, SMOOTH, LANES, GROUP
            )
            nll = (m - x_y) + s
            logsumexp = m + s
            loss = target_share * w_y * nll
            if SMOOTH:
                loss += smoothing * (mean_weight * ((m - anchor) + s) - smoothing_sum / n_cols)
            if z_loss is not None:
                loss += z_loss * logsumexp * logsumexp
            tl.store(outputs.loss + token, loss)
            tl.store(outputs.logp + token, -nll)
            tl.store(outputs.logsumexp + token, logsumexp)
            if outputs.entropy is not None:
                tl.store(outputs.entropy + token, entropy)
            if outputs.argmax is not None:
                tl.store(outputs.argmax + token, argmax.to(tl.int64))
            if outputs.normalizer is not None:
                tl.store(outputs.normalizer + token, m)
                tl.store(outputs.normalizer + n_tokens + token, s)

        if out.ptr is not None:
            g = _load_upstream(upstream.loss, token, upstream.loss_stride)
            grad_logp = _load_upstream(upstream.logp, token, 1)
            grad_entropy = _load_upstream(upstream.entropy, token, 1)
            grad_logsumexp = _load_upstream(upstream.logsumexp, token, 1)
            a = target_share * w_y
            if z_loss is not None:
                a += 2.0 * z_loss * logsumexp
            if SMOOTH:
                a += smoothing * mean_weight
            a = tl.where(in_vocabulary, g * a - grad_logp + grad_logsumexp, float("nan"))
            b = g * target_share * w_y - grad_logp
            c = g * smoothing / n_cols
            if coefficients.numbers is not None:
                tl.store(coefficients.column + row, y.to(tl.int32))
                tl.store(coefficients.numbers + row, m)
                tl.store(coefficients.numbers + n_rows + row, s)
                tl.store(coefficients.numbers + 2 * n_rows + row, entropy)
                tl.store(coefficients.numbers + 3 * n_rows + row, a)
                tl.store(coefficients.numbers + 4 * n_rows + row, b)
                tl.store(coefficients.numbers + 5 * n_rows + row, c)
                tl.store(coefficients.numbers + 6 * n_rows + row, grad_entropy)
            else:
                at_target = (
                    _gradient_without_target(x_y, m, s, entropy, a, grad_entropy, upstream.entropy is not None) - b
                )
                if SMOOTH:
                    at_target -= c * w_y

                out_row_ptr = out.ptr + row * out.row_stride
                tl.debug_barrier()  # `out` may be `logits`: every thread must have read its part
                HAS_ENTROPY: tl.constexpr = upstream.entropy is not None
                of_row = (m, s, entropy, a, c, grad_entropy)
                whole = n_cols // (LANES * GROUP) * (LANES * GROUP)
                for start in range(0, whole, LANES * GROUP):
                    _store_gradient(start, x, out_row_ptr, weight.ptr, of_row, HAS_ENTROPY, SMOOTH, LANES, GROUP, False)
                if whole < n_cols:
                    _store_gradient(whole, x, out_row_ptr, weight.ptr, of_row, HAS_ENTROPY, SMOOTH, LANES, GROUP, True)
                tl.debug_barrier()  # the target's own gradient overwrites the one without target
                tl.store(out_row_ptr + y, (at_target * slope_y).to(out.ptr.dtype.element_ty))
    elif out.ptr is not None:
        if coefficients.column is not None:
            tl.store(coefficients.column + row, -1)
        _store_zeros(is_zeroed, out.ptr + row * out.row_stride, n_cols, LANES, GROUP)


@kernel
def _columns_kernel(
    logits, out, sums, weight, coefficients, upstream, terms, sizes, SMOOTH: tl.constexpr, TILE: tl.constexpr
):
    """One program computes COLS columns of `sums.n_rows` rows: their gradient, and its sum over the rows."""
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    n_rows, n_cols = sizes.n_rows, sizes.n_cols
    n_blocks = tl.cdiv(n_cols, COLS)
    part, block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
    cols = block * COLS + tl.arange(0, COLS)
    across = cols[None, :]
    first = part * sums.n_rows
    end = tl.minimum(first + sums.n_rows, n_rows)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(first, end, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        y = tl.load(coefficients.column + rows, mask=rows < end, other=-1)
        valid = y >= 0
        rows = tl.where(valid, rows, 0).to(tl.int64)  # ignored rows read row 0, and are masked below
        m, s = tl.load(coefficients.numbers + rows), tl.load(coefficients.numbers + n_rows + rows)
        entropy, a = (
            tl.load(coefficients.numbers + 2 * n_rows + rows),
            tl.load(coefficients.numbers + 3 * n_rows + rows),
        )
        b, c = tl.load(coefficients.numbers + 4 * n_rows + rows), tl.load(coefficients.numbers + 5 * n_rows + rows)
        grad_entropy = tl.load(coefficients.numbers + 6 * n_rows + rows)
        x_ptr = logits.ptr + rows * logits.row_stride
        x, slope = load_softcapped(x_ptr, across, n_cols, terms.scale, terms.softcap, terms.inverse_temperature, True)
        gradient = _gradient_without_target(x, m, s, entropy, a, grad_entropy, upstream.entropy is not None)
        if SMOOTH:
            gradient -= c * _class_weights(weight.ptr, across, n_cols)
        gradient = tl.where(valid, tl.where(across == y, gradient - b, gradient) * slope, 0.0)
        out_ptr = out.ptr + rows * out.row_stride + across
        tl.store(out_ptr, gradient.to(out.ptr.dtype.element_ty), mask=valid & (across < n_cols))
        total += gradient
    tl.store(sums.ptr + part.to(tl.int64) * n_cols + cols, tl.sum(total, axis=0), mask=cols < n_cols)


def zero_results(target: Tensor, dtype: torch.dtype, *, statistics: bool) -> RowResults:
    """Allocates zeros for `compute_rows_` to fill; entropies and argmaxes are empty unless `statistics` is set."""
    loss = torch.zeros_like(target, dtype=dtype)
    return RowResults(
        loss=loss,
        logp=torch.zeros_like(loss),
        entropy=torch.zeros_like(loss) if statistics else loss.new_empty(0),
        logsumexp=torch.zeros_like(loss),
        argmax=torch.zeros_like(target) if statistics else target.new_empty(0),
    )


class Rows(NamedTuple):
    """The tokens of a matrix's rows.

    Attributes:
        first: the index of row 0.
        order: row i belongs to token order[first + i]. Without it, to token first + i.
        end: (1,) int32; row i is valid if first + i < end. Without it, if its target is not `ignore_index`.
    """

    first: int = 0
    order: Tensor | None = None
    end: Tensor | None = None


_COLUMNS_TILE = 16, 256
"""Rows and columns of a tile of `_columns_kernel`."""


def compute_rows_(
    logits: Tensor,
    target: Tensor,
    results: RowResults | None,
    upstream: Upstream,
    terms: Terms,
    class_weight: Tensor | None = None,
    *,
    out: Tensor | None = None,
    dbias: Tensor | None = None,
    rows: Rows = Rows(),  # noqa: B008
    normalizer: Tensor | None = None,
    triton: bool,
) -> None:
    """Fills `results`, made by `zero_results`, and writes the gradient for `upstream` to `out`.

    Args:
        logits: (M, V) with unit stride along V: of all tokens, or of a chunk of them.
        target: (T,) of all tokens, as are `results` and `upstream`.
        results: None to compute only the gradient, from a given `normalizer`; not possible for an upstream gradient
            of the entropy.
        upstream: the gradients with respect to `results`.
        terms: the transform and the loss.
        class_weight: (V,), a factor for the loss of each class, or None.
        out: like `logits`, possibly `logits` itself; None for no gradient.
        dbias: (V,) in fp32 (fp64 for fp64 logits). The gradient's sum over the rows is added to it, before the gradient
            is rounded to the dtype of `out`. None for no sum.
        rows: the tokens of the rows.
        normalizer: (2, T) fp32, m and s. Filled along with `results`. Without `results`, read: this saves a pass over
            the logits. Unused by plain torch.
        triton: whether to use Triton or plain torch.
    """
    n_rows, n_cols = logits.shape
    if not triton:
        assert results is not None
        tokens: slice | Tensor = slice(rows.first, rows.first + n_rows)
        tokens = tokens if rows.order is None else rows.order[tokens]
        _compute_in_torch_(logits, target, results, upstream, terms, class_weight, out, dbias, tokens)
        return
    if n_rows == 0:  # empty tensors have no pointer to launch with
        return
    is_smoothed, mean_weight = terms.label_smoothing > 0, None
    if class_weight is not None:
        class_weight = class_weight.contiguous()
        mean_weight = class_weight.mean(dtype=torch.float32) if is_smoothed else None
    block = min(8192, next_power_of_2(n_cols))
    group = min(8, block)
    grad_loss, *others = upstream
    coefficients = _Coefficients(None, None)
    if dbias is not None:
        coefficients = _Coefficients(target.new_empty(n_rows, dtype=torch.int32), dbias.new_empty((7, n_rows)))
    operands = (
        StridedRows(logits, logits.stride(0)),
        StridedRows(out, 0 if out is None else out.stride(0)),
    )
    weights = _ClassWeights(class_weight, mean_weight)
    filled = [None] * 5 if results is None else [t if t.numel() else None for t in results]
    outputs = _Outputs(*filled, normalizer)  # type: ignore[call-arg]
    dlogp, dentropy, dlogsumexp = (None if u is None else u.contiguous() for u in others)
    stride = 0 if grad_loss is None else grad_loss.stride(0)
    gradients = _Upstream(grad_loss, dlogp, dentropy, dlogsumexp, stride)
    numbers = _Terms(
        terms.scale,
        terms.softcap,
        1.0 / terms.temperature,
        terms.label_smoothing,
        1 - terms.label_smoothing,  # in fp64: fp32 would lose 6 bits of 1 - 0.99
        terms.z_loss or None,
        terms.ignore_index,
    )
    sizes, tile = _Sizes(len(target), n_rows, n_cols), (ROW_TILE, block // group, group)
    warps = min(16, max(4, block // 512))
    _rows_kernel[n_rows](
        *operands, _Tokens(target.contiguous(), *rows), weights, outputs, coefficients, gradients, numbers, sizes,
        is_smoothed, tile, num_warps=warps,
    )  # fmt: skip
    if dbias is None:
        return
    n_blocks = cdiv(n_cols, _COLUMNS_TILE[1])
    parts = min(cdiv(n_rows, 4 * _COLUMNS_TILE[0]), cdiv(8 * multiprocessors(logits), n_blocks))
    sums = _Sums(dbias.new_empty((parts, n_cols)), cdiv(n_rows, parts))
    _columns_kernel[parts * n_blocks](
        *operands, sums, weights, coefficients, gradients, numbers, sizes, is_smoothed, _COLUMNS_TILE, num_warps=4
    )
    dbias += sums.ptr.sum(0)


def _compute_in_torch_(
    logits: Tensor,
    target: Tensor,
    results: RowResults,
    upstream: Upstream,
    terms: Terms,
    class_weight: Tensor | None,
    out: Tensor | None,
    dbias: Tensor | None,
    tokens: slice | Tensor,
) -> None:
    target, statistics = target[tokens], bool(results.argmax.numel())
    values_of_rows = reference(logits, target, terms, class_weight, statistics=statistics)
    for result, values in zip(results, values_of_rows, strict=True):
        if result.numel():
            result[tokens] = values
    if out is not None:
        upstream = Upstream(*(u if u is None else u[tokens] for u in upstream))
        gradient = reference_gradient(logits, target, upstream, terms, class_weight)
        out.copy_(gradient)
        if dbias is not None:
            dbias += gradient.sum(0)
