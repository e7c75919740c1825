"""Kahneman-Tversky optimization: completions labelled desirable or undesirable, without pairs.

Let q be the log-ratio log p(y | x) - log p_ref(y | x) of a completion, z the KL divergence of the model from the
reference, b = beta and S the logistic function. The loss of a sequence is (Ethayarajh et al. 2024, eq. 7)

    kto                  w_d S(-b (q - z)) if desirable,   w_u S(b (q - z)) if undesirable
    apo_zero_unpaired    the same with z = 0                        (D'Oosterlinck et al. 2024, eq. 7)

z is a constant, see `kto_kl`. It is estimated as the mean log-ratio, at least 0, of mismatched completions: those of
the batch, each with the next prompt. With averaged log-probabilities, q and z are averages over a completion's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from ligerzoo.checks import one_of
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.checks import check_constants, check_sequences
from ligerzoo.losses.logps import items_or, log_ratios, masked_sum, summed_mean_logits
from ligerzoo.losses.objective import GroupObjective, LossOutput, evaluate_objective
from ligerzoo.losses.options import LogpOptions, LossInputs, NotNegative, NumItems, Positive, takes
from ligerzoo.tensor_checks import check_floats, check_num_items, check_tensor

VARIANTS = ("kto", "apo_zero_unpaired")


@dataclass(frozen=True, kw_only=True)
class KTOOptions(LogpOptions):
    """Options of `kto_loss`.

    Attributes:
        desirable: (B,) bool, the label of each completion.
        ref_logps: (B,), `sequence_logps` of the reference model, not averaged; a constant. Default: 0.
        kl: z, 0-d, see `kto_kl`; only for "kto". Default: 0.
        variant: "kto" or "apo_zero_unpaired".
        beta: the strength of the KL regularization towards the reference model.
        average_log_prob: divide a completion's log-ratio by the number of its tokens; then average `kl` too.
        desirable_weight: w_d.
        undesirable_weight: w_u.
        weights: (B,), multiplies the loss of each sequence; a constant. Default: 1.
        num_items: divides the summed losses. Default: B. For exact gradient accumulation, pass the number of sequences
            in the step to every microbatch.
    """

    desirable: Tensor = field(kw_only=False)
    ref_logps: Tensor | None = None
    kl: Tensor | None = None
    variant: Annotated[str, one_of(VARIANTS)] = "kto"
    beta: Positive = 0.1
    average_log_prob: bool = False
    desirable_weight: NotNegative = 1.0
    undesirable_weight: NotNegative = 1.0
    weights: Tensor | None = None
    num_items: NumItems = None

    @property
    def needs_reference(self) -> bool:
        return True

    def check(self, name: str) -> None:
        check_num_items(name, num_items=self.num_items)
        if self.variant != "kto":
            self.check_unused(name, f"variant={self.variant!r}", "kl")


@torch.no_grad()
def kto_kl(logps: Tensor, ref_logps: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Estimates the KL divergence z of `kto_loss` from mismatched completions, those of other prompts.

    Args:
        logps: (B,), `sequence_logps` of the mismatched completions under the model; averaged for `average_log_prob`.
        ref_logps: (B,), the same under the reference model.
        group: the process group to average over, with the same B on each process. Default: this process only.

    Returns:
        z, 0-d, at least 0; a constant. 0 for an empty batch.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the arguments are not both floating-point and (B,).

    Example, where each text of the `mismatched` batch has the completion (and labels) of the next text:

        mismatched = dict(input_ids=..., labels=..., attention_mask=...)
        with torch.no_grad():
            kl = kto_kl(model_sequence_logps(model, **mismatched), model_sequence_logps(reference, **mismatched))
        loss, metrics = KTO().of(model, **batch, desirable=desirable, kl=kl, reference=reference)
    """
    check_floats("kto_kl", logps=logps, ref_logps=ref_logps)
    if logps.dim() != 1 or logps.shape != ref_logps.shape:
        got = f"got logps {tuple(logps.shape)} and ref_logps {tuple(ref_logps.shape)}"
        raise LigerzooError(got, where="kto_kl", expected="(B,) for both")
    mean = (logps - ref_logps).sum() / max(1, logps.shape[0])
    if group is not None:
        dist.all_reduce(mean, dist.ReduceOp.SUM, group)
        mean = mean / dist.get_world_size(group)
    return mean.clamp(min=0)


@takes(KTOOptions)
def kto_loss(inputs: LossInputs, options: KTOOptions) -> LossOutput:
    """Computes the loss of Kahneman-Tversky optimization (Ethayarajh et al. 2024).

    The formulas are in the docstring of `ligerzoo.losses.kto`. The logits of all tokens never exist at once.

    Returns:
        `LossOutput`: the loss and the metrics. "rewards/chosen", "rewards/rejected" (beta times the log-ratio, summed
        over tokens), "logps/chosen" and "logps/rejected" are means over the desirable and the undesirable sequences, 0
        if it has none. "rewards/margins" is the difference of the two rewards, "kl" is z, and "logits/chosen" and
        "logits/rejected" are as in `dpo_loss`. "count/chosen" and "count/rejected" are the numbers of sequences: weight
        the means of several batches by them.
    """
    check_sequences(inputs, options.bias)
    name, hidden, _, target = inputs
    desirable, beta = options.desirable, options.beta
    shape = tuple(target.shape[:1])
    check_tensor(name, "desirable", desirable, "bool", [shape], hidden.device)
    constants = {"ref_logps": (options.ref_logps, shape), "weights": (options.weights, shape), "kl": (options.kl, ())}
    check_constants(inputs, **constants)
    mask = options.target_mask(target)
    ones = torch.ones(shape, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    loss_weights = torch.where(desirable, options.desirable_weight * ones, options.undesirable_weight * ones)
    loss_weights = loss_weights if options.weights is None else loss_weights * options.weights
    ref_logps = torch.zeros_like(ones) if options.ref_logps is None else options.ref_logps.detach()
    z = ones.new_zeros(()) if options.kl is None else options.kl.detach()
    items = items_or(options.num_items, shape[0], hidden)

    def total_loss(
        logps: Tensor, _: None, mask: Tensor, ref_logps: Tensor, desirable: Tensor, loss_weights: Tensor
    ) -> Tensor:
        gain = beta * (log_ratios(logps, mask, ref_logps, options.average_log_prob) - z)
        return (loss_weights * torch.sigmoid(torch.where(desirable, -gain, gain))).sum() / items

    objective = GroupObjective(total_loss, (mask, ref_logps, desirable, loss_weights), "sequence")
    loss, logps, _ = evaluate_objective(inputs, objective, options)
    sums = masked_sum(logps, mask)
    logits = summed_mean_logits(inputs, mask, options)
    return LossOutput(loss, {"kl": z, **_metrics(sums, beta * (sums - ref_logps), logits, mask.sum(-1), desirable)})


def _metrics(
    logps: Tensor, rewards: Tensor, logits: Tensor | None, lengths: Tensor, desirable: Tensor
) -> dict[str, Tensor]:
    """Averages (B,) values of sequences over the desirable and over the undesirable ones."""
    metrics = {}
    for which, selected in (("chosen", desirable), ("rejected", ~desirable)):

        def total(x: Tensor, selected: Tensor = selected) -> Tensor:
            return torch.where(selected, x, 0).sum()

        metrics[f"count/{which}"] = selected.sum()
        metrics[f"rewards/{which}"] = total(rewards) / selected.sum().clamp(min=1)
        metrics[f"logps/{which}"] = total(logps) / selected.sum().clamp(min=1)
        if logits is not None:
            metrics[f"logits/{which}"] = total(logits) / total(lengths).clamp(min=1)
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics
