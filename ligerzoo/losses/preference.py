"""The loss of preference pairs: a chosen and a rejected completion of each prompt, in one batch.

The first half of a batch holds the chosen completions; sequence B/2 + i is the rejected completion of pair i. The score
s of a completion is its log-probability, minus that under the reference model if there is one. The loss of n pairs is

    loss = 1/n sum_i w_i f(s_i of the chosen, s_i of the rejected) + a NLL,
    NLL = - sum of log p over the targets of the chosen completions / their number.

The files `dpo` and `reference_free` define f.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.loss.reduction import as_targets
from ligerzoo.losses.checks import check_both_or_neither, check_constants, check_sequences
from ligerzoo.losses.logps import items_or, log_ratios, masked_mean, masked_sum, summed_mean_logits
from ligerzoo.losses.objective import GroupObjective, LossOutput, evaluate_objective
from ligerzoo.losses.options import LogpOptions, LossInputs, NotNegative, NumItems, Positive
from ligerzoo.tensor_checks import check_num_items, check_tensor


@dataclass(frozen=True, kw_only=True)
class PairOptions(LogpOptions):
    """Options of all losses of pairs. A subclass defines `pair_losses`, f.

    Attributes:
        weights: (B/2,), multiplies the loss of each pair without its NLL; a constant. Default: 1.
        num_items: divides the summed losses. Default: B/2. For exact gradient accumulation, pass the number of pairs
            in the step to every microbatch.
        num_nll_items: divides the summed NLL. Default: the number of its targets. With an NLL, pass it together with
            `num_items`.
    """

    beta: Positive = 0.1
    weights: Tensor | None = None
    nll_weight: NotNegative = 0.0
    num_items: NumItems = None
    num_nll_items: NumItems = None

    def check(self, name: str) -> None:
        check_num_items(name, num_items=self.num_items, num_nll_items=self.num_nll_items)

    @property
    def averages_scores(self) -> bool:
        """Whether a score is divided by the number of the completion's tokens."""
        return True

    @property
    def averages_rewards(self) -> bool:
        """Whether the rewards and log-probabilities of the metrics are divided so."""
        return self.averages_scores

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Returns f of (n,) scores of the chosen and (n,) scores of the rejected completions: (n,)."""
        raise NotImplementedError

    def pair_metrics(self, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        """Returns further (n,) values by name, whose means become metrics."""
        return {}


class Pairs(NamedTuple):
    """Constants of the sequences of pairs.

    Attributes:
        mask: (B, T), True at non-ignored tokens.
        nll_mask: (B, T), True at the tokens of the NLL; None without one.
        ref_logps: (B,).
        weights: (B,), of the pair of each sequence; None for 1.
    """

    mask: Tensor
    nll_mask: Tensor | None
    ref_logps: Tensor
    weights: Tensor | None


def pair_loss(
    inputs: LossInputs, options: PairOptions, *, ref_logps: Tensor | None = None, nll_target: Tensor | None = None
) -> LossOutput:
    """Computes the loss and metrics of the pairs in a batch.

    Args:
        inputs: hidden states or logits, weight and targets.
        options: those of the loss.
        ref_logps: (B,), log-probabilities of the sequences under the reference model, summed over tokens; None for 0.
        nll_target: (B, T), the targets of the NLL; None for those of the loss. Only the first half is read.

    Raises:
        ValueError: shapes or numbers are invalid.
    """
    inputs_of_both, pairs = _checked_pairs(inputs, options, ref_logps, nll_target)
    mask, nll_mask, ref_logps, _ = pairs
    n_pairs = mask.shape[0] // 2
    items = nll_items = items_or(options.num_items, n_pairs, inputs.hidden)
    if nll_mask is not None:
        nll_items = items_or(options.num_nll_items, nll_mask.sum(), inputs.hidden)

    def total_loss(logps: Tensor, _: None, *constants: Tensor) -> Tensor:
        mask, nll_mask, ref_logps, weights = Pairs(*constants)
        losses = options.pair_losses(*log_ratios(logps, mask, ref_logps, options.averages_scores).chunk(2))
        loss = (losses if weights is None else weights[: losses.shape[0]] * losses).sum() / items
        return loss if nll_mask is None else loss - options.nll_weight * masked_sum(logps, nll_mask).sum() / nll_items

    loss, logps, _ = evaluate_objective(inputs_of_both, GroupObjective(total_loss, pairs, "pair"), options)
    averages = options.averages_rewards
    rewards = options.beta * log_ratios(logps, mask, ref_logps, averages)
    metrics = _pair_means(rewards, (masked_mean if averages else masked_sum)(logps, mask))
    logits = summed_mean_logits(inputs, mask, options)
    if logits is not None:
        for which, half in (("chosen", slice(n_pairs)), ("rejected", slice(n_pairs, None))):
            metrics[f"logits/{which}"] = logits[half].sum() / mask[half].sum().clamp(min=1)
    values = options.pair_metrics(*log_ratios(logps, mask, ref_logps, options.averages_scores).chunk(2))
    metrics |= {metric: value.sum() / max(1, n_pairs) for metric, value in values.items()}
    if nll_mask is not None:
        metrics["nll_loss"] = -masked_sum(logps, nll_mask).sum() / nll_mask.sum().clamp(min=1)
    return LossOutput(loss, metrics)


def _checked_pairs(
    inputs: LossInputs, options: PairOptions, ref_logps: Tensor | None, nll_target: Tensor | None
) -> tuple[LossInputs, Pairs]:
    """Returns the inputs with the targets of both terms, and the constants. Raises as `pair_loss`."""
    check_sequences(inputs, options.bias)
    name, hidden, _, target = inputs
    n_sequences, n_pairs = target.shape[0], target.shape[0] // 2
    check_constants(inputs, ref_logps=(ref_logps, (n_sequences,)), weights=(options.weights, (n_pairs,)))
    if options.nll_weight:
        numbers = {"num_items": options.num_items, "num_nll_items": options.num_nll_items}
        check_both_or_neither(name, "num_nll_items divides the NLL", **numbers)
    if n_sequences % 2:
        expected = "an even number, chosen completions in the first half"
        raise LigerzooError(f"got {n_sequences} sequences", where=name, expected=expected)
    mask, nll_mask = options.target_mask(target), None
    if nll_target is not None:
        check_tensor(name, "nll_target", nll_target, "integer", [tuple(target.shape)], hidden.device)
        as_targets(name, nll_target[:n_pairs], inputs.n_classes, options.ignore_index, "nll_target")
    if options.nll_weight:
        nll_target = target if nll_target is None else nll_target
        is_chosen = torch.arange(n_sequences, device=target.device)[:, None] < n_pairs
        nll_mask = options.target_mask(nll_target) & is_chosen
        target = torch.where(nll_mask, nll_target, target)
    ref_logps = torch.zeros(n_sequences, device=target.device) if ref_logps is None else ref_logps.detach()
    weights = None if options.weights is None else options.weights.repeat(2)
    return inputs._replace(target=target), Pairs(mask, nll_mask, ref_logps, weights)


def _pair_means(rewards: Tensor, logps: Tensor) -> dict[str, Tensor]:
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
