"""The losses over all logits, row by row and token by token, as the papers and TRL define them."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.oracles import transformed

IGNORED = -100


def logps_of(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **transform: Any
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities, 0 where no token counts, and entropies."""
    distribution = transformed(F.linear(hidden, weight, bias), **transform).log_softmax(-1)
    counts = target != IGNORED
    logps = distribution.gather(-1, target.where(counts, 0)[..., None])[..., 0]
    return torch.where(counts, logps, 0.0), -(distribution.exp() * distribution).sum(-1)


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def kl_of_pairs(p: tuple[Tensor, Tensor], q: tuple[float, float]) -> Tensor:
    return sum((a * (a.log() - math.log(b)) for a, b in zip(p, q, strict=True)), torch.zeros(()))


DPO: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": lambda c, r, b, e: -(1 - e) * log_sigmoid(b * (c - r)) - e * log_sigmoid(b * (r - c)),
    "robust": lambda c, r, b, e: (
        ((1 - e) * -log_sigmoid(b * (c - r)) - e * -log_sigmoid(b * (r - c))) / (1 - 2 * e)
    ),
    "hinge": lambda c, r, b, e: (1 - b * (c - r)).clamp(min=0),
    "ipo": lambda c, r, b, e: (c - r - 1 / (2 * b)) ** 2,
    "exo_pair": lambda c, r, b, e: kl_of_pairs(
        (torch.sigmoid(b * (c - r)), torch.sigmoid(b * (r - c))), (1 - e, e)
    ),
    "nca_pair": lambda c, r, b, e: -log_sigmoid(b * c) - (log_sigmoid(-b * c) + log_sigmoid(-b * r)) / 2,
    "bco_pair": lambda c, r, b, e: -log_sigmoid(b * c) - log_sigmoid(-b * r),
    "sppo_hard": lambda c, r, b, e: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,
    "apo_zero": lambda c, r, b, e: 1 - torch.sigmoid(b * c) + torch.sigmoid(b * r),
    "apo_down": lambda c, r, b, e: torch.sigmoid(b * c) + 1 - torch.sigmoid(b * (c - r)),
    "discopop": lambda c, r, b, e: (
        -log_sigmoid(b * (c - r)) * (1 - torch.sigmoid(b * (c - r) / 0.05))
        + torch.exp(-b * (c - r)) * torch.sigmoid(b * (c - r) / 0.05)
    ),
}  # fmt: skip


def pairs(
    logps: Tensor,
    target: Tensor,
    formula: Callable[[Tensor, Tensor], Tensor],
    *,
    average: bool = False,
    ref_logps: Tensor | None = None,
    weights: Tensor | None = None,
    nll_weight: float = 0.0,
    nll: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The mean over pairs, one pair after the other; `nll` are log-probabilities and targets of another NLL."""
    n = len(target) // 2
    losses = []
    for i in range(n):
        scores = []
        for row in (i, n + i):
            score = logps[row].sum() - (0.0 if ref_logps is None else ref_logps[row])
            scores.append(score / max(1, int((target[row] != IGNORED).sum())) if average else score)
        loss = formula(*scores)
        losses.append(loss if weights is None else weights[i] * loss)
    total = torch.stack(losses).mean()
    nll_logps, nll_target = (logps, target) if nll is None else nll
    if nll_weight:
        total = total - nll_weight * nll_logps[:n].sum() / max(1, int((nll_target[:n] != IGNORED).sum()))
    return total


def orpo_formula(beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    def log_odds(logp: Tensor) -> Tensor:
        return torch.log(logp.exp() / (1 - logp.exp()))

    return lambda c, r: -beta * log_sigmoid(log_odds(c) - log_odds(r))


def kto(
    logps: Tensor, desirable: Tensor, ref_logps: Tensor, kl: Tensor | float, beta: float, up: float, down: float
) -> Tensor:
    losses = []
    for row, is_good, ref in zip(logps, desirable, ref_logps, strict=True):
        gain = row.sum() - ref
        losses.append(
            up * (1 - torch.sigmoid(beta * (gain - kl))) if is_good else down * (1 - torch.sigmoid(beta * (kl - gain)))
        )
    return torch.stack(losses).mean()


def grpo(
    logps: Tensor,
    entropy: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    variant: str = "grpo",
    level: str | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    correction: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    is_kl_corrected: bool = False,
    entropy_coef: float = 0.0,
    max_length: int = 1,
) -> Tensor:
    """Row by row, and within it token by token."""
    level = level or ("sequence" if variant in ("gspo", "luspo") else "token")
    high = epsilon if epsilon_high is None else epsilon_high
    rows, n_tokens = [], max(1, int((target != IGNORED).sum()))
    for b in range(len(target)):
        places = [t for t in range(target.shape[1]) if target[b, t] != IGNORED]
        old = logps[b].detach() if old_logps is None else old_logps[b]
        log_ratios = {t: logps[b, t] - old[t] for t in places}
        tokens = []
        for t in places:
            a = advantages[b] if advantages.dim() == 1 else advantages[b, t]
            log_ratio = log_ratios[t] if level == "token" else sum(log_ratios.values()) / len(places)
            ratio = torch.exp(log_ratio)
            if variant == "cispo":
                loss = -torch.clamp(ratio, max=1 + high).detach() * a * logps[b, t]
            elif variant == "sapo":
                temperature = 1.0 if a > 0 else 1.05
                loss = -a * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
            elif variant == "vespo":
                log_w = sum(x.detach().clamp(-20, 20) for x in log_ratios.values())
                if correction is not None:
                    log_w = log_w + sum(correction[b, u].log().clamp(math.log(1e-8), 20) for u in places)
                log_w = log_w.clamp(math.log(1e-8), 20)
                k, h = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
                loss = -torch.exp(h + k * log_w - h * log_w.exp()) * a * logps[b, t]
            else:
                one = ratio if delta is None else torch.clamp(ratio, max=delta)
                loss = -torch.min(one * a, torch.clamp(ratio, 1 - epsilon, 1 + high) * a)
            if correction is not None and variant != "vespo":
                loss = loss * correction[b, t]
            if beta:
                assert ref_logps is not None
                difference = ref_logps[b, t] - logps[b, t]
                kl = torch.exp(difference) - difference - 1
                loss = loss + beta * (kl * ratio if is_kl_corrected else kl)
            tokens.append(loss)
        rows.append(torch.stack(tokens) if tokens else logps.new_zeros(0))
    sums = torch.stack([row.sum() for row in rows])
    if variant in ("grpo", "gspo", "sapo"):
        total = torch.stack([row.sum() / max(1, len(row)) for row in rows]).mean()
    elif variant in ("bnpo", "dapo", "cispo", "vespo"):
        total = sums.sum() / n_tokens
    else:
        total = sums.mean() / (max_length if variant == "dr_grpo" else 1)
    return total - entropy_coef * torch.where(target != IGNORED, entropy, 0.0).sum() / n_tokens
