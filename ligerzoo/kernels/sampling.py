"""Draws a token of each row from the softmax of logits / temperature, with the token's log-probabilities.

    token = argmax_i (x_i / T + g_i),   g_i = -log(e_i),   e_i = -log(u_i),   u_i uniform in (0, 1)

has the distribution softmax(x / T): the token with the smallest e_i / p_i wins a race of exponential variables (Gumbel
1954). The token of the largest x_i is chosen for T = 0.

The u_i come from Philox (see `philox`), a function of the row's seed, the number of tokens that the row has drawn
before, and i. So a row draws the same tokens in any batch, and a captured CUDA graph draws new ones in each replay. The
reference computes the same bits. Words w of 32 bits become u = 1 - (w + 0.5) / 2^32, and log(u) is computed from 1 - u
where that is small: the least likely tokens keep their probabilities.

The columns of a row are split among programs by the vocabulary size alone, so that one row is read by many
multiprocessors, and the results do not depend on the batch, to the bit. A second kernel combines the parts.

Not differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, as_rows, cdiv, next_power_of_2, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import fast_log
from ligerzoo.kernels.philox import WORD_MASK, random_block, random_words
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.row_chunks import in_row_chunks
from ligerzoo.kernels.tiling import StridedRows
from ligerzoo.tensor_checks import check_floats, check_tensor

_BLOCK = 2048  # columns of a program


class SampledTokens(NamedTuple):
    """What `sample_tokens` returns.

    Attributes:
        tokens: (R,) int64.
        logps: (R,) fp32, log-probability of the token under the softmax of the logits.
        sampling_logps: (R,) fp32, under the distribution that it was drawn from; 0 for temperature 0.
    """

    tokens: Tensor
    logps: Tensor
    sampling_logps: Tensor


def gumbel_noise(seeds: Tensor, steps: Tensor, columns: int) -> Tensor:
    """Returns (R, columns) fp32 Gumbel variables, finite, of `random_words`."""
    words = random_words(seeds, steps, columns)
    one_minus_u, u = ((w.float() + 0.5) * 2.0**-32 for w in (words, WORD_MASK - words))
    log_u = torch.where(one_minus_u < 0.5, torch.log1p(-one_minus_u), u.log())
    return -(-log_u).log()


def reference(
    logits: Tensor,
    scores: Tensor | None = None,
    seeds: Tensor | None = None,
    steps: Tensor | None = None,
    temperature: Tensor | None = None,
    threshold: Tensor | None = None,
    last_token: Tensor | None = None,
) -> SampledTokens:
    """`sample_tokens` in plain torch: the specification, the CPU path and the test oracle."""
    logits = logits.float()
    x = logits if scores is None else scores.float()
    if threshold is not None and last_token is not None:
        columns = torch.arange(x.shape[1], device=x.device)
        is_tie = (x == threshold[:, None]) & (columns > last_token[:, None])
        x = x.masked_fill((x < threshold[:, None]) | is_tie, -torch.inf)
    keys = x
    if seeds is not None and steps is not None and temperature is not None:
        is_sampled = temperature[:, None] > 0
        x = x * (1 / temperature[:, None]).where(is_sampled, 1)
        keys = torch.where(is_sampled, x + gumbel_noise(seeds, steps, x.shape[1]), x)
    tokens = keys.argmax(-1, keepdim=True)
    lse, sampling_lse = (t.logsumexp(-1, keepdim=True) for t in (logits, x))
    sampled = x.gather(1, tokens)
    if temperature is None or seeds is None:
        sampled = sampling_lse
    else:
        sampled = torch.where(temperature[:, None] > 0, sampled, sampling_lse)
    logps = (logits.gather(1, tokens) - lse).masked_fill(~lse.isfinite(), torch.nan)
    sampling_logps = (sampled - sampling_lse).masked_fill(~sampling_lse.isfinite(), torch.nan)
    return SampledTokens(tokens[:, 0], logps[:, 0], sampling_logps[:, 0])


@jit
def _log_sum_exp(x):
    """log(sum(exp(x))); -inf if all are -inf, NaN if one is NaN or inf."""
    maximum = tl.max(x, axis=0)
    pivot = tl.where(maximum == -float("inf"), 0.0, maximum)  # -inf - -inf would be NaN
    return pivot + tl.log(tl.sum(tl.exp(x - pivot), axis=0))


@jit
def _gumbel(seed, step, first_group, BLOCK: tl.constexpr):
    """Gumbel variables of BLOCK adjacent columns, see `gumbel_noise`."""
    words = random_block(seed, step, first_group, BLOCK)
    one_minus_u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-fast_log(u, -one_minus_u))


class _Drawing(NamedTuple):
    """Seeds, steps and temperatures of the rows; None to choose the largest scores."""

    seeds: Tensor | None
    steps: Tensor | None
    temperature: Tensor | None


class _Bounds(NamedTuple):
    """The fields of `FilterBounds`; None to draw from all tokens."""

    threshold: Tensor | None
    last_token: Tensor | None


class _Parts(NamedTuple):
    """Results of the parts of rows: the largest key and its token, and the log-sum-exps of logits and scores."""

    keys: Tensor
    tokens: Tensor
    lse: Tensor
    sampling_lse: Tensor


@kernel
def _part_kernel(logits, scores, drawing, bounds, parts, n_cols, n_parts, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row, part = program // n_parts, program % n_parts
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(logits.ptr + row * logits.row_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    tl.store(parts.lse + program, _log_sum_exp(x))
    if scores.ptr is not None:
        x = tl.load(scores.ptr + row * scores.row_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    if bounds.threshold is not None:
        threshold, last_token = tl.load(bounds.threshold + row), tl.load(bounds.last_token + row)
        x = tl.where((x < threshold) | ((x == threshold) & (cols > last_token)), -float("inf"), x)
    keys = x
    if drawing.seeds is not None:
        temperature = tl.load(drawing.temperature + row)
        if temperature > 0.0:
            x = x * (1.0 / temperature)
            keys = x + _gumbel(tl.load(drawing.seeds + row), tl.load(drawing.steps + row), part * (BLOCK // 4), BLOCK)
    tl.store(parts.sampling_lse + program, _log_sum_exp(x))
    key, index = tl.max(keys, axis=0, return_indices=True)
    tl.store(parts.keys + program, key)
    tl.store(parts.tokens + program, tl.minimum(part * BLOCK + index, n_cols - 1))  # the index of a NaN may be any


@kernel
def _combine_kernel(logits, scores, temperature_ptr, parts, results, n_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    indices = tl.arange(0, PARTS)
    offsets, mask = row * n_parts + indices, indices < n_parts
    keys = tl.load(parts.keys + offsets, mask=mask, other=-float("inf"))
    lse = _log_sum_exp(tl.load(parts.lse + offsets, mask=mask, other=-float("inf")))
    sampling_lse = _log_sum_exp(tl.load(parts.sampling_lse + offsets, mask=mask, other=-float("inf")))
    _, best = tl.max(keys, axis=0, return_indices=True)
    token = tl.load(parts.tokens + row * n_parts + tl.minimum(best, n_parts - 1))
    x = tl.load(logits.ptr + row * logits.row_stride + token).to(tl.float32)
    # -inf - -inf is NaN: no token can be chosen
    logp = tl.where(lse == -float("inf"), float("nan"), x - lse)
    sampled = sampling_lse
    if temperature_ptr is not None:
        if scores.ptr is not None:
            x = tl.load(scores.ptr + row * scores.row_stride + token).to(tl.float32)
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            sampled = x * (1.0 / temperature)
    tl.store(results.tokens + row, token)
    tl.store(results.logps + row, logp)
    tl.store(results.sampling_logps + row, sampled - sampling_lse)


def _allocate(logits: Tensor) -> SampledTokens:
    tokens, logps = (logits.new_empty(logits.shape[0], dtype=dtype) for dtype in (torch.int64, torch.float32))
    return SampledTokens(tokens, logps, torch.empty_like(logps))


@register("sample_tokens", fake=_allocate)
def _sample(logits: Tensor, scores: Tensor | None, drawing: _Drawing, bounds: _Bounds) -> SampledTokens:
    results = _allocate(logits)
    n_rows, n_cols = logits.shape
    n_parts = cdiv(n_cols, _BLOCK)
    keys, lse, sampling_lse = (logits.new_empty(n_rows, n_parts, dtype=torch.float32) for _ in range(3))
    parts = _Parts(keys, torch.empty_like(keys, dtype=torch.int64), lse, sampling_lse)
    stride = logits.stride(0)
    operands = StridedRows(logits, stride), StridedRows(scores, stride if scores is None else scores.stride(0))
    _part_kernel[n_rows * n_parts](*operands, drawing, bounds, parts, n_cols, n_parts, _BLOCK, num_warps=4)
    n_parts_tile = next_power_of_2(n_parts)
    _combine_kernel[n_rows](*operands, drawing.temperature, parts, results, n_parts, n_parts_tile, num_warps=1)
    return results


def sample_tokens(
    logits: Tensor,
    scores: Tensor | None = None,
    seeds: Tensor | None = None,
    steps: Tensor | None = None,
    temperature: Tensor | None = None,
    threshold: Tensor | None = None,
    last_token: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> SampledTokens:
    """Draws a token of each row from the softmax of logits / temperature. Not differentiable, and no host sync.

    Args:
        logits: (R, V) of the model, which `logps` refer to.
        scores: (R, V) logits to draw from, such as those after a repetition penalty; None for `logits`.
        seeds: (R,) int64 seeds of the random numbers. None chooses the largest score in all rows.
        steps: (R,) int64, number of tokens that the row has drawn with its seed; required with `seeds`.
        temperature: (R,) fp32; 0 chooses the largest score, the lower token id of equal ones. Required with `seeds`.
        threshold: (R,) fp32: tokens with smaller scores are not drawn, see `filter_bounds`. None draws from all.
        last_token: (R,) int64: of the tokens whose score is `threshold`, those up to this one are drawn; required with
            `threshold`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        The tokens and their log-probabilities. A log-probability is NaN if a logit or score of the row is NaN or inf,
        or all are -inf.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes or dtypes are wrong, an argument is missing, or `backend` is unknown or does not support the
            tensors.
    """
    check_floats("sample_tokens", logits=logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"sample_tokens: logits has shape {tuple(logits.shape)}; expected (R, V) with V > 0")
    if scores is not None:
        check_tensor("sample_tokens", "scores", scores, shapes=[tuple(logits.shape)], device=logits.device)
    of_rows = [(len(logits),)]
    drawing = {"seeds": seeds, "steps": steps, "temperature": temperature}
    bounds = {"threshold": threshold, "last_token": last_token}
    for together in (drawing, bounds):
        if all(value is None for value in together.values()):
            continue
        for argument, value in together.items():
            kind = "floating-point" if argument in ("temperature", "threshold") else "integer"
            check_tensor("sample_tokens", argument, value, kind, of_rows, logits.device)  # type: ignore[arg-type]
    tensors = (logits,) if scores is None else (logits, scores)
    arguments = seeds, steps, temperature, threshold, last_token
    with torch.no_grad():
        if not uses_triton(*tensors, backend=backend):
            return in_row_chunks(reference, logits, scores, *arguments)
        scores = None if scores is None else as_rows(scores)
        return _sample(as_rows(logits), scores, _Drawing(*arguments[:3]), _Bounds(*arguments[3:]))
