"""Direct preference optimization and its variants: pairs of completions, relative to a reference model.

Let c and r be the log-ratios log p(y | x) - log p_ref(y | x) of the chosen and the rejected completion, D = c - r,
b = beta, e the label smoothing, t = discopop_tau and S the logistic function. The loss of a pair is

    sigmoid      -(1 - e) log S(b D) - e log S(-b D)        Rafailov et al. 2023, eq. 7; e: Mitchell 2023
    robust       (-(1 - e) log S(b D) + e log S(-b D)) / (1 - 2 e)                Chowdhury et al. 2024
    hinge        max(0, 1 - b D)                                                  Zhao et al. 2023
    ipo          (D - 1 / (2 b))^2                                                Azar et al. 2023, eq. 17
    exo_pair     KL((S(b D), S(-b D)) || (1 - e, e))                              Ji et al. 2024, eq. 16
    nca_pair     -log S(b c) - 1/2 log S(-b c) - 1/2 log S(-b r)                  Chen et al. 2024
    bco_pair     -log S(b c) - log S(-b r)                                        Jung et al. 2024, without its shift
    sppo_hard    (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2                            Wu et al. 2024, eq. 4.7
    apo_zero     1 - S(b c) + S(b r)                                              D'Oosterlinck et al. 2024, eq. 7
    apo_down     S(b c) + 1 - S(b D)                                              D'Oosterlinck et al. 2024, eq. 8
    discopop     -log S(b D) (1 - S(b D / t)) + exp(-b D) S(b D / t)              Lu et al. 2024, eq. 5

IPO averages c and r over the tokens of a completion, as its authors and TRL do. At D = 0, where training begins,
DiscoPOP decreases towards smaller margins: use it on a model that already prefers the chosen completions. All variants
equal TRL's, except that exp(x) continues as its tangent beyond x = 30, see `logps.safe_exp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import FINITE, FLAG, POSITIVE, check, number
from ligerzoo.losses.checks import check_choice, check_unused
from ligerzoo.losses.logps import safe_exp
from ligerzoo.losses.objective import LogpOptions, LossOutput, check_head_options
from ligerzoo.losses.preference import PairOptions, check_pair_options, pair_loss


class DPOOptions(NamedTuple):
    """The numbers in the formulas: b, e and t."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05


def sigmoid(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    margin = options.beta * (chosen - rejected)
    return -(1 - options.label_smoothing) * F.logsigmoid(margin) - options.label_smoothing * F.logsigmoid(-margin)


def robust(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    margin, e = options.beta * (chosen - rejected), options.label_smoothing
    unscaled = -(1 - e) * F.logsigmoid(margin) + e * F.logsigmoid(-margin)
    return unscaled / (1 - 2 * e)


def hinge(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    return torch.relu(1 - options.beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    return (chosen - rejected - 0.5 / options.beta).square()


def exo_pair(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    log_chosen, log_rejected = (F.logsigmoid(sign * options.beta * (chosen - rejected)) for sign in (1, -1))
    e = options.label_smoothing
    return log_chosen.exp() * (log_chosen - math.log1p(-e)) + log_rejected.exp() * (log_rejected - math.log(e))


def nca_pair(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    chosen, rejected = options.beta * chosen, options.beta * rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    return -F.logsigmoid(options.beta * chosen) - F.logsigmoid(-options.beta * rejected)


def sppo_hard(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    return (chosen - 0.5 / options.beta).square() + (rejected + 0.5 / options.beta).square()


def apo_zero(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    return torch.sigmoid(-options.beta * chosen) + torch.sigmoid(options.beta * rejected)


def apo_down(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    return torch.sigmoid(options.beta * chosen) + torch.sigmoid(-options.beta * (chosen - rejected))


def discopop(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    margin = options.beta * (chosen - rejected)
    log_gate = F.logsigmoid(margin / options.discopop_tau)
    # exp(-margin) alone would overflow where the gate is 0, so the product is one exponential.
    return -F.logsigmoid(margin) * (1 - log_gate.exp()) + safe_exp(log_gate - margin)


DPOFormula = Callable[[Tensor, Tensor, DPOOptions], Tensor]

VARIANTS: dict[str, DPOFormula] = {
    function.__name__: function
    for function in (
        sigmoid, robust, hinge, ipo, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, discopop
    )
}  # fmt: skip
AVERAGED_VARIANTS = {"ipo"}
"""Variants that average over the tokens of a completion, whatever `average_log_prob` is."""

_SMOOTHING_RANGES = {
    "sigmoid": number("0 <= label_smoothing <= 0.5", lambda e: 0 <= e <= 0.5),
    "robust": number("0 <= label_smoothing < 0.5", lambda e: 0 <= e < 0.5),
    "exo_pair": number("0 < label_smoothing < 1, such as 0.001", lambda e: 0 < e < 1),
}
_NO_SMOOTHING = number("0: the variant has no label smoothing", lambda e: e == 0)


def check_formula_options(name: str, variant: str, options: DPOOptions) -> None:
    """Raises for an unknown variant, and for numbers that the variant does not support or use."""
    check_choice(name, VARIANTS, variant=variant)
    check(name, POSITIVE, beta=options.beta, discopop_tau=options.discopop_tau)
    check(name, FINITE, label_smoothing=options.label_smoothing)
    smoothing = _SMOOTHING_RANGES.get(variant, _NO_SMOOTHING)
    if not smoothing.contains(options.label_smoothing):
        raise ValueError(
            f"{name}: label_smoothing={options.label_smoothing} with variant={variant!r}; expected {smoothing.expected}"
        )
    if variant != "discopop":
        defaults = DPOOptions._field_defaults
        check_unused(name, f"variant={variant!r}", defaults, discopop_tau=options.discopop_tau)


def check_dpo_options(
    name: str, *, variant: str, beta: float, label_smoothing: float, discopop_tau: float, average_log_prob: bool,
    nll_weight: float, num_items: int | Tensor | None, num_nll_items: int | Tensor | None,
) -> None:  # fmt: skip
    """Raises for invalid options of `dpo_loss`. `name` is the loss that messages name."""
    check_formula_options(name, variant, DPOOptions(beta, label_smoothing, discopop_tau))
    check(name, FLAG, average_log_prob=average_log_prob)
    check_pair_options(name, nll_weight=nll_weight, num_items=num_items, num_nll_items=num_nll_items)


def dpo_loss(
    hidden: Tensor,
    weight: Tensor | None,
    target: Tensor,
    *,
    ref_logps: Tensor | None = None,
    variant: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    average_log_prob: bool = False,
    discopop_tau: float = 0.05,
    weights: Tensor | None = None,
    nll_weight: float = 0.0,
    num_items: int | Tensor | None = None,
    num_nll_items: int | Tensor | None = None,
    **head: Unpack[LogpOptions],
) -> LossOutput:
    """Computes the loss of direct preference optimization (Rafailov et al. 2023) or one of its variants.

    The formulas are in the docstring of `ligerzoo.losses.dpo`. The logits of all tokens never exist at once.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits. The first B/2 sequences are the chosen completions;
            sequence B/2 + i is the rejected completion of pair i.
        weight: (V, H) weight of the LM head; None if `hidden` holds logits.
        target: (B, T) token ids, already shifted: `target[b, t]` is the token that `hidden[b, t]` predicts.
            `ignore_index` marks prompts and padding.
        ref_logps: (B,), `sequence_logps` of the reference model, not averaged; a constant. Default: 0.
        variant: "sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
            "apo_down" or "discopop".
        beta: the strength of the KL regularization towards the reference model.
        label_smoothing: the probability that the labels of a pair are swapped; for "sigmoid", "robust" and "exo_pair".
        average_log_prob: divide a completion's log-ratio by the number of its tokens (TRL's `sigmoid_norm`).
        discopop_tau: temperature of "discopop".
        weights: (B/2,), multiplies the loss of each pair; a constant. Default: 1.
        nll_weight: weight of the NLL of the chosen completions, which is added (TRL's `sft`; Pang et al. 2024).
        num_items: divides the summed losses. Default: B/2. For exact gradient accumulation, pass the number of pairs
            in the step to every microbatch.
        num_nll_items: divides the summed NLL. Default: the number of its targets. With an NLL, pass it together with
            `num_items`.
        head: options of the LM head and `temperature`, see `LogpOptions`.

    Returns:
        `LossOutput`: the loss, and as metrics the means over the pairs of "rewards/chosen", "rewards/rejected" (beta
        times the log-ratio, summed over tokens), "rewards/margins", "rewards/accuracies", "logps/chosen" and
        "logps/rejected". "logits/chosen" and "logits/rejected" are the means of all logits at the completions' targets,
        before the temperature; absent with a softcap. With an NLL, "nll_loss" is its mean over the tokens.

    Raises:
        TypeError: an option is unknown, or an argument has another type.
        ValueError: shapes or dtypes are invalid, B is odd, or an option is out of range or unused by the variant.
    """
    check_head_options(dpo_loss, head)
    check_dpo_options(
        "dpo_loss", variant=variant, beta=beta, label_smoothing=label_smoothing, discopop_tau=discopop_tau,
        average_log_prob=average_log_prob, nll_weight=nll_weight, num_items=num_items, num_nll_items=num_nll_items,
    )  # fmt: skip
    formula, numbers = VARIANTS[variant], DPOOptions(beta, label_smoothing, discopop_tau)
    options = PairOptions(
        beta, average_log_prob or variant in AVERAGED_VARIANTS, ref_logps=ref_logps, weights=weights,
        nll_weight=nll_weight, num_items=num_items, num_nll_items=num_nll_items,
    )  # fmt: skip
    return pair_loss(
        "dpo_loss", lambda chosen, rejected: formula(chosen, rejected, numbers), hidden, weight, target, options, head
    )
