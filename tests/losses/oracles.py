"""The losses over all logits, one sequence and token at a time, as the papers and TRL define them."""

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
    """(B, T) log-probabilities, 0 at ignored tokens, and entropies."""
    return logps_of_logits(transformed(F.linear(hidden, weight, bias), **transform), target)


def logps_of_logits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    distribution = logits.log_softmax(-1)
    mask = target != IGNORED
    logps = distribution.gather(-1, target.where(mask, 0)[..., None])[..., 0]
    return torch.where(mask, logps, 0.0), -(distribution.exp() * distribution).sum(-1)


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def kl_of_pairs(p: tuple[Tensor, Tensor], q: tuple[float, float]) -> Tensor:
    return sum((a * (a.log() - math.log(b)) for a, b in zip(p, q, strict=True)), torch.zeros(()))


def discopop(c: Tensor, r: Tensor, b: float, tau: float) -> Tensor:
    gate = torch.sigmoid(b * (c - r) / tau)
    return -log_sigmoid(b * (c - r)) * (1 - gate) + torch.exp(-b * (c - r)) * gate


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
    "discopop": lambda c, r, b, e: discopop(c, r, b, 0.05),
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
    num_items: float | None = None,
    num_nll_items: float | None = None,
) -> Tensor:
    """The mean over pairs, one at a time; `nll` holds log-probabilities and targets of an NLL over other tokens."""
    n = len(target) // 2
    losses = []
    for i in range(n):
        scores = []
        for j in (i, n + i):
            score = logps[j].sum() - (0.0 if ref_logps is None else ref_logps[j])
            scores.append(score / max(1, int((target[j] != IGNORED).sum())) if average else score)
        loss = formula(*scores)
        losses.append(loss if weights is None else weights[i] * loss)
    total = torch.stack(losses).sum() / (num_items or n)
    nll_logps, nll_target = (logps, target) if nll is None else nll
    if nll_weight:
        nll_items = num_nll_items or max(1, int((nll_target[:n] != IGNORED).sum()))
        total = total - nll_weight * nll_logps[:n].sum() / nll_items
    return total


def orpo_formula(beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    def log_odds(logp: Tensor) -> Tensor:
        return torch.log(logp.exp() / (1 - logp.exp()))

    return lambda c, r: -beta * log_sigmoid(log_odds(c) - log_odds(r))


def kto(
    logps: Tensor, desirable: Tensor, ref_logps: Tensor, kl: Tensor | float, beta: float,
    desirable_weight: float, undesirable_weight: float,
    lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(B,) losses; with `lengths`, of averaged log-probabilities."""
    losses = []
    for b, (token_logps, is_desirable, ref) in enumerate(zip(logps, desirable, ref_logps, strict=True)):
        gain = token_logps.sum() - ref
        if lengths is not None:
            gain = gain / max(1, int(lengths[b]))
        if is_desirable:
            losses.append(desirable_weight * (1 - torch.sigmoid(beta * (gain - kl))))
        else:
            losses.append(undesirable_weight * (1 - torch.sigmoid(beta * (kl - gain))))
    return torch.stack(losses)


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
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    vespo_shapes: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0)),
    num_items: float | None = None,
    num_tokens: float | None = None,
) -> Tensor:
    """One sequence at a time, and within it one token at a time."""
    level = level or ("sequence" if variant in ("gspo", "luspo") else "token")
    high = epsilon if epsilon_high is None else epsilon_high
    sequences, n_tokens = [], max(1, int((target != IGNORED).sum()))
    for b in range(len(target)):
        positions = [t for t in range(target.shape[1]) if target[b, t] != IGNORED]
        old = logps[b].detach() if old_logps is None else old_logps[b]
        log_ratios = {t: logps[b, t] - old[t] for t in positions}
        tokens = []
        for t in positions:
            a = advantages[b] if advantages.dim() == 1 else advantages[b, t]
            log_ratio = log_ratios[t] if level == "token" else sum(log_ratios.values()) / len(positions)
            ratio = torch.exp(log_ratio)
            if variant == "cispo":
                loss = -torch.clamp(ratio, max=1 + high).detach() * a * logps[b, t]
            elif variant == "sapo":
                temperature = sapo_temperatures[0 if a > 0 else 1]
                loss = -a * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
            elif variant == "vespo":
                log_w = sum(x.detach().clamp(-20, 20) for x in log_ratios.values())
                if correction is not None:
                    log_w = log_w + sum(correction[b, u].log().clamp(math.log(1e-8), 20) for u in positions)
                log_w = log_w.clamp(math.log(1e-8), 20)
                k, h = vespo_shapes[0 if a >= 0 else 1]
                loss = -torch.exp(h + k * log_w - h * log_w.exp()) * a * logps[b, t]
            else:
                capped = ratio if delta is None else torch.clamp(ratio, max=delta)
                loss = -torch.min(capped * a, torch.clamp(ratio, 1 - epsilon, 1 + high) * a)
            if correction is not None and variant != "vespo":
                loss = loss * correction[b, t]
            if beta:
                assert ref_logps is not None
                difference = ref_logps[b, t] - logps[b, t]
                kl = torch.exp(difference) - difference - 1
                loss = loss + beta * (kl * ratio if is_kl_corrected else kl)
            tokens.append(loss)
        sequences.append(torch.stack(tokens) if tokens else logps.new_zeros(0))
    sums = torch.stack([losses.sum() for losses in sequences])
    if variant in ("grpo", "gspo", "sapo"):
        total = torch.stack([losses.sum() / max(1, len(losses)) for losses in sequences]).sum()
        total = total / (num_items or len(sequences))
    elif variant in ("bnpo", "dapo", "cispo", "vespo"):
        total = sums.sum() / (num_items or n_tokens)
    else:
        total = sums.sum() / (num_items or len(sequences)) / (max_length if variant == "dr_grpo" else 1)
    return total - entropy_coef * torch.where(target != IGNORED, entropy, 0.0).sum() / (num_tokens or n_tokens)


# Metrics


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask].double().mean() if mask.any() else torch.zeros((), dtype=torch.float64)


def pair_metrics(
    logps: Tensor, logits: Tensor, target: Tensor, beta: float, *, average: bool, ref_logps: Tensor | None = None
) -> dict[str, Tensor]:
    """Expects logits before the temperature."""
    n, mask = len(target) // 2, target != IGNORED
    lengths = mask.sum(-1).clamp(min=1) if average else 1
    rewards = beta * (logps.sum(-1) - (0.0 if ref_logps is None else ref_logps)) / lengths
    scores = logps.sum(-1) / lengths
    return {
        "rewards/chosen": rewards[:n].mean(),
        "rewards/rejected": rewards[n:].mean(),
        "rewards/margins": (rewards[:n] - rewards[n:]).mean(),
        "rewards/accuracies": (rewards[:n] > rewards[n:]).double().mean(),
        "logps/chosen": scores[:n].mean(),
        "logps/rejected": scores[n:].mean(),
        "logits/chosen": _mean(logits[:n].mean(-1), mask[:n]),
        "logits/rejected": _mean(logits[n:].mean(-1), mask[n:]),
    }


def kto_metrics(
    logps: Tensor, logits: Tensor, target: Tensor, desirable: Tensor, ref_logps: Tensor, beta: float
) -> dict[str, Tensor]:
    mask, metrics = target != IGNORED, {}
    rewards = beta * (logps.sum(-1) - ref_logps)
    for which, selected in (("chosen", desirable), ("rejected", ~desirable)):
        metrics[f"count/{which}"] = selected.sum()
        metrics[f"rewards/{which}"] = _mean(rewards, selected)
        metrics[f"logps/{which}"] = _mean(logps.sum(-1), selected)
        metrics[f"logits/{which}"] = _mean(logits.mean(-1), mask & selected[:, None])
    return {**metrics, "rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}


def grpo_metrics(
    logps: Tensor, entropy: Tensor, target: Tensor, advantages: Tensor, *, variant: str, level: str | None,
    old_logps: Tensor | None, ref_logps: Tensor | None, epsilon: float, epsilon_high: float, is_kl_corrected: bool,
) -> dict[str, Tensor]:  # fmt: skip
    mask = target != IGNORED
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    is_sequence_level = (level or ("sequence" if variant in ("gspo", "luspo") else "token")) == "sequence"
    log_ratio = torch.where(mask, logps - (logps if old_logps is None else old_logps), 0.0)
    ratio = torch.exp(log_ratio.sum(-1, keepdim=True) / lengths if is_sequence_level else log_ratio).expand(logps.shape)
    a = advantages if advantages.dim() == 2 else advantages[:, None]

    def fraction(clipped: Tensor) -> Tensor:
        per_sequence = (clipped & mask).sum(-1, keepdim=True) / lengths.double()
        return per_sequence.mean() if is_sequence_level else _mean(clipped.double(), mask)

    metrics = {"entropy": _mean(entropy, mask)}
    if old_logps is not None:
        metrics["log_ratio"] = _mean(log_ratio.abs(), mask)
    if ref_logps is not None:
        k3 = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
        metrics["kl"] = _mean(k3 * ratio if is_kl_corrected else k3, mask)
    if variant not in ("sapo", "vespo"):
        low, high = (ratio < 1 - epsilon) & (a < 0), (ratio > 1 + epsilon_high) & (a > 0)
        metrics["clip_ratio/high"] = fraction(high)
        if variant != "cispo":
            metrics |= {"clip_ratio/low": fraction(low), "clip_ratio/region": fraction(low | high)}
    return metrics


# Distillation


def distance(divergence: str, student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    log_q, log_p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return {
        "forward_kl": kl(log_p, log_q),
        "reverse_kl": kl(log_q, log_p),
        "jsd": beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m),
        "tvd": (log_p.exp() - log_q.exp()).abs().sum(-1) / 2,
        "cosine": 1 - F.cosine_similarity(student, teacher, dim=-1),
    }[divergence]
