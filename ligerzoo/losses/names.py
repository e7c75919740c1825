"""What TRL 1.16 and liger-kernel 0.8 call the losses' variants and options; errors answer these names with ours."""

from __future__ import annotations

from typing import Any

CHOICES = {
    "sigmoid_norm": "dpo_loss(variant='sigmoid', average_log_prob=True)",
    "sft": "nll_weight=..., which adds the NLL to any variant",
    "kto_pair": "kto_loss(variant='kto')",
    "dpo": "dpo_loss(variant='sigmoid')",
    "bco": "dpo_loss(variant='bco_pair')",
    "simpo": "simpo_loss",
    "cpo": "cpo_loss",
    "orpo": "orpo_loss",
    "ppo": "ppo_clip_loss",
    "cosine_similarity": "distillation_loss(divergence='cosine')",
    "aot": "not available here: it sorts the margins of the whole batch",
    "aot_unpaired": "not available here: it sorts the log-ratios of the whole batch",
    "alphapo": "not available here",
}

OPTIONS = {
    "loss_type": "variant",
    "alpha": "nll_weight",
    "cpo_alpha": "nll_weight",
    "rpo_alpha": "nll_weight",
    "compute_nll_loss": "nll_weight",
    "simpo_gamma": "gamma",
    "ref_chosen_logps": "ref_logps, those of the rejected answers after those of the chosen ones",
    "ref_rejected_logps": "ref_logps, those of the rejected answers after those of the chosen ones",
    "preference_labels": "desirable",
    "importance_sampling_level": "level",
    "epsilon_low": "epsilon",
    "old_per_token_logps": "old_logps",
    "ref_per_token_logps": "ref_logps",
    "vllm_is_ratio": "correction",
    "importance_sampling_ratio": "correction",
    "use_bias_correction_kl": "is_kl_corrected",
    "max_completion_length": "max_length",
    "sapo_temperature_pos": "sapo_temperatures[0]",
    "sapo_temperature_neg": "sapo_temperatures[1]",
    "vespo_k_pos": "vespo_shapes[0][0]",
    "vespo_lambda_pos": "vespo_shapes[0][1]",
    "vespo_k_neg": "vespo_shapes[1][0]",
    "vespo_lambda_neg": "vespo_shapes[1][1]",
    "num_items_in_batch": "num_items",
    "weight_soft_loss": "soft_weight",
    "weight_hard_loss": "hard_weight",
}


def about_choice(choice: Any) -> str:
    """The end of an error about a choice that a loss does not have; empty unless TRL or liger-kernel has it."""
    ours = CHOICES.get(choice) if isinstance(choice, str) else None
    return "" if ours is None else f"; the {choice!r} of TRL and liger-kernel is {ours}"


def about_option(option: str, value: Any) -> str:
    """The same about an option and the value that was given for it."""
    ours = OPTIONS.get(option)
    return "" if ours is None else f"; the {option} of TRL and liger-kernel is {ours}{about_choice(value)}"
