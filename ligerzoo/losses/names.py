"""Names that TRL 1.16 and liger-kernel 0.8 use for variants and options, for hints in error messages."""

from __future__ import annotations

from ligerzoo.checks import is_text

OURS = {
    "sigmoid_norm": "dpo_loss(variant='sigmoid', average_log_prob=True)",
    "sft": "nll_weight=... with any variant",
    "kto_pair": "kto_loss(variant='kto')",
    "dpo": "dpo_loss(variant='sigmoid')",
    "bco": "dpo_loss(variant='bco_pair')",
    "simpo": "simpo_loss",
    "cpo": "cpo_loss",
    "orpo": "orpo_loss",
    "ppo": "ppo_clip_loss",
    "cosine_similarity": "distillation_loss(divergence='cosine')",
    "loss_type": "variant",
    "alpha": "nll_weight",
    "cpo_alpha": "nll_weight",
    "rpo_alpha": "nll_weight",
    "compute_nll_loss": "nll_weight",
    "simpo_gamma": "gamma",
    "ref_chosen_logps": "ref_logps, chosen completions first,",
    "ref_rejected_logps": "ref_logps, chosen completions first,",
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
"""Their variants, then their options -> ours."""

UNSUPPORTED = {
    "aot": "it sorts the margins of the whole batch",
    "aot_unpaired": "it sorts the log-ratios of the whole batch",
    "alphapo": "ligerzoo does not implement it",
}
"""Their variants that ligerzoo does not have -> the reason."""


def our_name(theirs: object) -> str | None:
    """Returns a remedy with our name for a variant or an option; None if TRL and liger-kernel lack it too."""
    if not is_text(theirs):
        return None
    if theirs in OURS:
        return f"Use {OURS[theirs]} instead of {theirs!r} from TRL or liger-kernel"
    return f"{theirs!r} from TRL is not supported: {UNSUPPORTED[theirs]}" if theirs in UNSUPPORTED else None
