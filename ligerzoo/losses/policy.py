"""The loss of a token in each variant of GRPO, and the options that the variants have.

The formulas and papers are in the docstring of `ligerzoo.losses.grpo`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ligerzoo.checks import AT_LEAST_1, FINITE, FLAG, NOT_NEGATIVE, POSITIVE, Values, check, check_optional, number
from ligerzoo.losses.checks import check_choice, check_unused
from ligerzoo.losses.logps import masked_mean, masked_sum, safe_exp
from ligerzoo.tensor_checks import check_num_items

Level = Literal["token", "sequence"]
LEVELS = get_args(Level)


class PolicyOptions(NamedTuple):
    """Options of `grpo_loss`, with its defaults."""

    variant: str = "grpo"
    level: Level | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    is_kl_corrected: bool = False
    entropy_coef: float = 0.0
    with_entropy: bool = False
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_shapes: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0))
    max_length: int | None = None

    @property
    def ratio_level(self) -> Level:
        """`level`, by default that of the variant."""
        return VARIANTS[self.variant].level if self.level is None else self.level

    @property
    def upper_epsilon(self) -> float:
        """`epsilon_high`, by default `epsilon`."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class Rollout(NamedTuple):
    """Constants of the sampled tokens, (B, T) each.

    Attributes:
        mask: True at non-ignored tokens.
        weights: weights of the tokens' losses in the sum.
        advantages, old_logps, ref_logps, correction: see `grpo_loss`.
    """

    mask: Tensor
    weights: Tensor
    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    correction: Tensor | None


class PolicyInputs(NamedTuple):
    """What the loss of a token depends on, (B, T) each; `ratio` is (B, 1) at the level of sequences."""

    logps: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    correction: Tensor | None


def policy_inputs(logps: Tensor, rollout: Rollout, level: Level) -> PolicyInputs:
    old_logps = logps.detach() if rollout.old_logps is None else rollout.old_logps
    log_ratio = logps - old_logps
    log_ratio_at_level = log_ratio if level == "token" else masked_mean(log_ratio, rollout.mask)[:, None]
    return PolicyInputs(
        logps, log_ratio, safe_exp(log_ratio_at_level), rollout.advantages, rollout.mask, rollout.correction
    )


def _where(condition: Tensor, numbers: tuple[float, float], like: Tensor) -> Tensor:
    """torch.where for two Python numbers, in the dtype of `like` instead of fp32."""
    first, second = (like.new_full((), number) for number in numbers)
    return torch.where(condition, first, second)


def clipped(inputs: PolicyInputs, options: PolicyOptions) -> Tensor:
    ratio = inputs.ratio if options.delta is None else inputs.ratio.clamp(max=options.delta)
    in_range = inputs.ratio.clamp(1 - options.epsilon, 1 + options.upper_epsilon)
    return -torch.minimum(ratio * inputs.advantages, in_range * inputs.advantages)


def cispo(inputs: PolicyInputs, options: PolicyOptions) -> Tensor:
    return -inputs.ratio.detach().clamp(max=1 + options.upper_epsilon) * inputs.advantages * inputs.logps


def sapo(inputs: PolicyInputs, options: PolicyOptions) -> Tensor:
    temperature = _where(inputs.advantages > 0, options.sapo_temperatures, inputs.logps)
    return -4 / temperature * torch.sigmoid(temperature * (inputs.ratio - 1)) * inputs.advantages


def vespo(inputs: PolicyInputs, options: PolicyOptions) -> Tensor:
    lowest, highest = math.log(1e-8), 20.0
    log_w = masked_sum(inputs.log_ratio.detach().clamp(-highest, highest), inputs.mask)
    if inputs.correction is not None:
        log_w = log_w + masked_sum(inputs.correction.log().clamp(lowest, highest), inputs.mask)
    log_w = log_w.clamp(lowest, highest)[:, None]
    shape, rate = (
        _where(inputs.advantages >= 0, pair, inputs.logps) for pair in zip(*options.vespo_shapes, strict=True)
    )
    weight = torch.exp(shape * log_w + rate * (1 - log_w.exp()))
    return -weight * inputs.advantages * inputs.logps


PolicyFormula = Callable[[PolicyInputs, PolicyOptions], Tensor]


def _uniform_weights(mask: Tensor) -> Tensor:
    return mask


def _mean_weights(mask: Tensor) -> Tensor:
    """1 / |y| for each token: the sum over a sequence is its mean."""
    return mask / mask.sum(-1, keepdim=True).clamp(min=1)


class PolicyVariant(NamedTuple):
    """A variant of GRPO.

    Attributes:
        formula: the loss of a token.
        token_weights: (B, T) mask -> weights of the tokens in the sum.
        divided_by: what divides the sum; "max_tokens" is the number of sequences times `max_length`.
        level: whether ratios are of tokens or of sequences.
        uses_whole_sequence: whether a token's loss depends on other tokens of its sequence even at token level.
    """

    formula: PolicyFormula
    token_weights: Callable[[Tensor], Tensor]
    divided_by: Literal["sequences", "tokens", "max_tokens"]
    level: Level = "token"
    uses_whole_sequence: bool = False


VARIANTS = {
    "grpo": PolicyVariant(clipped, _mean_weights, "sequences"),
    "bnpo": PolicyVariant(clipped, _uniform_weights, "tokens"),
    "dapo": PolicyVariant(clipped, _uniform_weights, "tokens"),
    "dr_grpo": PolicyVariant(clipped, _uniform_weights, "max_tokens"),
    "gspo": PolicyVariant(clipped, _mean_weights, "sequences", "sequence"),
    "luspo": PolicyVariant(clipped, _uniform_weights, "sequences", "sequence"),
    "cispo": PolicyVariant(cispo, _uniform_weights, "tokens"),
    "sapo": PolicyVariant(sapo, _mean_weights, "sequences"),
    "vespo": PolicyVariant(vespo, _uniform_weights, "tokens", uses_whole_sequence=True),
}


def kl_estimate(logps: Tensor, ratio: Tensor, ref_logps: Tensor, options: PolicyOptions) -> Tensor:
    """The k3 estimate of the KL divergence from the reference, times the ratio if `is_kl_corrected`."""
    k3 = safe_exp(ref_logps - logps) - (ref_logps - logps) - 1
    return k3 * ratio if options.is_kl_corrected else k3


_FORMULA_OPTIONS: dict[PolicyFormula, tuple[str, ...]] = {
    clipped: ("epsilon", "epsilon_high", "delta"),
    cispo: ("epsilon_high",),
    sapo: ("sapo_temperatures",),
    vespo: ("vespo_shapes",),
}
"""Options that only some formulas use."""


def check_policy_options(
    name: str, options: PolicyOptions, num_items: int | Tensor | None, num_tokens: int | Tensor | None
) -> None:  # fmt: skip
    """Raises for an unknown variant or level, and for options that are out of range, missing or unused."""
    check_choice(name, VARIANTS, variant=options.variant)
    check_choice(name, LEVELS, level=options.ratio_level)
    check(name, _CLIP, epsilon=options.epsilon)
    check_optional(name, NOT_NEGATIVE, epsilon_high=options.epsilon_high)
    check_optional(name, POSITIVE, delta=options.delta)
    check(name, NOT_NEGATIVE, beta=options.beta)
    check(name, FINITE, entropy_coef=options.entropy_coef)
    check(name, FLAG, is_kl_corrected=options.is_kl_corrected, with_entropy=options.with_entropy)
    _check_pair(name, "sapo_temperatures", options.sapo_temperatures, POSITIVE)
    if not isinstance(options.vespo_shapes, Sequence) or len(options.vespo_shapes) != 2:
        raise TypeError(f"{name}: vespo_shapes={options.vespo_shapes!r}; expected two pairs of numbers")
    for i, pair in enumerate(options.vespo_shapes):
        _check_pair(name, f"vespo_shapes[{i}]", pair, FINITE)
    if options.max_length is not None:
        check(name, AT_LEAST_1, max_length=options.max_length)
    check_num_items(name, num_items=num_items, num_tokens=num_tokens)

    variant, choice = VARIANTS[options.variant], f"variant={options.variant!r}"
    used = _FORMULA_OPTIONS[variant.formula]
    unused = {option for others in _FORMULA_OPTIONS.values() for option in others if option not in used}
    if variant.divided_by != "max_tokens":
        unused.add("max_length")
    check_unused(
        name, choice, PolicyOptions._field_defaults, **{option: getattr(options, option) for option in sorted(unused)}
    )
    if options.entropy_coef == 0:
        check_unused(name, "entropy_coef=0 (no entropy term)", {"num_tokens": None}, num_tokens=num_tokens)
    if variant.divided_by == "max_tokens" and options.max_length is None:
        raise ValueError(f"{name}: max_length=None; {choice} requires it: the longest completion that sampling allows")
    if variant.formula is cispo and options.epsilon_high is None:
        raise ValueError(f"{name}: epsilon_high=None; {choice} requires it, such as 4")
    most = 1 + options.upper_epsilon
    if options.delta is not None and options.delta <= most:
        raise ValueError(f"{name}: delta={options.delta}; expected more than 1 + epsilon_high = {most}")


_CLIP = number("0 <= epsilon < 1", lambda epsilon: 0 <= epsilon < 1)


def _check_pair(name: str, argument: str, pair: object, valid: Values) -> None:
    """Raises unless an argument is a pair of numbers in the range."""
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise TypeError(f"{name}: {argument}={pair!r}; expected a pair, each {valid.expected}")
    for i, value in enumerate(pair):
        check(name, valid, **{f"{argument}[{i}]": value})
