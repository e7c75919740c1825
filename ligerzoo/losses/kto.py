"""Kahneman-Tversky optimization: answers that are each desirable or not, without pairs.

With q the log-ratio log p(y | x) - log p_ref(y | x) of an answer, z the KL divergence of the model from the reference,
b = beta and S the logistic function, a row's loss is (Ethayarajh et al. 2024, eq. 7)

    kto                  w_d S(-b (q - z))  of a desirable answer,   w_u S(b (q - z))  of another
    apo_zero_unpaired    the same with z = 0                        (D'Oosterlinck et al. 2024, eq. 7)

z is a constant, estimated as the mean log-ratio, 0 at least, of answers to other prompts: the batch's own, each moved
on to the next prompt. With averaged log-probabilities q and z are of means over an answer's tokens.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.logps import check_choice, check_number, check_rows, counted, divisor, mean_logits, summed
from ligerzoo.losses.objective import LogpOptions, LossOutput, Objective, evaluate

VARIANTS = ("kto", "apo_zero_unpaired")


@torch.no_grad()
def kto_kl(logps: Tensor, ref_logps: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """z, 0-d and a constant, from the (B,) log-probabilities of answers to other prompts.

    Args:
        logps: `sequence_logps` under the model; averaged ones if the loss has `average_log_prob`.
        ref_logps: the same under the reference.
        group: the processes whose answers count too (the same number of them on each); None for this one alone.

    Raises:
        ValueError: the two differ in shape.

    With the answers of each text replaced by those of the next one (and their labels so, too), and `KTO`:

        others = dict(input_ids=other_ids, labels=other_labels, attention_mask=other_mask)
        with torch.no_grad():
            kl = kto_kl(model_sequence_logps(model, **others), model_sequence_logps(reference, **others))
        loss, metrics = kto.of(model, **batch, desirable=desirable, kl=kl, reference=reference)
    """
    if logps.dim() != 1 or logps.shape != ref_logps.shape:
        raise ValueError(
            f"kto_kl: logps {tuple(logps.shape)} and ref_logps {tuple(ref_logps.shape)}; expected (B,) both"
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
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024), over the formulas in `kto.py`.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits.
        weight: (V, H), the head; None if `hidden` are logits.
        target: (B, T) token ids, what each hidden state should predict, or `ignore_index`: prompts and padding.
        desirable: (B,) bool, whether the answer is.
        ref_logps: (B,), `sequence_logps` of the reference model, not averaged; a constant. None for 0.
        kl: 0-d, z, see `kto_kl`; None for 0.
        variant: "kto" or "apo_zero_unpaired", which has no use for `kl`.
        beta: how closely the model is held to the reference.
        average_log_prob: divide an answer's log-ratio by the number of its tokens; `kl` is of averages then, too.
        desirable_weight: w_d.
        undesirable_weight: w_u.
        weights: (B,), a factor for each row's loss; a constant.
        num_items: divides the summed losses in place of B: the same number for all micro-batches of a step makes
            gradient accumulation exact.
        head: see `LogpOptions`.

    Returns:
        The loss; of rewards (beta times the log-ratio, summed over tokens) and log-probabilities the means over the
        desirable rows and over the others, 0 where there are none; the margin between the two rewards, and `kl`.
        "logits/chosen" and "logits/rejected" are as in `dpo_loss`; "count/chosen" and "count/rejected" are the numbers
        of rows, by which to weight the means of several batches.

    Raises:
        ValueError: shapes do not fit, or an option is out of range.
    """
    n_rows = target.shape[0]
    check_rows(
        "kto_loss", hidden, target, desirable=(desirable, (n_rows,)), ref_logps=(ref_logps, (n_rows,)),
        weights=(weights, (n_rows,)), kl=(kl, ()),
    )  # fmt: skip
    if desirable.dtype != torch.bool:
        raise ValueError(f"kto_loss: desirable is {desirable.dtype}; expected torch.bool")
    check_number("kto_loss", num_items=num_items, beta=beta)
    check_choice("kto_loss", VARIANTS, variant=variant)
    if variant != "kto" and kl is not None:
        raise ValueError(f"kto_loss: {variant} was given kl; expected None")
    mask = counted(target, head)
    ones = torch.ones(n_rows, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    row_weights = torch.where(desirable, desirable_weight * ones, undesirable_weight * ones)
    row_weights = row_weights if weights is None else row_weights * weights
    ref_logps = torch.zeros_like(ones) if ref_logps is None else ref_logps.detach()
    expected = ones.new_zeros(()) if kl is None else kl.detach()
    items = divisor(num_items, n_rows, hidden)

    def objective(
        logps: Tensor, _: None, mask: Tensor, ref_logps: Tensor, desirable: Tensor, row_weights: Tensor
    ) -> Tensor:  # fmt: skip
        log_ratio = summed(logps, mask) - ref_logps
        if average_log_prob:
            log_ratio = log_ratio / mask.sum(-1).clamp(min=1)
        gain = beta * (log_ratio - expected)
        return (row_weights * torch.sigmoid(torch.where(desirable, -gain, gain))).sum() / items

    constants = (mask, ref_logps, desirable, row_weights)
    loss, logps, _ = evaluate("kto_loss", hidden, weight, target, Objective(objective, constants, "row"), head)
    of_rows = summed(logps, mask)
    rewards = beta * (of_rows - ref_logps)

    logits, tokens = mean_logits(hidden, weight, mask, head), mask.sum(-1)
    metrics = {"kl": expected}
    for which, rows in (("chosen", desirable), ("rejected", ~desirable)):

        def total(x: Tensor, rows: Tensor = rows) -> Tensor:
            return torch.where(rows, x, 0).sum()

        metrics[f"count/{which}"] = rows.sum()
        metrics[f"rewards/{which}"] = total(rewards) / rows.sum().clamp(min=1)
        metrics[f"logps/{which}"] = total(of_rows) / rows.sum().clamp(min=1)
        if logits is not None:
            metrics[f"logits/{which}"] = total(logits) / total(tokens).clamp(min=1)
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return LossOutput(loss, metrics)
