"""Cross entropy, its statistics and the gradient of a row of logits: the formulas, and plain torch for them.

With logits z, scale a, softcap c and temperature T:

    x_v = a z_v / T,  or  c tanh(a z_v / c) / T  with a softcap;
    m = max_v x_v,  s = log sum_v exp(x_v - m),  p_v = exp(x_v - m - s)      (m + s would lose s where m is large);
    logp = x_y - m - s  of the target y,   logsumexp = m + s,   entropy = s - sum_v p_v (x_v - m);
    loss = -(1 - e) w_y logp + (e / V) sum_v w_v (logsumexp - x_v) + k logsumexp^2

for class weights w (default 1), label smoothing e (Szegedy et al. 2016, section 7) and z-loss k (Chowdhery et al. 2022,
section 5). For upstream gradients g of the loss, and l, h and q of logp, entropy and logsumexp,

    dx_v = p_v (A - h (x_v - m - s + entropy)) - B [v = y] - C w_v,
    A = g ((1 - e) w_y + e mean(w) + 2 k logsumexp) - l + q,   B = g (1 - e) w_y - l,   C = g e / V.

All arithmetic is in fp32 (fp64 for fp64 logits). An ignored row has zero results and a zero gradient, whatever its
logits. A target outside [0, V) gives NaN. `row_kernel` has the Triton kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.softcap import Transform, transformed


class Terms(NamedTuple):
    """The transform of the logits, and the terms of the loss.

    Attributes:
        scale: multiplies the logits.
        softcap: c, for logits `c tanh(logits / c)`, after the scale.
        temperature: divides the logits, after the softcap.
        label_smoothing: the share of a target distributed evenly over all classes.
        z_loss: the factor of `logsumexp(logits)^2` in the loss.
        ignore_index: the target of ignored tokens.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100


class RowResults(NamedTuple):
    """One number per row, 0 for an ignored row: fp32 (fp64 for fp64 logits), except `argmax`, which is int64."""

    loss: Tensor
    logp: Tensor
    entropy: Tensor
    logsumexp: Tensor
    argmax: Tensor


class Upstream(NamedTuple):
    """The gradients of an objective with respect to `RowResults`; None for results that it does not depend on."""

    loss: Tensor | None = None
    logp: Tensor | None = None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None


NO_UPSTREAM = Upstream()


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of the model's distribution over the vocabulary at each token; 0 at an ignored token.

    Attributes:
        logps: (...) fp32 (fp64 for fp64 input), the target's log-probability.
        entropy: (...) fp32, the entropy of the distribution, in nats.
        logsumexp: (...) fp32, the logarithm of the sum of the exponentials of the logits.
        argmax: (...) int64, the most likely token.
        accuracy: 0-d fp32, the share of valid tokens whose target is the most likely token; 0 without a valid token.
    """

    logps: Tensor
    entropy: Tensor
    logsumexp: Tensor
    argmax: Tensor
    accuracy: Tensor


def token_statistics_from(results: Sequence[Tensor], target: Tensor, ignore_index: int) -> TokenStatistics:
    """Returns the statistics in the targets' shape, from `RowResults` of the flattened targets."""
    _, logps, entropy, logsumexp, argmax = (t.view(target.shape) for t in results)
    valid = target != ignore_index
    accuracy = ((argmax == target) & valid).sum() / valid.sum().clamp(min=1)
    return TokenStatistics(logps, entropy, logsumexp, argmax, accuracy)


def _transformed(logits: Tensor, valid: Tensor, terms: Terms) -> tuple[Tensor, Tensor | float]:
    """Returns x and dx/dz; for an ignored row those of zeros, because its NaN or inf would reach the gradient."""
    z = logits.to(accumulation_dtype(logits.dtype)).masked_fill(~valid[:, None], 0.0)
    return transformed(z, Transform(terms.scale, terms.softcap), terms.temperature)


def _targets_and_weights(
    x: Tensor, target: Tensor, valid: Tensor, class_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (whether each target is in the vocabulary, (M, 1) columns of the targets, (V,) class weights)."""
    in_vocabulary = (target >= 0) & (target < x.shape[-1])
    y = torch.where(valid & in_vocabulary, target, 0)[:, None]
    return in_vocabulary, y, x.new_ones(x.shape[-1]) if class_weight is None else class_weight.to(x.dtype)


def reference(
    logits: Tensor, target: Tensor, terms: Terms, class_weight: Tensor | None = None, *, statistics: bool = True
) -> RowResults:
    """Returns the results of (M, V) logits in plain torch, differentiable: the specification and the tests' oracle.

    Entropies and argmaxes are empty unless `statistics` is set.
    """
    valid = target != terms.ignore_index
    x, _ = _transformed(logits, valid, terms)
    in_vocabulary, y, weights = _targets_and_weights(x, target, valid, class_weight)
    logps = x.log_softmax(-1)
    logp = torch.where(in_vocabulary, logps.gather(-1, y)[:, 0], torch.nan)
    logsumexp = x.logsumexp(-1)
    loss = -(1 - terms.label_smoothing) * weights[y[:, 0]] * logp
    if terms.label_smoothing:
        loss = loss - terms.label_smoothing / x.shape[-1] * (weights * logps).sum(-1)
    if terms.z_loss:
        loss = loss + terms.z_loss * logsumexp.square()
    return RowResults(
        torch.where(valid, loss, 0.0),
        torch.where(valid, logp, 0.0),
        torch.where(valid, -_p_log_p(logps.exp(), logps).sum(-1), 0.0) if statistics else x.new_empty(0),
        torch.where(valid, logsumexp, 0.0),
        torch.where(valid, x.argmax(-1), 0) if statistics else target.new_empty(0),
    )


def _p_log_p(probabilities: Tensor, logps: Tensor) -> Tensor:
    """Returns p log p of each class, 0 where p is 0. The sum is the negative entropy."""
    return torch.where(probabilities > 0, probabilities * logps, 0.0)


def reference_gradient(
    logits: Tensor, target: Tensor, upstream: Upstream, terms: Terms, class_weight: Tensor | None = None
) -> Tensor:
    """Returns the gradient with respect to (M, V) logits in plain torch, in fp32 (fp64 for fp64 logits)."""
    valid = target != terms.ignore_index
    x, slope = _transformed(logits, valid, terms)
    in_vocabulary, y, weights = _targets_and_weights(x, target, valid, class_weight)
    zero = x.new_zeros(x.shape[0])
    g, grad_logp, grad_entropy, grad_logsumexp = (zero if u is None else u.to(x.dtype) for u in upstream)
    logps = x.log_softmax(-1)
    probabilities = logps.exp()
    smoothing, target_weight = terms.label_smoothing, torch.where(in_vocabulary, weights[y[:, 0]], torch.nan)
    a = g * ((1 - smoothing) * target_weight + smoothing * weights.mean() + 2 * terms.z_loss * x.logsumexp(-1))
    dx = probabilities * (a - grad_logp + grad_logsumexp)[:, None]
    if upstream.entropy is not None:
        weighted = _p_log_p(probabilities, logps)
        dx = dx - grad_entropy[:, None] * (weighted - probabilities * weighted.sum(-1, keepdim=True))
    if smoothing:
        dx = dx - (g * smoothing / x.shape[-1])[:, None] * weights
    dx = dx.scatter_add(-1, y, (grad_logp - g * (1 - smoothing) * target_weight)[:, None])
    return torch.where(valid[:, None], dx * slope, 0.0)
