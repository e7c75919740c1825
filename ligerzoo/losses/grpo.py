"""Policy gradients on sampled answers: group relative policy optimization, its variants, and PPO's clipping.

With A the advantage of a token (an answer's, for all its tokens alike), l its log-probability, r its ratio p / p_old
(a constant 1 with the gradient of l, where the model itself sampled) and e, e' the clipping range, a token's loss is

    clipped    -min(min(r, d) A, clip(r, 1 - e, 1 + e') A)      Schulman et al. 2017, eq. 7; d: INTELLECT-2,
                                                                arXiv 2505.07291
    cispo      -min(r, 1 + e') A l,  the ratio a constant       MiniMax-M1, arXiv 2506.13585
    sapo       -4/t S(t (r - 1)) A,  t by the sign of A         arXiv 2511.20347
    vespo      -f(w) A l,  f(w) = w^k exp(h (1 - w)) a constant, w the ratio of the whole answer, k and h by A's sign
                                                                arXiv 2602.10693

plus b (exp(l_ref - l) - (l_ref - l) - 1), an estimate of the KL divergence from a reference (Schulman 2020, k3). And
the variants are, with |y| the number of an answer's tokens:

    variant    a token's loss   summed over tokens,
    grpo       clipped          by 1 / |y|; over the rows              Shao et al. 2024, eq. 3
    bnpo       clipped          over the tokens of the batch           as TRL names it
    dapo       clipped          over the tokens of the step            Yu et al. 2025, eq. 8
    dr_grpo    clipped          over the rows times the longest answer's possible length     Liu et al. 2025,
                                                                       arXiv 2503.20783
    gspo       clipped          as grpo; with r of the answer          Zheng et al. 2025, eq. 5 to 7
    luspo      clipped          over the rows; with r of the answer    arXiv 2602.05261
    cispo      cispo            over the tokens of the step
    sapo       sapo             by 1 / |y|; over the rows
    vespo      vespo            over the tokens of the step

An answer's r is exp(mean log(p / p_old)), its w is exp(sum log(p / p_old)). All are those of TRL 1.16, with two
exceptions. exp(x) is continued by its tangent beyond x = 30, in the ratio and in the KL term, where theirs overflows
(see `logps.bounded_exp`). And e' means the same in all variants, as in the papers: TRL's cispo takes 1 + e' for its
epsilon_high.

The KL term of luspo is summed over the tokens that count, like the clipped loss, which counts once for each of them:

    1 / B  sum_i ( |y_i| clipped_i + b sum_t k3_it ).

The paper has no KL term. It multiplies GSPO's loss of an answer, a mean over tokens, by |y|, which makes the mean of k3
a sum. liger-kernel 0.8 and TRL before 1.16 multiply the mean of k3 over all T positions of the batch, padding included,

    1 / B  sum_i |y_i| ( clipped_i + b / T sum_(all t) k3_it ),

so an answer's KL term is weighted by |y|^2 / T in place of |y|, and changes with the padding that the batch needs. The
two are equal without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.logps import (
    bounded_exp,
    check_choice,
    check_number,
    check_rows,
    check_together,
    counted,
    divisor,
    summed,
)
from ligerzoo.losses.objective import Group, LogpOptions, LossOutput, Objective, check_head, evaluate

Level = Literal["token", "sequence"]
LEVELS = get_args(Level)


class GRPOOptions(NamedTuple):
    """The numbers in the formulas: e, e', d, sapo's t and vespo's (k, h) for positive and negative advantages, b, and
    what else there is to choose, see `grpo_loss`."""

    epsilon: float
    epsilon_high: float
    delta: float | None
    sapo_temperatures: tuple[float, float]
    vespo_shapes: tuple[tuple[float, float], tuple[float, float]]
    beta: float
    is_kl_corrected: bool
    level: Level


class Rollout(NamedTuple):
    """What is known of the sampled tokens, (B, T) each: which count, by which weights their losses are summed, and the
    arguments of `grpo_loss`."""

    mask: Tensor
    weights: Tensor
    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    correction: Tensor | None


class Step(NamedTuple):
    """What a token's loss is made of: (B, T) each; `ratio` is (B, 1) for ratios of whole answers."""

    logps: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    correction: Tensor | None


def step_of(logps: Tensor, rollout: Rollout, level: Level) -> Step:
    old_logps = logps.detach() if rollout.old_logps is None else rollout.old_logps
    log_ratio = logps - old_logps
    of_level = log_ratio if level == "token" else summed(log_ratio, rollout.mask, average=True)[:, None]
    return Step(logps, log_ratio, bounded_exp(of_level), rollout.advantages, rollout.mask, rollout.correction)


def _either(condition: Tensor, numbers: tuple[float, float], like: Tensor) -> Tensor:
    """The first number or the second, in the dtype of `like`: torch.where alone would give them in fp32."""
    first, second = (like.new_full((), number) for number in numbers)
    return torch.where(condition, first, second)


def clipped(s: Step, o: GRPOOptions) -> Tensor:
    ratio = s.ratio if o.delta is None else s.ratio.clamp(max=o.delta)
    in_range = s.ratio.clamp(1 - o.epsilon, 1 + o.epsilon_high)
    return -torch.minimum(ratio * s.advantages, in_range * s.advantages)


def cispo(s: Step, o: GRPOOptions) -> Tensor:
    return -s.ratio.detach().clamp(max=1 + o.epsilon_high) * s.advantages * s.logps


def sapo(s: Step, o: GRPOOptions) -> Tensor:
    temperature = _either(s.advantages > 0, o.sapo_temperatures, s.logps)
    return -4 / temperature * torch.sigmoid(temperature * (s.ratio - 1)) * s.advantages


def vespo(s: Step, o: GRPOOptions) -> Tensor:
    lowest, highest = math.log(1e-8), 20.0
    log_w = summed(s.log_ratio.detach().clamp(-highest, highest), s.mask)
    if s.correction is not None:
        log_w = log_w + summed(s.correction.log().clamp(lowest, highest), s.mask)
    log_w = log_w.clamp(lowest, highest)[:, None]
    shape, rate = (_either(s.advantages >= 0, pair, s.logps) for pair in zip(*o.vespo_shapes, strict=True))
    weight = torch.exp(shape * log_w + rate * (1 - log_w.exp()))
    return -weight * s.advantages * s.logps


TokenLoss = Callable[[Step, GRPOOptions], Tensor]


def _equally(mask: Tensor) -> Tensor:
    return mask


def _by_length(mask: Tensor) -> Tensor:
    return mask / mask.sum(-1, keepdim=True).clamp(min=1)


class Variant(NamedTuple):
    """A token's loss, the tokens' weights in the sum, what the sum is divided by, and what ratios are of."""

    loss: TokenLoss
    weights: Callable[[Tensor], Tensor]
    counted_in: Literal["rows", "tokens", "places"]
    level: Level = "token"
    of_rows: bool = False
    """Whether a token's loss depends on its row's other tokens even at the level of tokens."""


VARIANTS = {
    "grpo": Variant(clipped, _by_length, "rows"),
    "bnpo": Variant(clipped, _equally, "tokens"),
    "dapo": Variant(clipped, _equally, "tokens"),
    "dr_grpo": Variant(clipped, _equally, "places"),
    "gspo": Variant(clipped, _by_length, "rows", "sequence"),
    "luspo": Variant(clipped, _equally, "rows", "sequence"),
    "cispo": Variant(cispo, _equally, "tokens"),
    "sapo": Variant(sapo, _by_length, "rows"),
    "vespo": Variant(vespo, _equally, "tokens", of_rows=True),
}


@torch.no_grad()
def sampler_correction(
    old_logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    beyond: Literal["truncate", "mask"] = "truncate",
    lowest: float = 0.0,
    highest: float = 3.0,
) -> Tensor:
    """(B, T) importance ratios p_old / p_sampler, where another program sampled than the one that is trained, such as
    an inference engine with kernels of its own: truncated or masked importance sampling. A constant.

    Args:
        old_logps: (B, T), of the model that is trained, before its step.
        sampler_logps: (B, T), as the sampler reported them; NaN where it did not, for a ratio of 1.
        mask: (B, T) bool, the targets that count: of labels not yet shifted, `F.pad(labels[:, 1:] != -100, (0, 1))`.
        level: "token" for each token's own ratio, "sequence" for the product of those of an answer.
        beyond: whether a ratio that is not within `lowest` to `highest` becomes the nearest that is, or 0.
        lowest: see there.
        highest: see there.

    Raises:
        ValueError: `level` or `beyond` is none of those named, or shapes do not fit.
    """
    check_choice("sampler_correction", LEVELS, level=level)
    check_choice("sampler_correction", ("truncate", "mask"), beyond=beyond)
    if not old_logps.shape == sampler_logps.shape == mask.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"sampler_correction: old_logps {tuple(old_logps.shape)}, sampler_logps {tuple(sampler_logps.shape)}, mask "
            f"{tuple(mask.shape)} {mask.dtype}; expected (B, T) all of them, and a mask of torch.bool"
        )
    log_ratio = torch.where(mask, (old_logps - sampler_logps).nan_to_num(nan=0.0), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand(mask.shape)
    ratio = log_ratio.exp()
    if beyond == "truncate":
        return ratio.clamp(lowest, highest)
    return torch.where((ratio < lowest) | (ratio > highest), 0.0, ratio)


def kl_of(logps: Tensor, ratio: Tensor, ref_logps: Tensor, o: GRPOOptions) -> Tensor:
    estimate = bounded_exp(ref_logps - logps) - (ref_logps - logps) - 1
    return estimate * ratio if o.is_kl_corrected else estimate


def grpo_loss(
    hidden: Tensor,
    weight: Tensor | None,
    target: Tensor,
    advantages: Tensor,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    correction: Tensor | None = None,
    variant: str = "grpo",
    level: Level | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    is_kl_corrected: bool = False,
    entropy_coef: float = 0.0,
    with_entropy: bool = False,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    vespo_shapes: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0)),
    max_length: int | None = None,
    num_items: int | Tensor | None = None,
    num_tokens: int | Tensor | None = None,
    **head: Unpack[LogpOptions],
) -> LossOutput:
    """Group relative policy optimization (Shao et al. 2024) or a variant, over the formulas in `grpo.py`.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits.
        weight: (V, H), the head; None if `hidden` are logits.
        target: (B, T) token ids, what each hidden state should predict, or `ignore_index`: prompts, padding, and what
            tools wrote into an answer.
        advantages: (B,), or (B, T) for those of single tokens. Whatever is (B, T) tells of a token in the place of the
            one that predicts it, where its target stands; a constant.
        old_logps: (B, T), `token_logps` of the model that sampled; None if it is this one, not yet changed.
        ref_logps: (B, T), `token_logps` of a reference model; needed if `beta` is not 0.
        correction: (B, T), see `sampler_correction`; multiplies the tokens' losses, the KL term left out.
        variant: "grpo", "bnpo", "dapo", "dr_grpo", "gspo", "luspo", "cispo", "sapo" or "vespo".
        level: whether ratios are of tokens or of whole answers, if not as the variant has it.
        epsilon: ratios are clipped below 1 - epsilon.
        epsilon_high: and above 1 + epsilon_high; by default epsilon. "cispo" needs it, such as 4 (TRL's 5).
        delta: with a negative advantage, too, ratios are clipped above delta (two-sided clipping); more than
            1 + epsilon_high.
        beta: the weight of the KL term.
        is_kl_corrected: multiply the KL term by the ratio (DeepSeek-V3.2, arXiv 2512.02556).
        entropy_coef: the mean entropy of the tokens, times this, is taken off the loss.
        with_entropy: report the entropy although its coefficient is 0.
        sapo_temperatures: t, for positive advantages and for others.
        vespo_shapes: (k, h), for advantages of at least 0 and for others.
        max_length: of "dr_grpo": how long an answer could have become.
        num_items: of the rows or tokens (see `grpo.py`) that the sum is divided by, the number in the whole step: the
            same for all its micro-batches makes gradient accumulation exact.
        num_tokens: likewise how many tokens the entropy is the mean of; where it counts, the two are given together.
        head: see `LogpOptions`; `temperature` is what the tokens were sampled with.

    Returns:
        The loss; of the tokens the mean `kl` and `entropy`, if there are any; and the share of the ratios that were
        clipped, "clip_ratio/low", "clip_ratio/high" and either, "clip_ratio/region": a share of the tokens, or of the
        rows where ratios are of whole answers.

    Raises:
        ValueError: shapes do not fit, an option is out of range, or one is missing that the variant needs.
    """
    name, shape = "grpo_loss", tuple(target.shape)
    check_choice(name, VARIANTS, variant=variant)
    loss_of_tokens, weights_of, counted_in, own_level, of_rows = VARIANTS[variant]
    level = own_level if level is None else level
    check_choice(name, LEVELS, level=level)
    if advantages.shape == shape[:1]:
        advantages = advantages[:, None].expand(shape)
    elif advantages.shape != shape:
        raise ValueError(f"{name}: advantages has shape {tuple(advantages.shape)}; expected {shape[:1]} or {shape}")
    check_rows(
        name, hidden, target, old_logps=(old_logps, shape),
        ref_logps=(ref_logps, shape), correction=(correction, shape),
    )  # fmt: skip
    check_number(name, num_items=num_items, num_tokens=num_tokens, max_length=max_length)
    if entropy_coef != 0:
        check_together(name, "the entropy is the mean of tokens", num_items=num_items, num_tokens=num_tokens)
    for what, number, fits, expected in (
        ("epsilon", epsilon, 0 <= epsilon < 1, "0 to less than 1"),
        ("epsilon_high", epsilon_high, epsilon_high is None or epsilon_high >= 0, "at least 0, or None"),
        ("sapo_temperatures", sapo_temperatures, min(sapo_temperatures) > 0, "more than 0, both"),
    ):
        if not fits:
            raise ValueError(f"{name}: {what}={number}; expected {expected}")
    for what, missing in (
        ("ref_logps for the KL term", beta != 0 and ref_logps is None),
        ("max_length for dr_grpo", counted_in == "places" and max_length is None),
        ("epsilon_high for cispo, such as 4", variant == "cispo" and epsilon_high is None),
    ):
        if missing:
            raise ValueError(f"{name}: got no {what}")
    highest = 1 + (epsilon if epsilon_high is None else epsilon_high)
    if loss_of_tokens is clipped and delta is not None and delta <= highest:
        raise ValueError(f"{name}: delta={delta}; expected more than 1 + epsilon_high, {highest}")
    options = GRPOOptions(
        epsilon, epsilon if epsilon_high is None else epsilon_high, delta, sapo_temperatures, vespo_shapes, beta,
        is_kl_corrected, level,
    )  # fmt: skip
    mask = counted(target, head)
    items = divisor(num_items, mask.sum() if counted_in == "tokens" else shape[0], hidden)
    if counted_in == "places":
        items = items * (max_length or 1)
    tokens = divisor(num_tokens, mask.sum(), hidden)

    def sane(x: Tensor | None) -> Tensor | None:
        """A constant; what stands where no token counts may be anything."""
        return None if x is None else torch.where(mask, x.detach(), 0.0)

    constants = Rollout(
        mask,
        weights_of(mask.to(accumulation_dtype(hidden.dtype))),
        torch.where(mask, advantages, 0.0),
        *map(sane, (old_logps, ref_logps, correction)),
    )

    def objective(logps: Tensor, entropy: Tensor | None, *rows: Any) -> Tensor:
        rollout = Rollout(*rows)
        step = step_of(logps, rollout, options.level)
        losses = loss_of_tokens(step, options)
        if rollout.correction is not None and loss_of_tokens is not vespo:  # which has it in its weights
            losses = losses * rollout.correction
        if beta != 0 and rollout.ref_logps is not None:  # without a weight they are for the metrics alone
            losses = losses + beta * kl_of(logps, step.ratio, rollout.ref_logps, options)
        loss = (rollout.weights * losses).sum() / items
        return loss if entropy is None else loss - entropy_coef * summed(entropy, rollout.mask).sum() / tokens

    group: Group = "row" if options.level == "sequence" or of_rows else "token"
    loss, logps, entropy = evaluate(
        "grpo_loss", hidden, weight, target,
        Objective(objective, constants, group, with_entropy or entropy_coef != 0), head,
    )  # fmt: skip
    return LossOutput(loss, _metrics(logps, entropy, constants, options, loss_of_tokens))


def _metrics(
    logps: Tensor, entropy: Tensor | None, rollout: Rollout, options: GRPOOptions, loss: TokenLoss
) -> dict[str, Tensor]:  # fmt: skip
    def mean(of_tokens: Tensor) -> Tensor:
        return summed(of_tokens.to(logps.dtype), rollout.mask).sum() / rollout.mask.sum().clamp(min=1)

    def mean_ratio(of_tokens: Tensor) -> Tensor:
        """The mean of what there is one of for each ratio."""
        if options.level == "token":
            return mean(of_tokens)
        of_rows = summed(of_tokens.to(logps.dtype), rollout.mask, average=True)
        return of_rows.sum() / max(1, of_rows.shape[0])

    metrics = {} if entropy is None else {"entropy": mean(entropy)}
    step = step_of(logps, rollout, options.level)
    if rollout.ref_logps is not None:
        metrics["kl"] = mean(kl_of(logps, step.ratio, rollout.ref_logps, options))
    if loss in (clipped, cispo):
        high = (step.ratio > 1 + options.epsilon_high) & (step.advantages > 0)
        metrics["clip_ratio/high"] = mean_ratio(high)
        if loss is clipped:
            low = (step.ratio < 1 - options.epsilon) & (step.advantages < 0)
            metrics["clip_ratio/low"], metrics["clip_ratio/region"] = mean_ratio(low), mean_ratio(low | high)
    return metrics


def ppo_clip_loss(
    hidden: Tensor,
    weight: Tensor | None,
    target: Tensor,
    advantages: Tensor,
    old_logps: Tensor,
    *,
    epsilon: float = 0.2,
    entropy_coef: float = 0.0,
    num_items: int | Tensor | None = None,
    **head: Unpack[LogpOptions],
) -> LossOutput:
    """The policy's part of proximal policy optimization (Schulman et al. 2017, eq. 7): the clipped losses of tokens,
    averaged over them.

    Args:
        advantages: (B, T), each token's own, such as generalized advantage estimates.
        old_logps: (B, T), `token_logps` of the model that sampled.

    The other arguments, the result and the errors are those of `grpo_loss`.
    """
    check_head("ppo_clip_loss", head)
    return grpo_loss(
        hidden, weight, target, advantages, old_logps=old_logps, variant="bnpo", epsilon=epsilon,
        entropy_coef=entropy_coef, num_items=num_items, num_tokens=num_items, **head,
    )  # fmt: skip
