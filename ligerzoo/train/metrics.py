"""Metrics of a step from those of its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ligerzoo.train import processes


def mean_metrics(parts: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Averages the metrics of micro-batches over a step. All processes must call it with the same metrics.

    Args:
        parts: the metrics of each micro-batch. Those of KTO are weighted by its "count/chosen" and "count/rejected".
        sizes: number of samples of each micro-batch; the weights of other metrics.
    """
    weighted, weights = [], []
    for name in parts[0]:
        values = torch.stack([part[name] for part in parts]).double()
        count = f"count/{name.rpartition('/')[2]}"
        is_weighted_by_count = count in parts[0] and name != count
        weight = torch.stack([part[count] for part in parts]) if is_weighted_by_count else values.new_tensor(sizes)
        weighted.append(values.sum() if name == count else (values * weight).sum())
        weights.append(weight.sum())
    sums = processes.mean(torch.stack([torch.stack(weighted), torch.stack(weights).double()])) * processes.world_size()
    means = {
        name: total if name.startswith("count/") else total / weight.clamp(min=1)
        for name, total, weight in zip(parts[0], *sums, strict=True)
    }
    if "count/chosen" in means:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means
