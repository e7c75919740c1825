"""The loss of preference pairs: a chosen and a rejected completion of each prompt, in one batch.

The first half of a batch holds the chosen completions; sequence B/2 + i is the rejected completion of pair i. The score
s of a completion is its log-probability, minus that under the reference model if there is one. The loss of n pairs is

    loss = 1/n sum_i w_i f(s_i of the chosen, s_i of the rejected) + a NLL,
    NLL = - sum of log p over the targets of the chosen completions / their number.

The files `dpo` and `reference_free` define f.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligerzoo.checks import NOT_NEGATIVE, check
from ligerzoo.kernels.loss.reduction import as_targets
from ligerzoo.losses.checks import check_both_or_neither, check_constants, check_tensors
from ligerzoo.losses.logps import (
    divisor,
    masked_mean,
    masked_sum,
    summed_mean_logits,
    target_mask,
)
from ligerzoo.losses.objective import GroupObjective, LogpOptions, LossOutput, evaluate
from ligerzoo.tensor_checks import check_num_items, check_tensor

PairFormula = Callable[[Tensor, Tensor], Tensor]
"""f: (n,) scores of the chosen and (n,) scores of the rejected completions -> (n,) losses."""


class PairOptions(NamedTuple):
    """Options that all losses of pairs share.

    Attributes:
        beta: scales the rewards of the metrics; the loss gets its own beta through the formula.
        average_log_prob: whether a score is divided by the number of the completion's tokens.
        average_rewards: whether the rewards and log-probabilities of the metrics are divided so.
        ref_logps: (B,), log-probabilities of the sequences under the reference model, summed over tokens; None for 0.
        weights: (B/2,), w; None for 1.
        nll_weight: a.
        nll_target: (B, T), the targets of the NLL; None for those of the loss. Only the first half is read.
        num_items: n; None for B/2.
        num_nll_items: divides the NLL; None for the number of its targets.
    """

    beta: float
    average_log_prob: bool = False
    average_rewards: bool = False
    ref_logps: Tensor | None = None
    weights: Tensor | None = None
    nll_weight: float = 0.0
    nll_target: Tensor | None = None
    num_items: int | Tensor | None = None
    num_nll_items: int | Tensor | None = None


def check_pair_options(name: str, *, nll_weight: float, num_items: Any, num_nll_items: Any) -> None:
    """Raises for invalid options that all losses of pairs share. `name` is the loss that messages name."""
    check(name, NOT_NEGATIVE, nll_weight=nll_weight)
    check_num_items(name, num_items=num_items, num_nll_items=num_nll_items)


def pair_loss(
    name: str, formula: PairFormula, hidden: Tensor, weight: Tensor | None, target: Tensor, options: PairOptions,
    head: LogpOptions, extra_metrics: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = None,
) -> LossOutput:  # fmt: skip
    """Computes the loss and metrics of the pairs in a batch.

    Args:
        name: the loss that error messages name.
        formula: f.
        hidden: (B, T, H) hidden states, or (B, T, V) logits.
        weight: (V, H) weight of the LM head; None if `hidden` holds logits.
        target: (B, T) token ids, already shifted, or `ignore_index`.
        options: see `PairOptions`.
        head: see `LogpOptions`.
        extra_metrics: (n,) scores of the chosen and of the rejected completions -> (n,) values by name; their means
            become metrics.

    Raises:
        ValueError: shapes or numbers are invalid.
    """
    check_tensors(name, hidden, weight, target, head.get("bias"))
    n_sequences, n_pairs = target.shape[0], target.shape[0] // 2
    check_constants(name, hidden, ref_logps=(options.ref_logps, (n_sequences,)), weights=(options.weights, (n_pairs,)))
    if options.nll_weight:
        reason = "num_nll_items divides the NLL"
        check_both_or_neither(name, reason, num_items=options.num_items, num_nll_items=options.num_nll_items)
    if n_sequences % 2:
        raise ValueError(
            f"{name}: got {n_sequences} sequences; expected an even number, chosen completions in the first half"
        )
    items = divisor(options.num_items, n_pairs, hidden)
    ignore_index, mask = head.get("ignore_index", -100), target_mask(target, head)
    if options.nll_target is not None:
        check_tensor(name, "nll_target", options.nll_target, "integer", [tuple(target.shape)], hidden.device)
        n_classes = hidden.shape[-1] if weight is None else weight.shape[0]
        as_targets(name, options.nll_target[:n_pairs], n_classes, ignore_index, "nll_target")
    nll_mask, nll_items = None, items
    if options.nll_weight:
        nll_target = target if options.nll_target is None else options.nll_target
        is_chosen = torch.arange(n_sequences, device=target.device)[:, None] < n_pairs
        nll_mask = (nll_target != ignore_index) & is_chosen
        target = torch.where(nll_mask, nll_target, target)
        nll_items = divisor(options.num_nll_items, nll_mask.sum(), hidden)
    if options.ref_logps is None:
        ref_logps = torch.zeros(n_sequences, device=target.device)
    else:
        ref_logps = options.ref_logps.detach()
    weights = None if options.weights is None else options.weights.repeat(2)

    def scores(logps: Tensor, mask: Tensor, ref_logps: Tensor, average: bool) -> Tensor:
        log_ratios = masked_sum(logps, mask) - ref_logps
        return log_ratios / mask.sum(-1).clamp(min=1) if average else log_ratios

    def total_loss(
        logps: Tensor, _: None, mask: Tensor, nll_mask: Tensor | None, ref_logps: Tensor, weights: Tensor | None
    ) -> Tensor:  # fmt: skip
        losses = formula(*scores(logps, mask, ref_logps, options.average_log_prob).chunk(2))
        loss = (losses if weights is None else weights[: losses.shape[0]] * losses).sum() / items
        return loss if nll_mask is None else loss - options.nll_weight * masked_sum(logps, nll_mask).sum() / nll_items

    constants = (mask, nll_mask, ref_logps, weights)
    loss, logps, _ = evaluate(name, hidden, weight, target, GroupObjective(total_loss, constants, "pair"), head)
    rewards = options.beta * scores(logps, mask, ref_logps, options.average_rewards)
    metrics = pair_metrics(rewards, (masked_mean if options.average_rewards else masked_sum)(logps, mask))
    logits = summed_mean_logits(hidden, weight, mask, head)
    if logits is not None:
        for which, half in (("chosen", slice(n_pairs)), ("rejected", slice(n_pairs, None))):
            metrics[f"logits/{which}"] = logits[half].sum() / mask[half].sum().clamp(min=1)
    if extra_metrics is not None:
        values = extra_metrics(*scores(logps, mask, ref_logps, options.average_log_prob).chunk(2))
        metrics |= {metric: value.sum() / max(1, n_pairs) for metric, value in values.items()}
    if nll_mask is not None:
        metrics["nll_loss"] = -masked_sum(logps, nll_mask).sum() / nll_mask.sum().clamp(min=1)
    return LossOutput(loss, metrics)


def pair_metrics(rewards: Tensor, logps: Tensor) -> dict[str, Tensor]:
    """Averages (B,) rewards and log-probabilities over the pairs; 0 for an empty batch."""
    n_pairs = max(1, rewards.shape[0] // 2)
    (chosen, rejected), (chosen_logps, rejected_logps) = rewards.chunk(2), logps.chunk(2)
    return {
        "rewards/chosen": chosen.sum() / n_pairs,
        "rewards/rejected": rejected.sum() / n_pairs,
        "rewards/margins": (chosen - rejected).sum() / n_pairs,
        "rewards/accuracies": (chosen > rejected).to(rewards.dtype).sum() / n_pairs,
        "logps/chosen": chosen_logps.sum() / n_pairs,
        "logps/rejected": rejected_logps.sum() / n_pairs,
    }
