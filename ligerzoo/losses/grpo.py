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

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.checks import check_both_or_neither, check_constants, check_sequences
from ligerzoo.losses.logps import items_or, masked_mean, masked_sum
from ligerzoo.losses.objective import GroupObjective, LossGroup, LossOutput, evaluate_objective
from ligerzoo.losses.options import LossInputs, takes
from ligerzoo.losses.policy import VARIANTS, GRPOOptions, PPOOptions, Rollout, kl_estimate, policy_of
from ligerzoo.tensor_checks import check_floats, check_tensor


@takes(GRPOOptions)
def grpo_loss(inputs: LossInputs, options: GRPOOptions) -> LossOutput:
    """Computes the loss of group relative policy optimization (Shao et al. 2024) or one of its variants.

    The formulas are in the docstring of `ligerzoo.losses.grpo`. The logits of all tokens never exist at once.

    Returns:
        `LossOutput`: the loss and the metrics. "kl" (given `ref_logps`) and "entropy" (if computed) are means over the
        tokens. "clip_ratio/low", "clip_ratio/high" and "clip_ratio/region" (either) are the fractions of clipped
        ratios: of tokens, or of sequences at that level. "cispo" has "clip_ratio/high" only, "sapo" and "vespo" none.
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
    variant, mask = VARIANTS[options.variant], options.target_mask(target)
    items = items_or(options.num_items, mask.sum() if variant.divided_by == "tokens" else shape[0], hidden)
    if variant.divided_by == "max_tokens":
        items = items * (options.max_length or 1)
    tokens = items_or(options.num_tokens, mask.sum(), hidden)

    def masked_constant(x: Tensor | None) -> Tensor | None:
        """Detaches, and replaces the values of ignored tokens, which may be NaN, by 0."""
        return None if x is None else torch.where(mask, x.detach(), 0.0)

    constants = Rollout(
        mask,
        variant.token_weights(mask.to(accumulation_dtype(hidden.dtype))),
        torch.where(mask, advantages, 0.0),
        *map(masked_constant, tensors.values()),
    )

    def total_loss(logps: Tensor, entropy: Tensor | None, *constants: Any) -> Tensor:
        rollout = Rollout(*constants)
        policy = policy_of(logps, rollout, options.ratio_level)
        losses = variant.formula.token_losses(policy, rollout, options)
        if rollout.correction is not None and not variant.weighs_sequences:
            losses = losses * rollout.correction
        if options.beta != 0 and rollout.ref_logps is not None:  # with beta = 0 only the metrics need the reference
            losses = losses + options.beta * kl_estimate(logps, policy.ratio, rollout.ref_logps, options)
        loss = (rollout.weights * losses).sum() / items
        if entropy is None:
            return loss
        return loss - options.entropy_coef * masked_sum(entropy, rollout.mask).sum() / tokens

    group: LossGroup = "sequence" if options.ratio_level == "sequence" or variant.weighs_sequences else "token"
    uses_entropy = options.with_entropy or options.entropy_coef != 0
    objective = GroupObjective(total_loss, constants, group, uses_entropy)
    loss, logps, entropy = evaluate_objective(inputs, objective, options)
    return LossOutput(loss, _metrics(logps, entropy, constants, options))


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
    if rollout.ref_logps is not None:
        metrics["kl"] = token_mean(kl_estimate(logps, policy.ratio, rollout.ref_logps, options))
    if "epsilon_high" in clips:
        high = (policy.ratio > 1 + options.upper_epsilon) & (rollout.advantages > 0)
        metrics["clip_ratio/high"] = ratio_mean(high)
    if "epsilon" in clips:
        low = (policy.ratio < 1 - options.epsilon) & (rollout.advantages < 0)
        metrics["clip_ratio/low"], metrics["clip_ratio/region"] = ratio_mean(low), ratio_mean(low | high)
    return metrics
