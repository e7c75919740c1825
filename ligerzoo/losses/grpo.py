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

from typing import Any, Unpack

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.checks import check_both_or_neither, check_constants, check_tensors, check_unused
from ligerzoo.losses.logps import divisor, masked_mean, masked_sum, target_mask
from ligerzoo.losses.objective import (
    GroupObjective,
    LogpOptions,
    LossGroup,
    LossOutput,
    check_head_options,
    evaluate,
)
from ligerzoo.losses.policy import (
    VARIANTS,
    Level,
    PolicyOptions,
    Rollout,
    check_policy_options,
    cispo,
    clipped,
    kl_estimate,
    policy_inputs,
    vespo,
)
from ligerzoo.tensor_checks import check_floats, check_tensor


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
    """Computes the loss of group relative policy optimization (Shao et al. 2024) or one of its variants.

    The formulas are in the docstring of `ligerzoo.losses.grpo`. The logits of all tokens never exist at once.

    Arguments of shape (B, T) are aligned with `target`: index t holds the values of the token `target[:, t]`.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits.
        weight: (V, H) weight of the LM head; None if `hidden` holds logits.
        target: (B, T) token ids, already shifted: `target[b, t]` is the token that `hidden[b, t]` predicts.
            `ignore_index` marks prompts, padding, and tool outputs within a completion.
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
        head: options of the LM head, see `LogpOptions`, and `temperature`: that of sampling.

    Returns:
        `LossOutput`: the loss and the metrics. "kl" (given `ref_logps`) and "entropy" (if computed) are means over the
        tokens. "clip_ratio/low", "clip_ratio/high" and "clip_ratio/region" (either) are the fractions of clipped
        ratios: of tokens, or of sequences at that level. "cispo" has "clip_ratio/high" only, "sapo" and "vespo" none.

    Raises:
        TypeError: an option is unknown, or an argument has another type.
        ValueError: shapes or dtypes are invalid, an option is out of range or unused by the variant, or the variant
            requires a missing one.
    """
    check_head_options(grpo_loss, head)
    options = PolicyOptions(
        variant, level, epsilon, epsilon_high, delta, beta, is_kl_corrected, entropy_coef, with_entropy,
        sapo_temperatures, vespo_shapes, max_length,
    )  # fmt: skip
    tensors = (hidden, weight, target, advantages, old_logps, ref_logps, correction)
    return _policy_loss("grpo_loss", *tensors, options, num_items, num_tokens, head)


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
    """Computes the policy loss of proximal policy optimization (Schulman et al. 2017, eq. 7), a mean over tokens.

    Equals `grpo_loss(variant="bnpo")`. The logits of all tokens never exist at once.

    Args:
        hidden: (B, T, H) hidden states, or (B, T, V) logits.
        weight: (V, H) weight of the LM head; None if `hidden` holds logits.
        target: (B, T) token ids, already shifted; `ignore_index` marks prompts and padding.
        advantages: (B, T) of tokens, such as generalized advantage estimates, or (B,); a constant.
        old_logps: (B, T), `token_logps` of the model that sampled.
        epsilon: clips ratios to the range from 1 - epsilon to 1 + epsilon.
        entropy_coef: weight of the mean entropy of the tokens, which is subtracted from the loss.
        num_items: divides the summed losses and entropies. Default: the number of tokens in the batch. For exact
            gradient accumulation, pass the number in the step to every microbatch.
        head: options of the LM head, see `LogpOptions`, and `temperature`: that of sampling.

    Returns:
        `LossOutput`: the loss and the metrics of `grpo_loss`.

    Raises:
        TypeError: an option is unknown, or an argument has another type.
        ValueError: shapes or dtypes are invalid, or an option is out of range.
    """
    check_head_options(ppo_clip_loss, head)
    check_floats("ppo_clip_loss", old_logps=old_logps)
    options = PolicyOptions("bnpo", epsilon=epsilon, entropy_coef=entropy_coef)
    tensors = (hidden, weight, target, advantages, old_logps, None, None)
    num_tokens = num_items if entropy_coef != 0 else None
    return _policy_loss("ppo_clip_loss", *tensors, options, num_items, num_tokens, head)


def check_grpo_options(
    name: str, *, num_items: int | Tensor | None, num_tokens: int | Tensor | None, **options: Any
) -> None:  # fmt: skip
    """Raises for invalid options of `grpo_loss`. `name` is the loss that messages name."""
    policy = PolicyOptions(**{option: options[option] for option in PolicyOptions._fields})
    check_policy_options(name, policy, num_items, num_tokens)


def check_ppo_options(
    name: str, *, epsilon: float, entropy_coef: float, num_items: int | Tensor | None
) -> None:  # fmt: skip
    """Raises for invalid options of `ppo_clip_loss`. `name` is the loss that messages name."""
    check_policy_options(name, PolicyOptions("bnpo", epsilon=epsilon, entropy_coef=entropy_coef), num_items, None)


def _policy_loss(
    name: str, hidden: Tensor, weight: Tensor | None, target: Tensor, advantages: Tensor, old_logps: Tensor | None,
    ref_logps: Tensor | None, correction: Tensor | None, options: PolicyOptions, num_items: int | Tensor | None,
    num_tokens: int | Tensor | None, head: LogpOptions,
) -> LossOutput:  # fmt: skip
    """Computes `grpo_loss` or `ppo_clip_loss`; error messages name `name`."""
    check_policy_options(name, options, num_items, num_tokens)
    if options.beta != 0 and ref_logps is None:
        raise ValueError(
            f"{name}: ref_logps=None with beta={options.beta}; expected log-probabilities of the reference model for "
            "the KL term. Pass ref_logps"
        )
    if ref_logps is None:
        check_unused(name, "ref_logps=None", PolicyOptions._field_defaults, is_kl_corrected=options.is_kl_corrected)
    check_tensors(name, hidden, weight, target, head.get("bias"))
    shape = tuple(target.shape)
    check_tensor(name, "advantages", advantages, shapes=[shape[:1], shape], device=hidden.device)
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(shape)
    check_constants(
        name, hidden, old_logps=(old_logps, shape), ref_logps=(ref_logps, shape), correction=(correction, shape)
    )
    if options.entropy_coef != 0:
        check_both_or_neither(name, "num_tokens divides the entropy", num_items=num_items, num_tokens=num_tokens)
    variant, mask = VARIANTS[options.variant], target_mask(target, head)
    items = divisor(num_items, mask.sum() if variant.divided_by == "tokens" else shape[0], hidden)
    if variant.divided_by == "max_tokens":
        items = items * (options.max_length or 1)
    tokens = divisor(num_tokens, mask.sum(), hidden)

    def masked_constant(x: Tensor | None) -> Tensor | None:
        """Detaches, and replaces the values of ignored tokens, which may be NaN, by 0."""
        return None if x is None else torch.where(mask, x.detach(), 0.0)

    constants = Rollout(
        mask,
        variant.token_weights(mask.to(accumulation_dtype(hidden.dtype))),
        torch.where(mask, advantages, 0.0),
        *map(masked_constant, (old_logps, ref_logps, correction)),
    )

    def total_loss(logps: Tensor, entropy: Tensor | None, *constants: Any) -> Tensor:
        rollout = Rollout(*constants)
        inputs = policy_inputs(logps, rollout, options.ratio_level)
        losses = variant.formula(inputs, options)
        if rollout.correction is not None and variant.formula is not vespo:  # vespo's weights include it
            losses = losses * rollout.correction
        if options.beta != 0 and rollout.ref_logps is not None:  # with beta = 0 only the metrics need the reference
            losses = losses + options.beta * kl_estimate(logps, inputs.ratio, rollout.ref_logps, options)
        loss = (rollout.weights * losses).sum() / items
        if entropy is None:
            return loss
        return loss - options.entropy_coef * masked_sum(entropy, rollout.mask).sum() / tokens

    group: LossGroup = "sequence" if options.ratio_level == "sequence" or variant.uses_whole_sequence else "token"
    uses_entropy = options.with_entropy or options.entropy_coef != 0
    objective = GroupObjective(total_loss, constants, group, uses_entropy)
    loss, logps, entropy = evaluate(name, hidden, weight, target, objective, head)
    return LossOutput(loss, _metrics(logps, entropy, constants, options))


def _metrics(logps: Tensor, entropy: Tensor | None, rollout: Rollout, options: PolicyOptions) -> dict[str, Tensor]:
    def token_mean(x: Tensor) -> Tensor:
        return masked_sum(x.to(logps.dtype), rollout.mask).sum() / rollout.mask.sum().clamp(min=1)

    def ratio_mean(x: Tensor) -> Tensor:
        """The mean over the ratios: over tokens, or over sequences at that level."""
        if options.ratio_level == "token":
            return token_mean(x)
        return masked_mean(x.to(logps.dtype), rollout.mask).sum() / max(1, x.shape[0])

    metrics = {} if entropy is None else {"entropy": token_mean(entropy)}
    inputs, formula = policy_inputs(logps, rollout, options.ratio_level), VARIANTS[options.variant].formula
    if rollout.ref_logps is not None:
        metrics["kl"] = token_mean(kl_estimate(logps, inputs.ratio, rollout.ref_logps, options))
    if formula in (clipped, cispo):
        high = (inputs.ratio > 1 + options.upper_epsilon) & (inputs.advantages > 0)
        metrics["clip_ratio/high"] = ratio_mean(high)
        if formula is clipped:
            low = (inputs.ratio < 1 - options.epsilon) & (inputs.advantages < 0)
            metrics["clip_ratio/low"], metrics["clip_ratio/region"] = ratio_mean(low), ratio_mean(low | high)
    return metrics
