"""The loss of reward models (Bradley and Terry 1952; Ouyang et al. 2022).

A reward model gives a number to each text. Of n pairs with rewards r and margins m, the loss is

    loss = 1/n sum_i [ -log sigmoid(r_i of the chosen - r_i of the rejected - m_i) + c (sum of both)^2 ].
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import NOT_NEGATIVE, check
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.losses.logps import items_or
from ligerzoo.losses.objective import LossOutput
from ligerzoo.losses.options import NumItems
from ligerzoo.tensor_checks import check_floats, check_num_items, check_tensor


def reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    margins: Tensor | None = None,
    *,
    center_weight: float = 0.0,
    num_items: NumItems = None,
) -> LossOutput:
    """Computes the loss of pairs of texts by their rewards, and metrics.

    Args:
        chosen: (n,), rewards of the chosen texts, such as the logits of a sequence classifier with one label.
        rejected: (n,), rewards of the rejected texts.
        margins: (n,), by how much the reward of the chosen text should at least exceed the other. Default: 0.
        center_weight: weight of the squared sum of both rewards, which keeps rewards near 0 (Eisenstein et al. 2023).
        num_items: divides the summed losses. Default: n. For exact gradient accumulation, pass the number of pairs in
            the step to every microbatch.

    Returns:
        The loss; and the means of "rewards/chosen", "rewards/rejected", "rewards/margins" (their difference) and
        "rewards/accuracies" (the share of pairs whose chosen text has the higher reward).

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes or numbers are invalid.
    """
    name = "reward_loss"
    check_floats(name, chosen=chosen)
    check(name, NOT_NEGATIVE, center_weight=center_weight)
    check_num_items(name, num_items=num_items)
    shape = (chosen.numel(),)
    for argument, rewards in (("chosen", chosen), ("rejected", rejected), ("margins", margins)):
        if rewards is not None:
            check_tensor(name, argument, rewards, shapes=[shape])
    dtype = accumulation_dtype(chosen.dtype)
    chosen, rejected = chosen.to(dtype), rejected.to(dtype)
    difference = chosen - rejected
    losses = -F.logsigmoid(difference if margins is None else difference - margins.to(dtype))
    if center_weight:
        losses = losses + center_weight * (chosen + rejected).square()
    values = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": difference,
        "rewards/accuracies": (difference > 0).to(dtype),
    }
    count = max(1, len(losses))
    metrics = {key: value.detach().sum() / count for key, value in values.items()}
    return LossOutput(losses.sum() / items_or(num_items, count, chosen), metrics)
