"""Policy gradients on sampled completions: group relative policy optimization, its variants, and PPO's clipping.

Let A be the advantage of a token (often the same for all tokens of a completion), l its log-probability, and
r = p / p_old its ratio; if the model itself sampled, r has the value 1 and the gradient of l. Let e and e' be the
clipping range, epsilon and epsilon_high. The loss of a token is

    clipped    -min(min(r, d) A, clip(r, 1 - e, 1 + e') A)      Schulman et al. 2017, eq. 7; d: INTELLECT-2,
                                                                arXiv 2505.07291
    cispo      -min(r, 1 + e') A l,  the ratio a constant       MiniMax-M1, arXiv 2506.13585
    sapo       -4/t S(t (r - 1)) A,  t by the sign of A         arXiv 2511.20347
    vespo      -f(w) A l,  f(w) = w^k exp(h (1 - w)) a constant, w the ratio of the completion, k and h by the sign of A
                                                                arXiv 2602.10693

plus b (exp(l_ref - l) - (l_ref - l) - 1), an estimate of the KL divergence from a reference model (Schulman 2020, k3).
S is the logistic function. With |y| the number of a completion's tokens, the variants are

    variant    a token's loss   the sum over tokens is divided by
    grpo       clipped          |y|, then the number of sequences      Shao et al. 2024, eq. 3
    bnpo       clipped          the tokens of the batch                as TRL names it
    dapo       clipped          the tokens of the step                 Yu et al. 2025, eq. 8
    dr_grpo    clipped          the sequences times max_length         Liu et al. 2025, arXiv 2503.20783
    gspo       clipped          as grpo; r is of the completion        Zheng et al. 2025, eq. 5 to 7
    luspo      clipped          the sequences; r is of the completion  arXiv 2602.05261
    cispo      cispo            the tokens of the step
    sapo       sapo             |y|, then the number of sequences
    vespo      vespo            the tokens of the step

The r of a completion is exp(mean log(p / p_old)), its w is exp(sum log(p / p_old)). "Of the step" needs `num_items`;
the default is the batch. All variants equal those of TRL 1.16, with two exceptions. exp(x) continues as its tangent
beyond x = 30 in the ratio and in the KL term, where TRL's overflows (see `logps.safe_exp`). And e' means the same in
all variants, as in the papers: TRL's cispo takes 1 + e' as epsilon_high.

The KL term of luspo is summed over the non-ignored tokens, and so is the clipped loss:

    1 / B  sum_i ( |y_i| clipped_i + b sum_t k3_it ).

The paper has no KL term. It multiplies GSPO's loss of a completion, a mean over tokens, by |y|; this makes the mean of
k3 a sum. liger-kernel 0.8 and TRL before 1.16 multiply the mean of k3 over all T positions, padding included:

    1 / B  sum_i |y_i| ( clipped_i + b / T sum_(all t) k3_it ).

That weights the KL term of a completion by |y|^2 / T instead of |y|, and it changes with the padding of the batch. The
two are equal without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ligerzoo.checks import AT_LEAST_1, FINITE, POSITIVE, Values, check, is_list, number, one_of
from ligerzoo.errors import LigerzooError, WrongTypeError
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.checks import check_both_or_neither, check_constants, check_sequences
from ligerzoo.losses.logps import items_or, masked_mean, masked_sum, safe_exp
from ligerzoo.losses.objective import GroupObjective, LossGroup, LossOutput, evaluate_objective
from ligerzoo.losses.options import Finite, LogpOptions, LossInputs, NotNegative, NumItems, Positive, takes
from ligerzoo.tensor_checks import check_floats, check_num_items, check_tensor

Level = Literal["token", "sequence"]
LEVELS = get_args(Level)


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


class Policy(NamedTuple):
    """The model's log-probabilities of the sampled tokens, (B, T) each; `ratio` is (B, 1) at the level of sequences."""

    logps: Tensor
    log_ratio: Tensor
    ratio: Tensor


def policy_of(logps: Tensor, rollout: Rollout, level: Level) -> Policy:
    log_ratio = logps - (logps.detach() if rollout.old_logps is None else rollout.old_logps)
    at_level = log_ratio if level == "token" else masked_mean(log_ratio, rollout.mask)[:, None]
    return Policy(logps, log_ratio, safe_exp(at_level))


def _where(condition: Tensor, numbers: tuple[float, float], like: Tensor) -> Tensor:
    """torch.where for two Python numbers, in the dtype of `like` instead of fp32."""
    first, second = (like.new_full((), number) for number in numbers)
    return torch.where(condition, first, second)


def _clipped(policy: Policy, rollout: Rollout, options: GRPOOptions) -> Tensor:
    ratio = policy.ratio if options.delta is None else policy.ratio.clamp(max=options.delta)
    in_range = policy.ratio.clamp(1 - options.epsilon, 1 + options.upper_epsilon)
    return -torch.minimum(ratio * rollout.advantages, in_range * rollout.advantages)


def _cispo(policy: Policy, rollout: Rollout, options: GRPOOptions) -> Tensor:
    return -policy.ratio.detach().clamp(max=1 + options.upper_epsilon) * rollout.advantages * policy.logps


def _sapo(policy: Policy, rollout: Rollout, options: GRPOOptions) -> Tensor:
    temperature = _where(rollout.advantages > 0, options.sapo_temperatures, policy.logps)
    return -4 / temperature * torch.sigmoid(temperature * (policy.ratio - 1)) * rollout.advantages


def _vespo(policy: Policy, rollout: Rollout, options: GRPOOptions) -> Tensor:
    lowest, highest = math.log(1e-8), 20.0
    log_w = masked_sum(policy.log_ratio.detach().clamp(-highest, highest), rollout.mask)
    if rollout.correction is not None:
        log_w = log_w + masked_sum(rollout.correction.log().clamp(lowest, highest), rollout.mask)
    log_w = log_w.clamp(lowest, highest)[:, None]
    is_good = rollout.advantages >= 0
    shape, rate = (_where(is_good, pair, policy.logps) for pair in zip(*options.vespo_shapes, strict=True))
    weight = torch.exp(shape * log_w + rate * (1 - log_w.exp()))
    return -weight * rollout.advantages * policy.logps


def _uniform_weights(mask: Tensor) -> Tensor:
    return mask


def _mean_weights(mask: Tensor) -> Tensor:
    """1 / |y| for each token: the sum over a sequence is its mean."""
    return mask / mask.sum(-1, keepdim=True).clamp(min=1)


class PolicyFormula(NamedTuple):
    """The loss of a token, and the options that only some formulas use."""

    token_losses: Callable[[Policy, Rollout, GRPOOptions], Tensor]
    options: tuple[str, ...]


class PolicyVariant(NamedTuple):
    """A variant of GRPO.

    Attributes:
        formula: the loss of a token.
        token_weights: (B, T) mask -> weights of the tokens in the sum.
        divided_by: what divides the sum; "max_tokens" is the number of sequences times `max_length`.
        level: whether ratios are of tokens or of sequences.
        weighs_sequences: whether the formula weights tokens by the ratio of their sequence, with its `correction`.
    """

    formula: PolicyFormula
    token_weights: Callable[[Tensor], Tensor]
    divided_by: Literal["sequences", "tokens", "max_tokens"]
    level: Level = "token"
    weighs_sequences: bool = False


_CLIPPED = PolicyFormula(_clipped, ("epsilon", "epsilon_high", "delta"))
_CISPO = PolicyFormula(_cispo, ("epsilon_high",))
_SAPO = PolicyFormula(_sapo, ("sapo_temperatures",))
_VESPO = PolicyFormula(_vespo, ("vespo_shapes",))

VARIANTS = {
    "grpo": PolicyVariant(_CLIPPED, _mean_weights, "sequences"),
    "bnpo": PolicyVariant(_CLIPPED, _uniform_weights, "tokens"),
    "dapo": PolicyVariant(_CLIPPED, _uniform_weights, "tokens"),
    "dr_grpo": PolicyVariant(_CLIPPED, _uniform_weights, "max_tokens"),
    "gspo": PolicyVariant(_CLIPPED, _mean_weights, "sequences", "sequence"),
    "luspo": PolicyVariant(_CLIPPED, _uniform_weights, "sequences", "sequence"),
    "cispo": PolicyVariant(_CISPO, _uniform_weights, "tokens"),
    "sapo": PolicyVariant(_SAPO, _mean_weights, "sequences"),
    "vespo": PolicyVariant(_VESPO, _uniform_weights, "tokens", weighs_sequences=True),
}


def kl_estimate(logps: Tensor, ratio: Tensor, ref_logps: Tensor, options: GRPOOptions) -> Tensor:
    """The k3 estimate of the KL divergence from the reference, times the ratio if `is_kl_corrected`."""
    k3 = safe_exp(ref_logps - logps) - (ref_logps - logps) - 1
    return k3 * ratio if options.is_kl_corrected else k3


Clip = Annotated[float, number("0 <= epsilon < 1", lambda epsilon: 0 <= epsilon < 1)]


@dataclass(frozen=True, kw_only=True)
class PPOOptions(LogpOptions):
    """Options of `ppo_clip_loss`.

    Attributes:
        advantages: (B, T) of tokens, such as generalized advantage estimates, or (B,); a constant.
        old_logps: (B, T), `token_logps` of the model that sampled.
        epsilon: clips ratios to the range from 1 - epsilon to 1 + epsilon.
        entropy_coef: weight of the mean entropy of the tokens, which is subtracted from the loss.
        num_items: divides the summed losses and entropies. Default: the number of tokens in the batch. For exact
            gradient accumulation, pass the number in the step to every microbatch.
    """

    advantages: Tensor = field(kw_only=False)
    old_logps: Tensor = field(kw_only=False)
    epsilon: Clip = 0.2
    entropy_coef: Finite = 0.0
    num_items: NumItems = None

    def check(self, name: str) -> None:
        check_num_items(name, num_items=self.num_items)


@dataclass(frozen=True, kw_only=True)
class GRPOOptions(LogpOptions):
    """Options of `grpo_loss`. Tensors (B, T) are aligned with `target`: index t is about the token `target[:, t]`.

    Attributes:
        advantages: (B,) of completions, or (B, T) of tokens; a constant.
        old_logps: (B, T), `token_logps` of the model that sampled. Default: those of the model itself.
        ref_logps: (B, T), `token_logps` of the reference model; required if `beta` is not 0.
        correction: (B, T), multiplies the losses of the tokens without the KL term, see `sampler_correction`.
        variant: "grpo", "bnpo", "dapo", "dr_grpo", "gspo", "luspo", "cispo", "sapo" or "vespo".
        level: "token" or "sequence": whether ratios are of tokens or of completions. Default: that of the variant.
        epsilon: clips ratios below 1 - epsilon.
        epsilon_high: clips ratios above 1 + epsilon_high. Default: `epsilon`. Required for "cispo", such as 4 (5 in
            TRL).
        delta: clips ratios above delta for negative advantages too (two-sided clipping); more than 1 + epsilon_high.
        beta: weight of the KL term.
        is_kl_corrected: multiply the KL term by the ratio (DeepSeek-V3.2, arXiv 2512.02556). Requires `ref_logps`.
        entropy_coef: weight of the mean entropy of the tokens, which is subtracted from the loss.
        with_entropy: compute the metric "entropy" even if `entropy_coef` is 0.
        sapo_temperatures: t of "sapo", for positive advantages and for the others.
        vespo_shapes: (k, h) of "vespo", for advantages of at least 0 and for the others.
        max_length: the longest completion that sampling allows; required for "dr_grpo".
        num_items: divides the summed losses. Default: the number of sequences or tokens in the batch, depending on the
            variant. For exact gradient accumulation, pass the number in the step to every microbatch.
        num_tokens: divides the summed entropy. Default: the number of tokens in the batch. With an `entropy_coef`, pass
            it together with `num_items`; without one, leave it out.
    """

    advantages: Tensor = field(kw_only=False)
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    correction: Tensor | None = None
    variant: Annotated[str, one_of(VARIANTS)] = "grpo"
    level: Level | None = None
    epsilon: Clip = 0.2
    epsilon_high: NotNegative | None = None
    delta: Positive | None = None
    beta: NotNegative = 0.0
    is_kl_corrected: bool = False
    entropy_coef: Finite = 0.0
    with_entropy: bool = False
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_shapes: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0))
    max_length: Annotated[int, AT_LEAST_1] | None = None
    num_items: NumItems = None
    num_tokens: NumItems = None

    @property
    def needs_reference(self) -> bool:
        return self.beta != 0

    @property
    def ratio_level(self) -> Level:
        """`level`, by default that of the variant."""
        return VARIANTS[self.variant].level if self.level is None else self.level

    @property
    def upper_epsilon(self) -> float:
        """`epsilon_high`, by default `epsilon`."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def check(self, name: str) -> None:
        _check_pair(name, "sapo_temperatures", self.sapo_temperatures, POSITIVE)
        if not is_list(self.vespo_shapes) or len(self.vespo_shapes) != 2:
            what = f"vespo_shapes={self.vespo_shapes!r}"
            raise WrongTypeError(what, where=name, expected="two pairs of numbers")
        for i, pair in enumerate(self.vespo_shapes):
            _check_pair(name, f"vespo_shapes[{i}]", pair, FINITE)
        check_num_items(name, num_items=self.num_items, num_tokens=self.num_tokens)

        variant, choice = VARIANTS[self.variant], f"variant={self.variant!r}"
        options = {option for each in VARIANTS.values() for option in each.formula.options}
        unused = options.difference(variant.formula.options)
        if variant.divided_by != "max_tokens":
            unused.add("max_length")
        self.check_unused(name, choice, *sorted(unused))
        if self.entropy_coef == 0:
            self.check_unused(name, "entropy_coef=0 (no entropy term)", "num_tokens")
        if variant.divided_by == "max_tokens" and self.max_length is None:
            what = f"max_length=None; {choice} requires it: the longest completion that sampling allows"
            raise LigerzooError(what, where=name)
        if variant.formula is _CISPO and self.epsilon_high is None:
            raise LigerzooError(f"epsilon_high=None; {choice} requires it, such as 4", where=name)
        most = 1 + self.upper_epsilon
        if self.delta is not None and self.delta <= most:
            raise LigerzooError(f"delta={self.delta}", where=name, expected=f"more than 1 + epsilon_high = {most}")


def _check_pair(name: str, argument: str, pair: object, valid: Values) -> None:
    """Raises unless an argument is a pair of numbers in the range."""
    if not is_list(pair) or len(pair) != 2:
        raise WrongTypeError(f"{argument}={pair!r}", where=name, expected=f"a pair, each {valid.expected}")
    for i, value in enumerate(pair):
        check(name, valid, **{f"{argument}[{i}]": value})


@takes(GRPOOptions)
def grpo_loss(inputs: LossInputs, options: GRPOOptions) -> LossOutput:
    """Computes the loss of group relative policy optimization (Shao et al. 2024) or one of its variants.

    The formulas are in the docstring of `ligerzoo.losses.grpo`. The logits of all tokens never exist at once.

    Returns:
        `LossOutput`: the loss and the metrics. "kl" (given `ref_logps`), "log_ratio" (given `old_logps`; its absolute
        value) and "entropy" (if computed) are means over the tokens. "clip_ratio/low", "clip_ratio/high" and
        "clip_ratio/region" (either) are the fractions of clipped ratios: of tokens, or of sequences at that level.
        "cispo" has "clip_ratio/high" only, "sapo" and "vespo" none.
    """
    return _policy_loss(inputs, options)


@takes(PPOOptions)
def ppo_clip_loss(inputs: LossInputs, options: PPOOptions) -> LossOutput:
    """Computes the policy loss of proximal policy optimization (Schulman et al. 2017, eq. 7), a mean over tokens.

    Equals `grpo_loss(variant="bnpo")`. The logits of all tokens never exist at once.

    Returns:
        `LossOutput`: the loss and the metrics of `grpo_loss`.
    """
    check_floats(inputs.name, old_logps=options.old_logps)
    num_tokens = options.num_items if options.entropy_coef != 0 else None
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    return _policy_loss(inputs, GRPOOptions(**given, variant="bnpo", num_tokens=num_tokens))


def _policy_loss(inputs: LossInputs, options: GRPOOptions) -> LossOutput:
    rollout, variant = _checked_rollout(inputs, options), VARIANTS[options.variant]
    n_sequences, n_tokens = rollout.mask.shape[0], rollout.mask.sum()
    items = items_or(options.num_items, n_tokens if variant.divided_by == "tokens" else n_sequences, inputs.hidden)
    if variant.divided_by == "max_tokens":
        items = items * (options.max_length or 1)
    tokens = items_or(options.num_tokens, n_tokens, inputs.hidden)

    def total_loss(logps: Tensor, entropy: Tensor | None, *constants: Tensor) -> Tensor:
        rollout = Rollout(*constants)
        loss = (rollout.weights * _token_losses(logps, rollout, options)).sum() / items
        if entropy is None:
            return loss
        return loss - options.entropy_coef * masked_sum(entropy, rollout.mask).sum() / tokens

    group: LossGroup = "sequence" if options.ratio_level == "sequence" or variant.weighs_sequences else "token"
    uses_entropy = options.with_entropy or options.entropy_coef != 0
    objective = GroupObjective(total_loss, rollout, group, uses_entropy)
    loss, logps, entropy = evaluate_objective(inputs, objective, options)
    return LossOutput(loss, _metrics(logps, entropy, rollout, options))


def _token_losses(logps: Tensor, rollout: Rollout, options: GRPOOptions) -> Tensor:
    """Returns the variant's loss of each token plus the KL term, (B, T)."""
    variant, policy = VARIANTS[options.variant], policy_of(logps, rollout, options.ratio_level)
    losses = variant.formula.token_losses(policy, rollout, options)
    if rollout.correction is not None and not variant.weighs_sequences:
        losses = losses * rollout.correction
    if options.beta != 0 and rollout.ref_logps is not None:  # with beta = 0 only the metrics need the reference
        losses = losses + options.beta * kl_estimate(logps, policy.ratio, rollout.ref_logps, options)
    return losses


def _checked_rollout(inputs: LossInputs, options: GRPOOptions) -> Rollout:
    """Returns the constants of the tokens. Raises unless tensors and options fit together."""
    name, hidden, _, target = inputs
    if options.beta != 0 and options.ref_logps is None:
        what = f"ref_logps=None with beta={options.beta}"
        expected = "log-probabilities of the reference model for the KL term"
        raise LigerzooError(what, where=name, expected=expected, remedy="Pass ref_logps")
    if options.ref_logps is None:
        options.check_unused(name, "ref_logps=None", "is_kl_corrected")
    check_sequences(inputs, options.bias)
    advantages, shape = options.advantages, tuple(target.shape)
    check_tensor(name, "advantages", advantages, shapes=[shape[:1], shape], device=hidden.device)
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(shape)
    tensors = {"old_logps": options.old_logps, "ref_logps": options.ref_logps, "correction": options.correction}
    check_constants(inputs, **{argument: (tensor, shape) for argument, tensor in tensors.items()})
    if options.entropy_coef != 0:
        numbers = {"num_items": options.num_items, "num_tokens": options.num_tokens}
        check_both_or_neither(name, "num_tokens divides the entropy", **numbers)
    mask = options.target_mask(target)

    def masked_constant(x: Tensor | None) -> Tensor | None:
        """Detaches, and replaces the values of ignored tokens, which may be NaN, by 0."""
        return None if x is None else torch.where(mask, x.detach(), 0.0)

    weights = VARIANTS[options.variant].token_weights(mask.to(accumulation_dtype(hidden.dtype)))
    return Rollout(mask, weights, torch.where(mask, advantages, 0.0), *map(masked_constant, tensors.values()))


def _metrics(logps: Tensor, entropy: Tensor | None, rollout: Rollout, options: GRPOOptions) -> dict[str, Tensor]:
    def token_mean(x: Tensor) -> Tensor:
        return masked_sum(x.to(logps.dtype), rollout.mask).sum() / rollout.mask.sum().clamp(min=1)

    def ratio_mean(x: Tensor) -> Tensor:
        """The mean over the ratios: over tokens, or over sequences at that level."""
        if options.ratio_level == "token":
            return token_mean(x)
        return masked_mean(x.to(logps.dtype), rollout.mask).sum() / max(1, x.shape[0])

    metrics = {} if entropy is None else {"entropy": token_mean(entropy)}
    policy = policy_of(logps, rollout, options.ratio_level)
    clips = VARIANTS[options.variant].formula.options
    if rollout.old_logps is not None:
        metrics["log_ratio"] = token_mean(policy.log_ratio.abs())
    if rollout.ref_logps is not None:
        metrics["kl"] = token_mean(kl_estimate(logps, policy.ratio, rollout.ref_logps, options))
    if "epsilon_high" in clips:
        high = (policy.ratio > 1 + options.upper_epsilon) & (rollout.advantages > 0)
        metrics["clip_ratio/high"] = ratio_mean(high)
    if "epsilon" in clips:
        low = (policy.ratio < 1 - options.epsilon) & (rollout.advantages < 0)
        metrics["clip_ratio/low"], metrics["clip_ratio/region"] = ratio_mean(low), ratio_mean(low | high)
    return metrics
