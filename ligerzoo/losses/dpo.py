"""Direct preference optimization and its variants: pairs of answers, against a reference model.

With c and r the log-ratios log p(y | x) - log p_ref(y | x) of the chosen and the rejected answer, D = c - r, b = beta,
e the label smoothing and S the logistic function, a pair's loss is

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

IPO takes c and r averaged over the tokens of an answer, as its authors do and TRL with them. DiscoPOP falls towards
smaller margins at D = 0, where training begins: use it on a model that prefers the chosen answers already. All are
TRL's; but exp(x) is continued by its tangent beyond x = 30, see `logps.bounded_exp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.losses.logps import bounded_exp, check_choice
from ligerzoo.losses.objective import LogpOptions, LossOutput
from ligerzoo.losses.preference import PairOptions, pair_loss


class DPOOptions(NamedTuple):
    """The numbers in the formulas: b, e and t."""

    beta: float
    label_smoothing: float
    discopop_tau: float


def sigmoid(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    margin = o.beta * (chosen - rejected)
    return -(1 - o.label_smoothing) * F.logsigmoid(margin) - o.label_smoothing * F.logsigmoid(-margin)


def robust(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    margin = o.beta * (chosen - rejected)
    unsmoothed = -(1 - o.label_smoothing) * F.logsigmoid(margin) + o.label_smoothing * F.logsigmoid(-margin)
    return unsmoothed / (1 - 2 * o.label_smoothing)


def hinge(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    return torch.relu(1 - o.beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    return (chosen - rejected - 0.5 / o.beta).square()


def exo_pair(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    log_chosen, log_rejected = (F.logsigmoid(sign * o.beta * (chosen - rejected)) for sign in (1, -1))
    e = o.label_smoothing
    return log_chosen.exp() * (log_chosen - math.log1p(-e)) + log_rejected.exp() * (log_rejected - math.log(e))


def nca_pair(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    chosen, rejected = o.beta * chosen, o.beta * rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    return -F.logsigmoid(o.beta * chosen) - F.logsigmoid(-o.beta * rejected)


def sppo_hard(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    return (chosen - 0.5 / o.beta).square() + (rejected + 0.5 / o.beta).square()


def apo_zero(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    return torch.sigmoid(-o.beta * chosen) + torch.sigmoid(o.beta * rejected)


def apo_down(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    return torch.sigmoid(o.beta * chosen) + torch.sigmoid(-o.beta * (chosen - rejected))


def discopop(chosen: Tensor, rejected: Tensor, o: DPOOptions) -> Tensor:
    margin = o.beta * (chosen - rejected)
    log_share = F.logsigmoid(margin / o.discopop_tau)
    # Of the last product exp(-margin) alone would overflow where the share is 0.
    return -F.logsigmoid(margin) * (1 - log_share.exp()) + bounded_exp(log_share - margin)


Variant = Callable[[Tensor, Tensor, DPOOptions], Tensor]

VARIANTS: dict[str, Variant] = {
    function.__name__: function
    for function in (
        sigmoid, robust, hinge, ipo, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, discopop
    )
}  # fmt: skip
AVERAGED = {"ipo"}
"""The variants that take averages over an answer's tokens, whatever `average_log_prob` says."""

_SMOOTHINGS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "sigmoid": ("0 to 0.5", lambda e: 0 <= e <= 0.5),
    "robust": ("0 to 0.5, exclusively", lambda e: 0 <= e < 0.5),
    "exo_pair": ("more than 0, such as 0.001, and less than 1", lambda e: 0 < e < 1),
}


def check_options(name: str, variant: str, options: DPOOptions) -> None:
    """Raises ValueError for a variant that there is not, and for numbers that it has no use for."""
    check_choice(name, VARIANTS, variant=variant)
    expected, fits = _SMOOTHINGS.get(variant, ("0, for the variant has no smoothing", lambda e: e == 0))
    if not fits(options.label_smoothing):
        raise ValueError(f"{name}: {variant} with label_smoothing={options.label_smoothing}; expected {expected}")
    for what, number in (("beta", options.beta), ("discopop_tau", options.discopop_tau)):
        if not number > 0:
            raise ValueError(f"{name}: {what}={number}; expected more than 0")


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
    """Direct preference optimization (Rafailov et al. 2023) or one of its variants, over the formulas in `dpo.py`.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits; the first B/2 rows are of chosen answers, the others of
            those rejected.
        weight: (V, H), the head; None if `hidden` are logits.
        target: (B, T) token ids, what each hidden state should predict, or `ignore_index`: prompts and padding.
        ref_logps: (B,), `sequence_logps` of the reference model, not averaged; a constant. None for 0.
        variant: "sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
            "apo_down" or "discopop".
        beta: how closely the model is held to the reference.
        label_smoothing: the chance that a pair was labelled the wrong way round; for the variants that know one.
        average_log_prob: divide an answer's log-ratio by the number of its tokens (TRL's `sigmoid_norm`).
        discopop_tau: of "discopop".
        weights: (B/2,), a factor for each pair's loss; a constant.
        nll_weight: a factor for the NLL of the chosen answers, which is added (TRL's `sft`; Pang et al. 2024).
        num_items: divides the summed losses in place of B/2: the same number for all micro-batches of a step makes
            gradient accumulation exact.
        num_nll_items: likewise divides the NLL, in place of the number of the chosen answers' tokens; where there is an
            NLL, the two are given together.
        head: see `LogpOptions`: among others `temperature`.

    Returns:
        The loss, and means over the pairs of rewards (beta times the log-ratios, summed over tokens), their margins and
        accuracies, and log-probabilities. "logits/chosen" and "logits/rejected" are the means of all logits of the
        answers' tokens (before the temperature; left out with a softcap), and "nll_loss" is the mean over the tokens of
        the NLL.

    Raises:
        ValueError: shapes do not fit, B is odd, or an option is out of range.
    """
    numbers = DPOOptions(beta, label_smoothing, discopop_tau)
    check_options("dpo_loss", variant, numbers)
    formula = VARIANTS[variant]
    options = PairOptions(
        beta, average_log_prob or variant in AVERAGED, ref_logps=ref_logps, weights=weights, nll_weight=nll_weight,
        num_items=num_items, num_nll_items=num_nll_items,
    )  # fmt: skip
    return pair_loss(
        "dpo_loss", lambda chosen, rejected: formula(chosen, rejected, numbers), hidden, weight, target, options, head
    )
