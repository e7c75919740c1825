"""Preference optimization without a reference model: CPO, SimPO and ORPO.

Let c and r be the log-probabilities of the chosen and the rejected completion, averaged over their tokens except for
CPO's "sigmoid" and "hinge". Let b = beta, g = gamma, e the label smoothing and S the logistic function. The loss of a
pair is

    CPO      `dpo`'s sigmoid, hinge or ipo of c and r; plus the NLL               Xu et al. 2024, eq. 3
    SimPO    -(1 - e) log S(b (c - r) - g) - e log S(-b (c - r) + g)              Meng et al. 2024, eq. 6
    ORPO     -b log S(log odds(c) - log odds(r)), odds(x) = exp(x) / (1 - exp(x)); plus the NLL
                                                                                  Hong et al. 2024, eq. 4 to 7
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import one_of
from ligerzoo.losses.dpo import MarginOptions
from ligerzoo.losses.objective import LossOutput
from ligerzoo.losses.options import Finite, LossInputs, NotNegative, Positive, takes
from ligerzoo.losses.preference import PairOptions, pair_loss

CPO_VARIANTS = ("sigmoid", "hinge", "ipo")


@dataclass(frozen=True, kw_only=True)
class CPOOptions(MarginOptions):
    """Options of `cpo_loss`.

    Attributes:
        variant: "sigmoid", "hinge" or "ipo".
        beta: the scale of the log-probabilities.
        nll_weight: weight of the NLL of the chosen completions.
    """

    variant: Annotated[str, one_of(CPO_VARIANTS)] = "sigmoid"
    nll_weight: NotNegative = 1.0


@takes(CPOOptions)
def cpo_loss(inputs: LossInputs, options: CPOOptions) -> LossOutput:
    """Computes the loss of contrastive preference optimization (Xu et al. 2024): DPO with a uniform reference, and NLL.

    The formulas are in the docstring of `ligerzoo.losses.reference_free`. The logits of all tokens never exist at once.
    The first B/2 sequences are the chosen completions, as for `dpo_loss`.

    Returns:
        `LossOutput`: the loss and the metrics of `dpo_loss`.
    """
    return pair_loss(inputs, options)


@dataclass(frozen=True, kw_only=True)
class SimPOOptions(MarginOptions):
    """Options of `simpo_loss`.

    Attributes:
        beta: the scale of the rewards; 2.0 to 2.5 in the paper.
        gamma: the target margin between the rewards (TRL's `simpo_gamma`). The paper's tables list gamma / beta.
        nll_weight: weight of the NLL of the chosen completions; above 0 this is CPO-SimPO.
    """

    beta: Positive = 2.0
    gamma: Finite = 1.0

    @property
    def averages_scores(self) -> bool:
        return True

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return super().pair_losses(chosen, rejected + self.gamma / self.beta)


@takes(SimPOOptions)
def simpo_loss(inputs: LossInputs, options: SimPOOptions) -> LossOutput:
    """Computes the loss of simple preference optimization (Meng et al. 2024): average log-probabilities, and a margin.

    The formula is in the docstring of `ligerzoo.losses.reference_free`. The logits of all tokens never exist at once.
    The first B/2 sequences are the chosen completions, as for `dpo_loss`.

    Returns:
        `LossOutput`: the loss and the metrics of `dpo_loss`; rewards and log-probabilities are averages over tokens.
    """
    return pair_loss(inputs, options)


@dataclass(frozen=True, kw_only=True)
class ORPOOptions(PairOptions):
    """Options of `orpo_loss`.

    Attributes:
        beta: the weight of the odds ratio, lambda in the paper.
        nll_weight: weight of the NLL of the chosen completions.
        nll_target: (B, T), the targets of the NLL, to include other tokens: TRL includes the prompts of the chosen
            sequences. Must equal `target` where neither is ignored. Default: `target`.
    """

    beta: NotNegative = 0.1
    nll_weight: NotNegative = 1.0
    nll_target: Tensor | None = None

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -self.beta * F.logsigmoid(_log_odds_ratio(chosen, rejected))

    def pair_metrics(self, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        difference = _log_odds_ratio(chosen, rejected)
        return {"log_odds_chosen": difference, "log_odds_ratio": F.logsigmoid(difference)}


@takes(ORPOOptions)
def orpo_loss(inputs: LossInputs, options: ORPOOptions) -> LossOutput:
    """Computes the loss of odds ratio preference optimization (Hong et al. 2024): NLL, and the odds ratio of a pair.

    The formula is in the docstring of `ligerzoo.losses.reference_free`. The logits of all tokens never exist at once.
    The first B/2 sequences are the chosen completions, as for `dpo_loss`.

    Returns:
        `LossOutput`: the loss and the metrics of `dpo_loss`; rewards and log-probabilities are averages over tokens.
        Two more metrics are means over the pairs: "log_odds_chosen" of log odds(c) - log odds(r), and "log_odds_ratio"
        of log S of that difference.
    """
    return pair_loss(inputs, options, nll_target=options.nll_target)


def _log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Computes log odds(c) - log odds(r). Clamps log p to the largest negative number: rounding may leave p = 1."""
    logps = torch.stack((chosen, rejected)).clamp(max=-torch.finfo(chosen.dtype).tiny)
    log_odds = logps - torch.log(-torch.expm1(logps))
    return log_odds[0] - log_odds[1]
