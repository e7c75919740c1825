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
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import one_of
from ligerzoo.errors import LigerzooError
from ligerzoo.losses.logps import safe_exp
from ligerzoo.losses.objective import LossOutput
from ligerzoo.losses.options import Finite, LossInputs, Positive, takes
from ligerzoo.losses.preference import PairOptions, pair_loss


def _sigmoid(chosen: Tensor, rejected: Tensor, options: MarginOptions) -> Tensor:
    margin = options.beta * (chosen - rejected)
    return -(1 - options.label_smoothing) * F.logsigmoid(margin) - options.label_smoothing * F.logsigmoid(-margin)


def _robust(chosen: Tensor, rejected: Tensor, options: MarginOptions) -> Tensor:
    margin, e = options.beta * (chosen - rejected), options.label_smoothing
    unscaled = -(1 - e) * F.logsigmoid(margin) + e * F.logsigmoid(-margin)
    return unscaled / (1 - 2 * e)


def _hinge(chosen: Tensor, rejected: Tensor, options: MarginOptions) -> Tensor:
    return torch.relu(1 - options.beta * (chosen - rejected))


def _ipo(chosen: Tensor, rejected: Tensor, options: MarginOptions) -> Tensor:
    return (chosen - rejected - 0.5 / options.beta).square()


def _exo_pair(chosen: Tensor, rejected: Tensor, options: MarginOptions) -> Tensor:
    log_chosen, log_rejected = (F.logsigmoid(sign * options.beta * (chosen - rejected)) for sign in (1, -1))
    e = options.label_smoothing
    return log_chosen.exp() * (log_chosen - math.log1p(-e)) + log_rejected.exp() * (log_rejected - math.log(e))


def _nca_pair(chosen: Tensor, rejected: Tensor, options: MarginOptions) -> Tensor:
    chosen, rejected = options.beta * chosen, options.beta * rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _bco_pair(chosen: Tensor, rejected: Tensor, options: MarginOptions) -> Tensor:
    return -F.logsigmoid(options.beta * chosen) - F.logsigmoid(-options.beta * rejected)


def _sppo_hard(chosen: Tensor, rejected: Tensor, options: MarginOptions) -> Tensor:
    return (chosen - 0.5 / options.beta).square() + (rejected + 0.5 / options.beta).square()


def _apo_zero(chosen: Tensor, rejected: Tensor, options: MarginOptions) -> Tensor:
    return torch.sigmoid(-options.beta * chosen) + torch.sigmoid(options.beta * rejected)


def _apo_down(chosen: Tensor, rejected: Tensor, options: MarginOptions) -> Tensor:
    return torch.sigmoid(options.beta * chosen) + torch.sigmoid(-options.beta * (chosen - rejected))


def _discopop(chosen: Tensor, rejected: Tensor, options: DPOOptions) -> Tensor:
    margin = options.beta * (chosen - rejected)
    log_gate = F.logsigmoid(margin / options.discopop_tau)
    # exp(-margin) alone would overflow where the gate is 0, so the product is one exponential.
    return -F.logsigmoid(margin) * (1 - log_gate.exp()) + safe_exp(log_gate - margin)


VARIANTS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}

_SMOOTHING: dict[str, tuple[str, Callable[[float], bool]]] = {
    "sigmoid": ("0 <= label_smoothing <= 0.5", lambda e: 0 <= e <= 0.5),
    "robust": ("0 <= label_smoothing < 0.5", lambda e: 0 <= e < 0.5),
    "exo_pair": ("0 < label_smoothing < 1, such as 0.001", lambda e: 0 < e < 1),
}
_NO_SMOOTHING = "0: the variant has no label smoothing", lambda e: e == 0


@dataclass(frozen=True, kw_only=True)
class MarginOptions(PairOptions):
    """Options of the losses that compare two scores: DPO, CPO and SimPO.

    Attributes:
        label_smoothing: the probability that the labels of a pair are swapped. Of the variants of DPO, "sigmoid",
            "robust" and "exo_pair" have it.
    """

    label_smoothing: Finite = 0.0
    variant = "sigmoid"

    def check(self, name: str) -> None:
        super().check(name)
        expected, contains = _SMOOTHING.get(self.variant, _NO_SMOOTHING)
        if not contains(self.label_smoothing):
            what = f"label_smoothing={self.label_smoothing} with variant={self.variant!r}"
            raise LigerzooError(what, where=name, expected=expected)

    @property
    def averages_scores(self) -> bool:
        return self.variant == "ipo"

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return VARIANTS[self.variant](chosen, rejected, self)


@dataclass(frozen=True, kw_only=True)
class DPOOptions(MarginOptions):
    """Options of `dpo_loss`.

    Attributes:
        ref_logps: (B,), a constant: `sequence_logps(ref_hidden, ref_weight, target)` of the reference model's hidden
            states and head weight, computed without gradients and not averaged. Default: 0.
        variant: "sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
            "apo_down" or "discopop".
        beta: the strength of the KL regularization towards the reference model.
        average_log_prob: divide a completion's log-ratio by the number of its tokens (TRL's `sigmoid_norm`).
        discopop_tau: temperature of "discopop".
        nll_weight: weight of the NLL of the chosen completions, which is added (TRL's `sft`; Pang et al. 2024).
    """

    ref_logps: Tensor | None = None
    variant: Annotated[str, one_of(VARIANTS)] = "sigmoid"
    average_log_prob: bool = False
    discopop_tau: Positive = 0.05

    def check(self, name: str) -> None:
        super().check(name)
        if self.variant != "discopop":
            self.check_unused(name, f"variant={self.variant!r}", "discopop_tau")

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def averages_scores(self) -> bool:
        return self.average_log_prob or self.variant == "ipo"  # dynamo calls no property of super()

    @property
    def averages_rewards(self) -> bool:
        return False


@takes(DPOOptions)
def dpo_loss(inputs: LossInputs, options: DPOOptions) -> LossOutput:
    """Computes the loss of direct preference optimization (Rafailov et al. 2023) or one of its variants.

    The formulas are in the docstring of `ligerzoo.losses.dpo`. The logits of all tokens never exist at once.
    The first B/2 sequences are the chosen completions; sequence B/2 + i is the rejected completion of pair i.

    Returns:
        `LossOutput`: the loss, and as metrics the means over the pairs of "rewards/chosen", "rewards/rejected" (beta
        times the log-ratio, summed over tokens), "rewards/margins", "rewards/accuracies", "logps/chosen" and
        "logps/rejected". "logits/chosen" and "logits/rejected" are the means of all logits at the completions' targets,
        before the temperature; absent with a softcap. With an NLL, "nll_loss" is its mean over the tokens.
    """
    return pair_loss(inputs, options, ref_logps=options.ref_logps)
