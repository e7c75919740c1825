"""Softmaxes over the rows and the columns of similarities, which never exist at once: sweeps of a contrastive loss.

Of R rows a_i and N candidates c_j, with logits x_ij = scale (a_i . c_j):

    z_i = log sum_j exp(x_ij),      over the candidates of row i,
    u_j = log sum_i exp(x_ij),      over the rows of which j is a candidate.

The loss is a sum of such z and u, minus the logits of the positives j = y_i. Its gradient, for weights r_i of the rows,
w_j of the candidates and a share s of each softmax, is

    dx_ij = s r_i exp(x_ij - z_i) + s w_j exp(x_ij - u_j) - r_i [j = y_i],
    da = scale dx @ c,   dc = scale dx.T @ a,   dscale = sum_ij dx_ij (a_i . c_j).

`z` and `u` may also be other normalizers, such as those of a softmax over several matrices. A candidate other than the
positive is excluded from a softmax if it shares an id with the row, or if its logit is above a threshold of the row, or
for u of the candidate.

A sweep processes the rows in chunks whose logits fit a budget, as the loss head does: a matrix product, one kernel over
the chunk's logits, and two matrix products for the gradients, see `loss.chunked_head`. If only softmaxes over rows are
needed, the kernel computes z, and then the gradient in place of the logits: one sweep of 6RND operations. Otherwise a
sweep of 2RND computes z and u, and a second one of 6RND the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import cdiv, multiprocessors, next_power_of_2
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.loss.chunked_head import (
    HeadInputs,
    Needs,
    gradient_dtype,
    head_flops,
    head_type,
    head_workspace,
    rows_per_chunk,
)
from ligerzoo.kernels.math import fast_exp
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.tiling import StridedRows


class SimilaritySide(NamedTuple):
    """The rows or the candidates of similarities; n of them.

    Attributes:
        sample: (n,) int64, the sample that each belongs to, or None. Rows and candidates of one sample exclude each
            other, as those with equal ids do.
        query_id: (n,) int64, or None.
        document_id: (n,) int64, or None.
        threshold: (n,) fp32, the logit above which others are excluded, or None.
        normalizer: (n,) fp32, z or u for the gradient; inf for a softmax that the loss leaves out. None for rows: the
            sweep's own z. None for candidates: the loss has no softmaxes over columns.
        weight: (n,) fp32, r or w for the gradient; None if it is not needed.
    """

    sample: Tensor | None = None
    query_id: Tensor | None = None
    document_id: Tensor | None = None
    threshold: Tensor | None = None
    normalizer: Tensor | None = None
    weight: Tensor | None = None

    def of(self, chunk: slice) -> SimilaritySide:
        """Returns the rows of a chunk."""
        return SimilaritySide(*(None if one is None else one[chunk] for one in self))


class SimilarityOptions(NamedTuple):
    """The options of a sweep.

    Attributes:
        share: s.
        columns: whether to compute u.
        budget: MiB of logits that exist at a time; None for the default, see `set_logits_budget`.
        triton: whether to use Triton or plain torch for the chunks.
    """

    share: float
    columns: bool
    budget: int | None
    triton: bool


class SimilarityResults(NamedTuple):
    """The results of a sweep; empty tensors where not needed.

    Attributes:
        z: (R,) fp32 (fp64 for fp64 inputs, like all but the last two), -inf for a row without candidates.
        largest: (R,), the largest logit of a row's candidates.
        positive: (R,), the logit of a row's positive, 0 without one.
        u: (N,).
        dscale: 0-d.
        drows: (R, D), in the dtype of the rows.
        dcandidates: (N, D).
    """

    z: Tensor
    largest: Tensor
    positive: Tensor
    u: Tensor
    dscale: Tensor
    drows: Tensor
    dcandidates: Tensor


_WHOLE_ROWS = 1, 4096, 16
"""Rows, columns and warps of a program that reads its rows twice: the second time from the L2 cache."""

_PARTS = 16, 256, 8
"""Likewise, of a program that reads a part of the columns once."""


_OF_COLUMNS = 16, 256, 8
"""Likewise, of a program that computes a part of u."""


class _Outputs(NamedTuple):
    """Parts of z and of the largest logits, (parts, R); the positives' logits, (R,); parts of dscale,
    (parts * blocks,). None for what is not needed."""

    z: Tensor | None
    largest: Tensor | None
    positive: Tensor | None
    dscale: Tensor | None


class _Sizes(NamedTuple):
    """Numbers of rows and columns, and of columns of a part, or of rows for u."""

    n_rows: int
    n_cols: int
    n_part: int


@jit
def _share_ids(row_ids, column_ids, of_row, across, n_cols):
    return tl.load(row_ids + of_row)[:, None] == tl.load(column_ids + across, mask=across < n_cols, other=0)[None, :]


@jit
def _candidates(logits, scale, rows, columns, of_row, offsets, exists, across, y, sizes):
    """Returns similarities, logits, and which of them are excluded from the softmaxes over rows and over columns."""
    n_cols = sizes.n_cols
    mask = exists[:, None] & (across < n_cols)[None, :]
    s = tl.load(logits.ptr + offsets[:, None] + across[None, :], mask=mask, other=0.0).to(tl.float32)
    x = s * scale
    is_positive = across[None, :] == y[:, None]
    excluded = ~mask
    if rows.sample is not None:
        excluded = excluded | _share_ids(rows.sample, columns.sample, of_row, across, n_cols)
    if rows.query_id is not None:
        excluded = excluded | _share_ids(rows.query_id, columns.query_id, of_row, across, n_cols)
    if rows.document_id is not None:
        excluded = excluded | _share_ids(rows.document_id, columns.document_id, of_row, across, n_cols)
    of_rows, of_columns = excluded, excluded
    if rows.threshold is not None:
        of_rows = excluded | (x > tl.load(rows.threshold + of_row)[:, None])
    if columns.threshold is not None:
        threshold = tl.load(columns.threshold + across, mask=across < n_cols, other=0.0)
        of_columns = excluded | (x > threshold[None, :])
    return s, x, (of_rows & ~is_positive) | ~mask, (of_columns & ~is_positive) | ~mask


@jit
def _pivot(maximum):
    """The maximum, or 0 instead of -inf: -inf - -inf would be NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@jit
def _log(x):
    """The logarithm, -inf of 0."""
    return tl.where(x == 0.0, -float("inf"), tl.log(tl.where(x == 0.0, 1.0, x)))


@kernel
def _chunk_kernel(
    logits, scale_ptr, target_ptr, rows, columns, outputs, sizes, share, PASSES: tl.constexpr, TILE: tl.constexpr
):
    """One program computes a part of the columns of some rows: in a pass of statistics its parts of z and the
    largest logits; in a pass of gradients scale dx, in place of the similarities."""
    STATISTICS: tl.constexpr = PASSES[0]
    GRADIENT: tl.constexpr = PASSES[1]
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    n_rows, n_cols, n_part = sizes
    n_parts = tl.cdiv(n_cols, n_part)
    program = tl.program_id(0).to(tl.int64)
    block, part = program // n_parts, program % n_parts
    given = block * ROWS + tl.arange(0, ROWS)
    exists = given < n_rows
    of_row = tl.where(exists, given, 0)
    offsets = of_row * logits.row_stride
    scale = tl.load(scale_ptr).to(tl.float32)
    y = tl.load(target_ptr + of_row)
    first = part * n_part
    end = tl.minimum(first + n_part, n_cols)

    z = tl.zeros((ROWS,), dtype=tl.float32)
    if STATISTICS:
        maximum = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        for start in range(first, end, COLS):
            across = start + tl.arange(0, COLS)
            _s, x, of_rows, _of_columns = _candidates(
                logits, scale, rows, columns, of_row, offsets, exists, across, y, sizes
            )
            in_row = tl.where(of_rows, -float("inf"), x)
            larger = tl.maximum(maximum, tl.max(in_row, axis=1))
            pivot = _pivot(larger)
            total = total * fast_exp(maximum - pivot) + tl.sum(fast_exp(in_row - pivot[:, None]), axis=1)
            maximum = larger
        z = _pivot(maximum) + _log(total)
        tl.store(outputs.z + part * n_rows + of_row, z, mask=exists)
        tl.store(outputs.largest + part * n_rows + of_row, maximum, mask=exists)
        if part == 0:
            has_positive = exists & (y >= 0)
            s_y = tl.load(logits.ptr + offsets + y, mask=has_positive, other=0.0).to(tl.float32)
            tl.store(outputs.positive + of_row, s_y * scale, mask=exists)

    if GRADIENT:
        if not STATISTICS:
            z = tl.load(rows.normalizer + of_row)
        weight = tl.where(exists, tl.load(rows.weight + of_row), 0.0)
        of_scale = tl.zeros((ROWS,), dtype=tl.float32)
        tl.debug_barrier()  # the logits of the positives have been read
        for start in range(first, end, COLS):
            across = start + tl.arange(0, COLS)
            s, x, of_rows, of_columns = _candidates(
                logits, scale, rows, columns, of_row, offsets, exists, across, y, sizes
            )
            dx = fast_exp(tl.where(of_rows, -float("inf"), x) - _pivot(z)[:, None]) * (share * weight)[:, None]
            if columns.normalizer is not None:
                u = tl.load(columns.normalizer + across, mask=across < n_cols, other=0.0)
                w = tl.load(columns.weight + across, mask=across < n_cols, other=0.0)
                dx += fast_exp(tl.where(of_columns, -float("inf"), x) - u[None, :]) * (share * w)[None, :]
            dx = tl.where(across[None, :] == y[:, None], dx - weight[:, None], dx)
            of_scale += tl.sum(dx * s, axis=1)
            mask = exists[:, None] & (across < n_cols)[None, :]
            out = logits.ptr + offsets[:, None] + across[None, :]
            tl.store(out, (dx * scale).to(logits.ptr.dtype.element_ty), mask=mask)
        tl.store(outputs.dscale + program, tl.sum(of_scale, axis=0))


@kernel
def _columns_kernel(logits, scale_ptr, target_ptr, rows, columns, u_ptr, sizes, TILE: tl.constexpr):
    """One program computes u of some columns over a part of the rows. Each lane has its own sum until the end."""
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    n_rows, n_cols, n_part = sizes
    n_blocks = tl.cdiv(n_cols, COLS)
    program = tl.program_id(0).to(tl.int64)
    block, part = program % n_blocks, program // n_blocks
    across = block * COLS + tl.arange(0, COLS)
    scale = tl.load(scale_ptr).to(tl.float32)
    maximum = tl.full((ROWS, COLS), -float("inf"), dtype=tl.float32)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    first = part * n_part
    end = tl.minimum(first + n_part, n_rows)
    for start in range(first, end, ROWS):
        given = start + tl.arange(0, ROWS)
        exists = given < end
        of_row = tl.where(exists, given, 0)
        y = tl.load(target_ptr + of_row)
        _s, x, _of_rows, of_columns = _candidates(
            logits, scale, rows, columns, of_row, of_row * logits.row_stride, exists, across, y, sizes
        )
        x = tl.where(of_columns, -float("inf"), x)
        larger = tl.maximum(maximum, x)
        pivot = _pivot(larger)
        total = total * fast_exp(maximum - pivot) + fast_exp(x - pivot)
        maximum = larger
    highest = _pivot(tl.max(maximum, axis=0))
    total = total * fast_exp(maximum - highest[None, :])
    tl.store(u_ptr + part * n_cols + across, highest + _log(tl.sum(total, axis=0)), mask=across < n_cols)


class _ChunkResults(NamedTuple):
    """z, the largest logits and the positives' logits of a chunk's rows, its part of u, and of dscale; None where not
    needed."""

    z: Tensor | None
    largest: Tensor | None
    positive: Tensor | None
    u: Tensor | None
    dscale: Tensor | None


def _compute_chunk_(
    logits: Tensor,
    scale: Tensor,
    target: Tensor,
    rows: SimilaritySide,
    columns: SimilaritySide,
    options: SimilarityOptions,
    statistics: bool,
    gradient: bool,
) -> _ChunkResults:
    """Computes what a chunk of similarities contributes; with `gradient`, overwrites them with scale dx.

    Args:
        logits: (M, N) similarities with unit stride along N.
        target: (M,) int64, the columns of the positives; -1 for none.
    """
    (n_rows, n_cols), needs_u = logits.shape, statistics and options.columns
    if not options.triton:
        return _compute_chunk_in_torch_(logits, scale, target, rows, columns, options, statistics, gradient)
    size, width, warps = _WHOLE_ROWS if statistics and gradient else _PARTS
    width = min(width, next_power_of_2(n_cols))
    n_blocks, n_part = cdiv(n_rows, size), n_cols
    if not (statistics and gradient):  # a program of few rows would leave multiprocessors idle
        n_parts = cdiv(16 * multiprocessors(logits), n_blocks)
        n_part = width * max(4, cdiv(n_cols, width * n_parts))
    n_parts = cdiv(n_cols, n_part)
    new = scale.new_empty
    outputs, similarities = _Outputs(None, None, None, None), StridedRows(logits, logits.stride(0))
    if gradient:
        outputs = outputs._replace(dscale=new(n_parts * n_blocks))
    if statistics:
        outputs = outputs._replace(z=new((n_parts, n_rows)), largest=new((n_parts, n_rows)), positive=new(n_rows))
    u, sizes = None, _Sizes(n_rows, n_cols, n_part)
    if needs_u:
        u = _columns_of_chunk(similarities, scale, target, rows, columns, sizes)
    passes, tile = (statistics, gradient), (size, width)
    _chunk_kernel[n_parts * n_blocks](
        similarities, scale, target, rows, columns, outputs, sizes, options.share, passes, tile, num_warps=warps
    )
    return _ChunkResults(
        None if outputs.z is None else outputs.z.logsumexp(0),
        None if outputs.largest is None else outputs.largest.amax(0),
        outputs.positive,
        u,
        None if outputs.dscale is None else outputs.dscale.sum(),
    )


def _columns_of_chunk(
    logits: StridedRows, scale: Tensor, target: Tensor, rows: SimilaritySide, columns: SimilaritySide, sizes: _Sizes
) -> Tensor:
    """Returns the part of u of a chunk of similarities, (N,)."""
    height, width, warps = _OF_COLUMNS
    n_blocks = cdiv(sizes.n_cols, width)
    n_parts = cdiv(8 * multiprocessors(scale), n_blocks)
    n_part = height * max(4, cdiv(sizes.n_rows, height * n_parts))
    n_parts = cdiv(sizes.n_rows, n_part)
    u = scale.new_empty((n_parts, sizes.n_cols))
    sizes, tile = sizes._replace(n_part=n_part), (height, width)
    _columns_kernel[n_parts * n_blocks](logits, scale, target, rows, columns, u, sizes, tile, num_warps=warps)
    return u.logsumexp(0)


def _compute_chunk_in_torch_(
    logits: Tensor,
    scale: Tensor,
    target: Tensor,
    rows: SimilaritySide,
    columns: SimilaritySide,
    options: SimilarityOptions,
    statistics: bool,
    gradient: bool,
) -> _ChunkResults:
    s = logits.to(scale.dtype)
    x = s * scale
    is_positive = torch.arange(x.shape[1], device=x.device) == target[:, None]
    excluded = torch.zeros_like(is_positive)
    for of_row, of_column in zip(rows[:3], columns[:3], strict=True):
        if of_row is not None and of_column is not None:
            excluded |= of_row[:, None] == of_column
    above_rows = excluded if rows.threshold is None else excluded | (x > rows.threshold[:, None])
    above_columns = excluded if columns.threshold is None else excluded | (x > columns.threshold)
    in_rows = x.masked_fill(above_rows & ~is_positive, -torch.inf)
    results = _ChunkResults(None, None, None, None, None)
    z = rows.normalizer
    if statistics:
        z = in_rows.logsumexp(1)
        in_columns = x.masked_fill(above_columns & ~is_positive, -torch.inf)
        positive = x.gather(1, target.clamp(min=0)[:, None])[:, 0].masked_fill(target < 0, 0)
        results = _ChunkResults(
            z, in_rows.amax(1), positive, in_columns.logsumexp(0) if options.columns else None, None
        )
    if not gradient:
        return results
    assert z is not None
    assert rows.weight is not None
    dx = _softmax(in_rows, z[:, None]) * (options.share * rows.weight[:, None])
    if columns.normalizer is not None and columns.weight is not None:
        in_columns = x.masked_fill(above_columns & ~is_positive, -torch.inf)
        dx += _softmax(in_columns, columns.normalizer) * (options.share * columns.weight)
    dx = torch.where(is_positive, dx - rows.weight[:, None], dx)
    dscale = (dx * s).sum()  # before s, which may be the logits themselves, is overwritten
    logits.copy_(dx * scale)
    return results._replace(dscale=dscale)


def _softmax(x: Tensor, normalizer: Tensor) -> Tensor:
    """Returns exp(x - normalizer), 0 where x is -inf."""
    return (x - normalizer).exp().masked_fill(x == -torch.inf, 0)


def _sweep_fake(
    rows: Tensor, candidates: Tensor, scale: Tensor, of_rows: SimilaritySide, options: SimilarityOptions, needs: Needs
) -> SimilarityResults:
    n = rows.shape[0] if of_rows.normalizer is None else 0
    z, largest, positive = (scale.new_empty(n) for _ in range(3))
    return SimilarityResults(
        z,
        largest,
        positive,
        scale.new_empty(candidates.shape[:1] if options.columns else (0,)),
        scale.new_empty(()),
        rows.new_empty(rows.shape if needs.hidden else (0,)),
        candidates.new_empty(candidates.shape if needs.weight else (0,), dtype=gradient_dtype(candidates)),
    )


def _sweep_flops(rows: Tensor, candidates: Tensor, needs: Needs) -> int:
    return head_flops(rows, candidates, needs)


def _sweep_peak(
    rows: Tensor, candidates: Tensor, scale: Tensor, of_rows: SimilaritySide, options: SimilarityOptions, needs: Needs
) -> int:
    chunk = rows_per_chunk(rows, candidates.shape[0], rows.element_size(), options.budget)
    fake = _sweep_fake(rows, candidates, scale, of_rows, options, needs)
    return sum(result.nbytes for result in fake) + head_workspace(rows, candidates, chunk, needs)


def _sweep_moved(rows: Tensor, candidates: Tensor, needs: Needs) -> int:
    """Similarities are written and read; for gradients also overwritten, and read by each of their products."""
    return (2 + 2 * any(needs) + needs.hidden + needs.weight) * len(rows) * len(candidates) * rows.element_size()


@register("contrastive_sweep", fake=_sweep_fake, flops=_sweep_flops, peak=_sweep_peak, moved=_sweep_moved)
def contrastive_sweep(
    rows: Tensor,
    candidates: Tensor,
    scale: Tensor,
    target: Tensor,
    of_rows: SimilaritySide,
    of_candidates: SimilaritySide,
    options: SimilarityOptions,
    needs: Needs,
) -> SimilarityResults:
    """Computes softmaxes over rows and columns of similarities, and gradients; see the file's docstring.

    Args:
        rows: (R, D).
        candidates: (N, D), N > 0.
        scale: 0-d, fp32 (fp64 for fp64 rows).
        target: (R,) int64, the positive of each row; -1 for none.
        of_rows: ids, thresholds, weights and normalizers of the rows. With normalizers, z is not computed.
        of_candidates: those of the candidates.
        needs: whether to compute the gradients of rows ("hidden") and candidates ("weight").
    """
    results = _sweep_fake(rows, candidates, scale, of_rows, options, needs)
    statistics, gradient = of_rows.normalizer is None, needs.hidden or needs.weight
    size = rows_per_chunk(rows, candidates.shape[0], rows.element_size(), options.budget)
    every = torch.ones_like(target, dtype=torch.bool)
    products = head_type(rows.shape[0], candidates)(HeadInputs(rows, candidates), every, size, needs)
    u, dscale = results.u.fill_(-torch.inf), results.dscale.zero_()
    for chunk in products.chunks:
        logits = products.logits(chunk)
        found = _compute_chunk_(
            logits, scale, target[chunk], of_rows.of(chunk), of_candidates, options, statistics, gradient
        )
        for result, values in zip(results[:3], found[:3], strict=True):
            if values is not None:
                result[chunk] = values
        if found.u is not None:
            u = torch.logaddexp(u, found.u)
        if found.dscale is not None:
            dscale += found.dscale
            products.accumulate_gradient(chunk, logits)
    drows, dcandidates, _ = products.gradients()
    return results._replace(u=u, drows=drows, dcandidates=dcandidates.to(results.dcandidates.dtype))
