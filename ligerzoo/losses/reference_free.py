"""Preference optimization without a reference model: CPO, SimPO and ORPO.

With p the log-probability of an answer (averaged over its tokens, but for CPO's "sigmoid" and "hinge"), c of the chosen
and r of the rejected one, b = beta, g = gamma, e the label smoothing and S the logistic function, a pair's loss is

    CPO      `dpo`'s sigmoid, hinge or ipo of c and r; plus the NLL               Xu et al. 2024, eq. 3
    SimPO    -(1 - e) log S(b (c - r) - g) - e log S(-b (c - r) + g)              Meng et al. 2024, eq. 6
    ORPO     -b log S(log odds(c) - log odds(r)),  odds = exp(p) / (1 - exp(p)); plus the NLL
                                                                                  Hong et al. 2024, eq. 4 to 7
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.losses.dpo import AVERAGED, VARIANTS, DPOOptions, check_options
from ligerzoo.losses.logps import check_choice
from ligerzoo.losses.objective import LogpOptions, LossOutput
from ligerzoo.losses.preference import PairOptions, pair_loss

CPO_VARIANTS = ("sigmoid", "hinge", "ipo")


def log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p below 0; at 0 it is of the nearest number below, where rounding left p at 1."""
    logps = logps.clamp(max=-torch.finfo(logps.dtype).tiny)
    return logps - torch.log(-torch.expm1(logps))


def cpo_loss(
    hidden: Tensor,
    weight: Tensor | None,
    target: Tensor,
    *,
    variant: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    nll_weight: float = 1.0,
    num_items: int | Tensor | None = None,
    num_nll_items: int | Tensor | None = None,
    **head: Unpack[LogpOptions],
) -> LossOutput:
    """Contrastive preference optimization (Xu et al. 2024): a DPO whose reference is uniform, and the NLL.

    Args:
        variant: "sigmoid", "hinge" or "ipo".

    The other arguments, the result and the errors are those of `dpo_loss`.
    """
    numbers = DPOOptions(beta, label_smoothing, 1.0)
    check_choice("cpo_loss", CPO_VARIANTS, variant=variant)
    check_options("cpo_loss", variant, numbers)
    average = variant in AVERAGED
    options = PairOptions(
        beta, average, average, weights=weights, nll_weight=nll_weight, num_items=num_items,
        num_nll_items=num_nll_items,
    )  # fmt: skip
    formula = VARIANTS[variant]
    return pair_loss(
        "cpo_loss", lambda chosen, rejected: formula(chosen, rejected, numbers), hidden, weight, target, options, head
    )


def simpo_loss(
    hidden: Tensor,
    weight: Tensor | None,
    target: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    nll_weight: float = 0.0,
    num_items: int | Tensor | None = None,
    num_nll_items: int | Tensor | None = None,
    **head: Unpack[LogpOptions],
) -> LossOutput:
    """Simple preference optimization (Meng et al. 2024): averaged log-probabilities, a margin to be exceeded.

    Args:
        beta: the scale of rewards; 2.0 to 2.5 in the paper.
        gamma: the margin, in rewards. (TRL's `simpo_gamma`; the paper's tables give gamma / beta.)
        nll_weight: above 0, the mixture with CPO's NLL (CPO-SimPO).

    The other arguments, the result and the errors are those of `dpo_loss`.
    """
    numbers = DPOOptions(beta, label_smoothing, 1.0)
    check_options("simpo_loss", "sigmoid", numbers)
    options = PairOptions(
        beta, average=True, average_rewards=True, weights=weights, nll_weight=nll_weight, num_items=num_items,
        num_nll_items=num_nll_items,
    )  # fmt: skip
    return pair_loss(
        "simpo_loss", lambda chosen, rejected: VARIANTS["sigmoid"](chosen, rejected + gamma / beta, numbers),
        hidden, weight, target, options, head,
    )  # fmt: skip


def orpo_loss(
    hidden: Tensor,
    weight: Tensor | None,
    target: Tensor,
    *,
    beta: float = 0.1,
    weights: Tensor | None = None,
    nll_weight: float = 1.0,
    nll_target: Tensor | None = None,
    num_items: int | Tensor | None = None,
    num_nll_items: int | Tensor | None = None,
    **head: Unpack[LogpOptions],
) -> LossOutput:
    """Odds ratio preference optimization (Hong et al. 2024): the NLL of chosen answers, and the odds ratio.

    Args:
        beta: the weight of the odds ratio, the paper's lambda.
        nll_target: (B, T), the targets of the NLL if it shall count more than answers: TRL's counts the prompts of the
            chosen rows too. They have to agree with `target` where both count.

    The other arguments, the result and the errors are those of `dpo_loss`. Two more metrics are means over the pairs:
    "log_odds_chosen" of log odds(c) - log odds(r), and "log_odds_ratio" of log S of that.
    """
    options = PairOptions(
        beta, average=True, average_rewards=True, weights=weights, nll_weight=nll_weight, nll_target=nll_target,
        num_items=num_items, num_nll_items=num_nll_items,
    )  # fmt: skip

    def log_odds_of(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        of_chosen, of_rejected = log_odds(torch.stack((chosen, rejected)))
        difference = of_chosen - of_rejected
        return {"log_odds_chosen": difference, "log_odds_ratio": F.logsigmoid(difference)}

    def formula(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -beta * log_odds_of(chosen, rejected)["log_odds_ratio"]

    return pair_loss("orpo_loss", formula, hidden, weight, target, options, head, log_odds_of)
