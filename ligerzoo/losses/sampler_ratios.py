"""Importance ratios that correct for a sampler whose probabilities differ from those of the trained model."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ligerzoo.checks import NOT_NEGATIVE, check, one_of
from ligerzoo.errors import LigerzooError
from ligerzoo.losses.grpo import LEVELS, Level
from ligerzoo.tensor_checks import check_floats, check_tensor


@torch.no_grad()
def sampler_correction(
    old_logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    min_ratio: float = 0.0,
    max_ratio: float = 3.0,
) -> Tensor:
    """Computes truncated or masked importance ratios p_old / p_sampler, to correct for a separate inference engine.

    The probabilities of an engine with its own kernels, such as vLLM, differ from those of the trained model. Pass the
    result to `grpo_loss` as `correction`.

    Args:
        old_logps: (B, T), `token_logps` of the trained model before the step.
        sampler_logps: (B, T), as the sampler reported them; NaN means unknown, for a ratio of 1.
        mask: (B, T) bool, the non-ignored targets. For unshifted labels: `F.pad(labels[:, 1:] != -100, (0, 1))`.
        level: "token" for the ratio of each token, "sequence" for the product over a completion.
        mode: "truncate" clamps ratios to the range from `min_ratio` to `max_ratio`; "mask" sets ratios outside to 0.
        min_ratio: the lower end of the range.
        max_ratio: the upper end of the range.

    Returns:
        (B, T) ratios, a constant.

    Raises:
        TypeError: an argument has another type.
        ValueError: `level` or `mode` is unknown, a number is negative, or shapes or dtypes are invalid.
    """
    name = "sampler_correction"
    check(name, one_of(LEVELS), level=level)
    check(name, one_of(("truncate", "mask")), mode=mode)
    check(name, NOT_NEGATIVE, min_ratio=min_ratio, max_ratio=max_ratio)
    check_floats(name, old_logps=old_logps, sampler_logps=sampler_logps)
    check_tensor(name, "mask", mask, "bool")
    if mask.dim() != 2 or not old_logps.shape == sampler_logps.shape == mask.shape:
        shapes = (tuple(t.shape) for t in (old_logps, sampler_logps, mask))
        what = "got old_logps {}, sampler_logps {} and mask {}".format(*shapes)
        raise LigerzooError(what, where=name, expected="(B, T) for all")
    log_ratio = torch.where(mask, (old_logps - sampler_logps).nan_to_num(nan=0.0), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand(mask.shape)
    ratio = log_ratio.exp()
    if mode == "truncate":
        return ratio.clamp(min_ratio, max_ratio)
    return torch.where((ratio < min_ratio) | (ratio > max_ratio), 0.0, ratio)
