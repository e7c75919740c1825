"""What losses over pairs of answers share: a chosen and a rejected answer to one prompt, in one batch.

The first half of a batch's rows are chosen, and row B/2 + i is what was rejected in favour of row i. With s the score
of an answer, its log-probability less that under a reference model, if there is one,

    loss = 1/n sum_i w_i f(s_i of the chosen, s_i of the rejected) + a NLL,
    NLL = - sum over the chosen answers' tokens of log p / their number.

The files of the losses say what f is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.losses.logps import check_number, check_rows, check_together, counted, divisor, mean_logits, summed
from ligerzoo.losses.objective import LogpOptions, LossOutput, Objective, evaluate

PairFormula = Callable[[Tensor, Tensor], Tensor]
"""f: the (n,) scores of the chosen and of the rejected answers -> (n,) losses."""


class PairOptions(NamedTuple):
    """What the pairs' losses have in common.

    Attributes:
        beta: makes scores rewards, in the metrics.
        average: whether a score is divided by the number of the answer's tokens.
        average_rewards: whether that of the metrics is.
        ref_logps: (B,), the rows' log-probabilities under the reference, sums over their tokens; None for 0.
        weights: (B/2,), w; None for 1.
        nll_weight: a.
        nll_target: (B, T), the targets that the NLL counts where they are not the loss's own; only the first half's
            are looked at.
        num_items: n, in place of B/2.
        num_nll_items: what divides the NLL, in place of the number of its tokens.
    """

    beta: float
    average: bool = False
    average_rewards: bool = False
    ref_logps: Tensor | None = None
    weights: Tensor | None = None
    nll_weight: float = 0.0
    nll_target: Tensor | None = None
    num_items: int | Tensor | None = None
    num_nll_items: int | Tensor | None = None


def pair_loss(
    name: str, formula: PairFormula, hidden: Tensor, weight: Tensor | None, target: Tensor, options: PairOptions,
    head: LogpOptions, more_metrics: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = None,
) -> LossOutput:  # fmt: skip
    """The loss of pairs; ValueError for shapes or numbers that do not fit.

    Args:
        more_metrics: the (n,) scores of the chosen and of the rejected answers -> (n,) numbers by name, whose means are
            metrics.
    """
    n_rows, n_pairs = target.shape[0], target.shape[0] // 2
    check_rows(
        name, hidden, target, ref_logps=(options.ref_logps, (n_rows,)), weights=(options.weights, (n_pairs,)),
        nll_target=(options.nll_target, tuple(target.shape)),
    )  # fmt: skip
    check_number(name, num_items=options.num_items, num_nll_items=options.num_nll_items)
    if options.nll_weight:
        why = "the NLL is divided by its own tokens"
        check_together(name, why, num_items=options.num_items, num_nll_items=options.num_nll_items)
    if n_rows % 2:
        raise ValueError(f"{name}: {n_rows} rows; expected an even number, the chosen answers in the first half")
    items = divisor(options.num_items, n_pairs, hidden)
    ignore_index, mask = head.get("ignore_index", -100), counted(target, head)
    nll_mask, nll_items = None, items
    if options.nll_weight:
        nll_target = target if options.nll_target is None else options.nll_target
        is_chosen = torch.arange(n_rows, device=target.device)[:, None] < n_pairs
        nll_mask = (nll_target != ignore_index) & is_chosen
        target = torch.where(nll_mask, nll_target, target)
        nll_items = divisor(options.num_nll_items, nll_mask.sum(), hidden)
    ref_logps = torch.zeros(n_rows, device=target.device) if options.ref_logps is None else options.ref_logps.detach()
    weights = None if options.weights is None else options.weights.repeat(2)

    def scores(logps: Tensor, mask: Tensor, ref_logps: Tensor, average: bool) -> Tensor:
        total = summed(logps, mask) - ref_logps
        return total / mask.sum(-1).clamp(min=1) if average else total

    def objective(
        logps: Tensor, _: None, mask: Tensor, nll_mask: Tensor | None, ref_logps: Tensor, weights: Tensor | None
    ) -> Tensor:  # fmt: skip
        losses = formula(*scores(logps, mask, ref_logps, options.average).chunk(2))
        loss = (losses if weights is None else weights[: losses.shape[0]] * losses).sum() / items
        return loss if nll_mask is None else loss - options.nll_weight * summed(logps, nll_mask).sum() / nll_items

    constants = (mask, nll_mask, ref_logps, weights)
    loss, logps, _ = evaluate(name, hidden, weight, target, Objective(objective, constants, "pair"), head)
    rewards = options.beta * scores(logps, mask, ref_logps, options.average_rewards)
    metrics = pair_metrics(rewards, summed(logps, mask, options.average_rewards))
    logits = mean_logits(hidden, weight, mask, head)
    if logits is not None:
        for which, rows in (("chosen", slice(n_pairs)), ("rejected", slice(n_pairs, None))):
            metrics[f"logits/{which}"] = logits[rows].sum() / mask[rows].sum().clamp(min=1)
    if more_metrics is not None:
        of_pairs = more_metrics(*scores(logps, mask, ref_logps, options.average).chunk(2))
        metrics |= {name: numbers.sum() / max(1, n_pairs) for name, numbers in of_pairs.items()}
    if nll_mask is not None:
        metrics["nll_loss"] = -summed(logps, nll_mask).sum() / nll_mask.sum().clamp(min=1)
    return LossOutput(loss, metrics)


def pair_metrics(rewards: Tensor, logps: Tensor) -> dict[str, Tensor]:
    """Means over the pairs, of (B,) rewards and log-probabilities; without a pair all are 0."""
    pairs = max(1, rewards.shape[0] // 2)
    chosen, rejected = rewards.chunk(2) if rewards.shape[0] else (rewards, rewards)
    of_chosen, of_rejected = logps.chunk(2) if logps.shape[0] else (logps, logps)
    return {
        "rewards/chosen": chosen.sum() / pairs,
        "rewards/rejected": rejected.sum() / pairs,
        "rewards/margins": (chosen - rejected).sum() / pairs,
        "rewards/accuracies": (chosen > rejected).to(rewards.dtype).sum() / pairs,
        "logps/chosen": of_chosen.sum() / pairs,
        "logps/rejected": of_rejected.sum() / pairs,
    }
