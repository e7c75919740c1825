"""Kahneman-Tversky optimization: completions labelled desirable or undesirable, without pairs.

Let q be the log-ratio log p(y | x) - log p_ref(y | x) of a completion, z the KL divergence of the model from the
reference, b = beta and S the logistic function. The loss of a sequence is (Ethayarajh et al. 2024, eq. 7)

    kto                  w_d S(-b (q - z)) if desirable,   w_u S(b (q - z)) if undesirable
    apo_zero_unpaired    the same with z = 0                        (D'Oosterlinck et al. 2024, eq. 7)

z is a constant, see `kto_kl`. It is estimated as the mean log-ratio, at least 0, of mismatched completions: those of
the batch, each with the next prompt. With averaged log-probabilities, q and z are averages over a completion's tokens.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from ligerzoo.checks import FLAG, NOT_NEGATIVE, POSITIVE, check
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.checks import check_choice, check_constants, check_tensors
from ligerzoo.losses.logps import divisor, masked_sum, summed_mean_logits, target_mask
from ligerzoo.losses.objective import GroupObjective, LogpOptions, LossOutput, check_head_options, evaluate
from ligerzoo.tensor_checks import check_floats, check_num_items, check_tensor

VARIANTS = ("kto", "apo_zero_unpaired")


def check_kto_options(
    name: str, *, variant: str, beta: float, average_log_prob: bool, desirable_weight: float,
    undesirable_weight: float, num_items: int | Tensor | None,
) -> None:  # fmt: skip
    """Raises for invalid options of `kto_loss`. `name` is the loss that messages name."""
    check_choice(name, VARIANTS, variant=variant)
    check(name, POSITIVE, beta=beta)
    check(name, NOT_NEGATIVE, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    check(name, FLAG, average_log_prob=average_log_prob)
    check_num_items(name, num_items=num_items)


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
        raise ValueError(
            f"kto_kl: got logps {tuple(logps.shape)} and ref_logps {tuple(ref_logps.shape)}; expected (B,) for both"
        )
    mean = (logps - ref_logps).sum() / max(1, logps.shape[0])
    if group is not None:
        dist.all_reduce(mean, dist.ReduceOp.SUM, group)
        mean = mean / dist.get_world_size(group)
    return mean.clamp(min=0)


def kto_loss(
    hidden: Tensor,
    weight: Tensor | None,
    target: Tensor,
    desirable: Tensor,
    *,
    ref_logps: Tensor | None = None,
    kl: Tensor | None = None,
    variant: str = "kto",
    beta: float = 0.1,
    average_log_prob: bool = False,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    weights: Tensor | None = None,
    num_items: int | Tensor | None = None,
    **head: Unpack[LogpOptions],
) -> LossOutput:
    """Computes the loss of Kahneman-Tversky optimization (Ethayarajh et al. 2024).

    The formulas are in the docstring of `ligerzoo.losses.kto`. The logits of all tokens never exist at once.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits.
        weight: (V, H) weight of the LM head; None if `hidden` holds logits.
        target: (B, T) token ids, already shifted: `target[b, t]` is the token that `hidden[b, t]` predicts.
            `ignore_index` marks prompts and padding.
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
        head: options of the LM head and `temperature`, see `LogpOptions`.

    Returns:
        `LossOutput`: the loss and the metrics. "rewards/chosen", "rewards/rejected" (beta times the log-ratio, summed
        over tokens), "logps/chosen" and "logps/rejected" are means over the desirable and the undesirable sequences, 0
        if it has none. "rewards/margins" is the difference of the two rewards, "kl" is z, and "logits/chosen" and
        "logits/rejected" are as in `dpo_loss`. "count/chosen" and "count/rejected" are the numbers of sequences: weight
        the means of several batches by them.

    Raises:
        TypeError: an option is unknown, or an argument has another type.
        ValueError: shapes or dtypes are invalid, or an option is out of range or unused by the variant.
    """
    check_head_options(kto_loss, head)
    check_kto_options(
        "kto_loss", variant=variant, beta=beta, average_log_prob=average_log_prob, desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight, num_items=num_items,
    )  # fmt: skip
    check_tensors("kto_loss", hidden, weight, target, head.get("bias"))
    n_sequences = target.shape[0]
    check_tensor("kto_loss", "desirable", desirable, "bool", [(n_sequences,)], hidden.device)
    check_constants(
        "kto_loss", hidden, ref_logps=(ref_logps, (n_sequences,)), weights=(weights, (n_sequences,)), kl=(kl, ())
    )
    if variant != "kto" and kl is not None:
        raise ValueError(f"kto_loss: got kl with variant={variant!r}; expected kl=None, only variant='kto' uses it")
    mask = target_mask(target, head)
    ones = torch.ones(n_sequences, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    loss_weights = torch.where(desirable, desirable_weight * ones, undesirable_weight * ones)
    loss_weights = loss_weights if weights is None else loss_weights * weights
    ref_logps = torch.zeros_like(ones) if ref_logps is None else ref_logps.detach()
    z = ones.new_zeros(()) if kl is None else kl.detach()
    items = divisor(num_items, n_sequences, hidden)

    def total_loss(
        logps: Tensor, _: None, mask: Tensor, ref_logps: Tensor, desirable: Tensor, loss_weights: Tensor
    ) -> Tensor:  # fmt: skip
        log_ratios = masked_sum(logps, mask) - ref_logps
        if average_log_prob:
            log_ratios = log_ratios / mask.sum(-1).clamp(min=1)
        gain = beta * (log_ratios - z)
        return (loss_weights * torch.sigmoid(torch.where(desirable, -gain, gain))).sum() / items

    constants = (mask, ref_logps, desirable, loss_weights)
    objective = GroupObjective(total_loss, constants, "sequence")
    loss, logps, _ = evaluate("kto_loss", hidden, weight, target, objective, head)
    sums = masked_sum(logps, mask)
    logits = summed_mean_logits(hidden, weight, mask, head)
    return LossOutput(loss, {"kl": z, **_metrics(sums, beta * (sums - ref_logps), logits, mask.sum(-1), desirable)})


def _metrics(
    logps: Tensor, rewards: Tensor, logits: Tensor | None, lengths: Tensor, desirable: Tensor
) -> dict[str, Tensor]:  # fmt: skip
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
