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

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import FINITE, NOT_NEGATIVE, check
from ligerzoo.losses.checks import check_choice
from ligerzoo.losses.dpo import AVERAGED_VARIANTS, VARIANTS, DPOOptions, check_formula_options
from ligerzoo.losses.objective import LogpOptions, LossOutput, check_head_options
from ligerzoo.losses.preference import PairOptions, check_pair_options, pair_loss

CPO_VARIANTS = ("sigmoid", "hinge", "ipo")


def check_cpo_options(
    name: str, *, variant: str, beta: float, label_smoothing: float, nll_weight: float,
    num_items: int | Tensor | None, num_nll_items: int | Tensor | None,
) -> None:  # fmt: skip
    """Raises for invalid options of `cpo_loss`. `name` is the loss that messages name."""
    check_choice(name, CPO_VARIANTS, variant=variant)
    check_formula_options(name, variant, DPOOptions(beta, label_smoothing))
    check_pair_options(name, nll_weight=nll_weight, num_items=num_items, num_nll_items=num_nll_items)


def check_simpo_options(
    name: str, *, beta: float, gamma: float, label_smoothing: float, nll_weight: float,
    num_items: int | Tensor | None, num_nll_items: int | Tensor | None,
) -> None:  # fmt: skip
    """Raises for invalid options of `simpo_loss`. `name` is the loss that messages name."""
    check_formula_options(name, "sigmoid", DPOOptions(beta, label_smoothing))
    check(name, FINITE, gamma=gamma)
    check_pair_options(name, nll_weight=nll_weight, num_items=num_items, num_nll_items=num_nll_items)


def check_orpo_options(
    name: str, *, beta: float, nll_weight: float, num_items: int | Tensor | None, num_nll_items: int | Tensor | None
) -> None:  # fmt: skip
    """Raises for invalid options of `orpo_loss`. `name` is the loss that messages name."""
    check(name, NOT_NEGATIVE, beta=beta)
    check_pair_options(name, nll_weight=nll_weight, num_items=num_items, num_nll_items=num_nll_items)


def log_odds(logps: Tensor) -> Tensor:
    """Computes log(p / (1 - p)) from log p. Clamps log p to the largest negative number: rounding may leave p = 1."""
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
    """Computes the loss of contrastive preference optimization (Xu et al. 2024): DPO with a uniform reference, and NLL.

    The formulas are in the docstring of `ligerzoo.losses.reference_free`. The logits of all tokens never exist at once.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits; the first B/2 sequences are the chosen completions.
        weight: (V, H) weight of the LM head; None if `hidden` holds logits.
        target: (B, T) token ids, already shifted; `ignore_index` marks prompts and padding.
        variant: "sigmoid", "hinge" or "ipo".
        beta: the scale of the log-probabilities.
        label_smoothing: the probability that the labels of a pair are swapped; for "sigmoid".
        weights: (B/2,), multiplies the loss of each pair; a constant. Default: 1.
        nll_weight: weight of the NLL of the chosen completions.
        num_items: divides the summed losses, see `dpo_loss`. Default: B/2.
        num_nll_items: divides the summed NLL, see `dpo_loss`. Default: the number of its targets.
        head: options of the LM head and `temperature`, see `LogpOptions`.

    Returns:
        `LossOutput`: the loss and the metrics of `dpo_loss`.

    Raises:
        TypeError: an option is unknown, or an argument has another type.
        ValueError: shapes or dtypes are invalid, B is odd, or an option is out of range.
    """
    check_head_options(cpo_loss, head)
    check_cpo_options(
        "cpo_loss", variant=variant, beta=beta, label_smoothing=label_smoothing, nll_weight=nll_weight,
        num_items=num_items, num_nll_items=num_nll_items,
    )  # fmt: skip
    numbers = DPOOptions(beta, label_smoothing)
    average = variant in AVERAGED_VARIANTS
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
    """Computes the loss of simple preference optimization (Meng et al. 2024): average log-probabilities, and a margin.

    The formula is in the docstring of `ligerzoo.losses.reference_free`. The logits of all tokens never exist at once.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits; the first B/2 sequences are the chosen completions.
        weight: (V, H) weight of the LM head; None if `hidden` holds logits.
        target: (B, T) token ids, already shifted; `ignore_index` marks prompts and padding.
        beta: the scale of the rewards; 2.0 to 2.5 in the paper.
        gamma: the target margin between the rewards (TRL's `simpo_gamma`). The paper's tables list gamma / beta.
        label_smoothing: the probability that the labels of a pair are swapped.
        weights: (B/2,), multiplies the loss of each pair; a constant. Default: 1.
        nll_weight: weight of the NLL of the chosen completions; above 0 this is CPO-SimPO.
        num_items: divides the summed losses, see `dpo_loss`. Default: B/2.
        num_nll_items: divides the summed NLL, see `dpo_loss`. Default: the number of its targets.
        head: options of the LM head and `temperature`, see `LogpOptions`.

    Returns:
        `LossOutput`: the loss and the metrics of `dpo_loss`; rewards and log-probabilities are averages over tokens.

    Raises:
        TypeError: an option is unknown, or an argument has another type.
        ValueError: shapes or dtypes are invalid, B is odd, or an option is out of range.
    """
    check_head_options(simpo_loss, head)
    check_simpo_options(
        "simpo_loss", beta=beta, gamma=gamma, label_smoothing=label_smoothing, nll_weight=nll_weight,
        num_items=num_items, num_nll_items=num_nll_items,
    )  # fmt: skip
    numbers = DPOOptions(beta, label_smoothing)
    options = PairOptions(
        beta, average_log_prob=True, average_rewards=True, weights=weights, nll_weight=nll_weight, num_items=num_items,
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
    """Computes the loss of odds ratio preference optimization (Hong et al. 2024): NLL, and the odds ratio of a pair.

    The formula is in the docstring of `ligerzoo.losses.reference_free`. The logits of all tokens never exist at once.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits; the first B/2 sequences are the chosen completions.
        weight: (V, H) weight of the LM head; None if `hidden` holds logits.
        target: (B, T) token ids, already shifted; `ignore_index` marks prompts and padding.
        beta: the weight of the odds ratio, lambda in the paper.
        weights: (B/2,), multiplies the odds ratio term of each pair; a constant. Default: 1.
        nll_weight: weight of the NLL of the chosen completions.
        nll_target: (B, T), the targets of the NLL, to include other tokens: TRL includes the prompts of the chosen
            sequences. Must equal `target` where neither is ignored. Default: `target`.
        num_items: divides the summed losses, see `dpo_loss`. Default: B/2.
        num_nll_items: divides the summed NLL, see `dpo_loss`. Default: the number of its targets.
        head: options of the LM head and `temperature`, see `LogpOptions`.

    Returns:
        `LossOutput`: the loss and the metrics of `dpo_loss`; rewards and log-probabilities are averages over tokens.
        Two more metrics are means over the pairs: "log_odds_chosen" of log odds(c) - log odds(r), and "log_odds_ratio"
        of log S of that difference.

    Raises:
        TypeError: an option is unknown, or an argument has another type.
        ValueError: shapes or dtypes are invalid, B is odd, or an option is out of range.
    """
    check_head_options(orpo_loss, head)
    check_orpo_options("orpo_loss", beta=beta, nll_weight=nll_weight, num_items=num_items, num_nll_items=num_nll_items)
    options = PairOptions(
        beta, average_log_prob=True, average_rewards=True, weights=weights, nll_weight=nll_weight,
        nll_target=nll_target, num_items=num_items, num_nll_items=num_nll_items,
    )  # fmt: skip

    def odds_ratio(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        chosen_log_odds, rejected_log_odds = log_odds(torch.stack((chosen, rejected)))
        difference = chosen_log_odds - rejected_log_odds
        return {"log_odds_chosen": difference, "log_odds_ratio": F.logsigmoid(difference)}

    def formula(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -beta * odds_ratio(chosen, rejected)["log_odds_ratio"]

    return pair_loss("orpo_loss", formula, hidden, weight, target, options, head, odds_ratio)
