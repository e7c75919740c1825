"""Whether an optimizer's updates are large enough to change weights in bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.dtensors import local


@torch.no_grad()
def share_unchanged(
    optimizer: torch.optim.Optimizer, lr: float | None = None, dtype: torch.dtype | None = None
) -> float:
    """Returns the share of weights that would not change by an update of size lr, rounded to the nearest.

    AdamW's updates are about lr (Kingma & Ba 2015, section 2.1). A bf16 weight w changes only by more than half an ulp,
    2^-9 |w| or a little more: with lr=1e-5, weights above 0.005 never change. Remedies are fp32 weights, stochastic
    rounding or a larger learning rate.

    Args:
        optimizer: any optimizer.
        lr: size of the updates; None for the `initial_lr` of each group, or else its `lr`.
        dtype: dtype that weights would be stored in; None for that of each parameter.

    Returns:
        From 0 to 1, over this process's shards; 0 for weights that are rounded stochastically, or without weights. One
        host sync.
    """
    always = getattr(optimizer, "bf16_stochastic_round", False)  # of torchao
    unchanged: list[Tensor] = []
    total = 0
    for group in optimizer.param_groups:
        size = float(group.get("initial_lr", group["lr"])) if lr is None else lr
        for parameter in map(local, group["params"]):
            total += parameter.numel()
            weight = parameter.to(dtype or parameter.dtype)
            is_stochastic = always or group.get("stochastic_rounding", False)
            if not (is_stochastic and weight.dtype == torch.bfloat16):
                unchanged.append(((weight + size == weight) & (weight - size == weight)).sum())
    if not unchanged:
        return 0.0
    return int(torch.stack([count.to(unchanged[0].device) for count in unchanged]).sum()) / total


def second_moment_is_stuck(optimizer: torch.optim.Optimizer) -> bool:
    """Whether AdamW's second moment never decreases for some parameter: it is bf16, rounded to the nearest.

    Each update subtracts up to 1 - beta2 of the moment. With beta2 = 0.999 this is less than half an ulp, so it is
    lost, and a parameter that has seen large gradients keeps small updates. `torch.optim.AdamW` stores the moments of
    bf16 weights so. Remedies: `stochastic_rounding=True`, beta2 of 0.99 or less, or fp32 weights.

    Args:
        optimizer: any optimizer of `make_optimizer`.
    """
    if isinstance(getattr(optimizer, "block_size", None), int):  # of torchao: moments have scales in fp32
        return False
    return any(
        (group.get("state_dtype") or parameter.dtype) == torch.bfloat16
        for group in optimizer.param_groups
        if "betas" in group and not (group.get("muon") or group.get("stochastic_rounding"))
        if 1 - group["betas"][1] < 2**-9
        for parameter in group["params"]
    )
