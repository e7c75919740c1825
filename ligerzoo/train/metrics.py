"""Metrics of a step from those of its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def mean_metrics(parts: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Averages the metrics of micro-batches over a step.

    Args:
        parts: the metrics of each micro-batch. Those of KTO are weighted by its "count/chosen" and "count/rejected".
        sizes: number of samples of each micro-batch; the weights of other metrics.
    """
    means: dict[str, Tensor] = {}
    for name in parts[0]:
        values = torch.stack([part[name] for part in parts])
        count = f"count/{name.rpartition('/')[2]}"
        weights = torch.stack([part[count] for part in parts]) if count in parts[0] else values.new_tensor(sizes)
        is_count = name.startswith("count/")
        means[name] = values.sum() if is_count else (values * weights).sum() / weights.sum().clamp(min=1)
    if "count/chosen" in means:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means
