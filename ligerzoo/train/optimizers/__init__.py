"""A stand-in for the part with optimizers, with its interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def make_optimizer(
    model: nn.Module, name: str, *, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, betas=betas)


def schedule(name: str, steps: int, *, warmup_steps: int) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = (step - warmup_steps) / max(1, steps - warmup_steps)
        return {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}[name]

    return factor


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def share_unchanged(optimizer: torch.optim.Optimizer, lr: float) -> float:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    unchanged = sum(int(((weight + lr == weight) & (weight - lr == weight)).sum()) for weight in weights)
    return float(unchanged / sum(weight.numel() for weight in weights))
