"""Oracles: the specified results of operations in terms of torch's functions; and random test inputs."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo import kernels


def transformed(
    logits: Tensor, *, softcap: float | None = None, logit_scale: float = 1.0, temperature: float = 1.0
) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def cross_entropy_oracle(
    logits: Tensor,
    target: Tensor,
    token_weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    **transform: Any,
) -> Tensor:
    """The specified result of `cross_entropy`, computed with torch's."""
    logits = transformed(logits, **transform)
    class_weight = logits.new_ones(logits.shape[-1]) if class_weight is None else class_weight.to(logits.dtype)
    counts = target != ignore_index
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), target.reshape(-1), class_weight,
        ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing,
    ).view(target.shape)  # fmt: skip
    if z_loss:
        losses = losses + z_loss * torch.where(counts, logits.logsumexp(-1), 0.0).square()
    weights = class_weight[target.where(counts, 0)] * counts
    if token_weight is not None:
        losses, weights = losses * token_weight, weights * token_weight
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / ((weights.sum() if counts.any() else 1) if num_items is None else num_items)


def linear_cross_entropy_oracle(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return cross_entropy_oracle(F.linear(hidden, weight, bias), target, token_weight, **options)


def statistics_oracle(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100, **transform: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The differentiable results of `token_statistics`."""
    logits = transformed(F.linear(hidden, weight), **transform)
    distribution = torch.distributions.Categorical(logits=logits, validate_args=False)
    counts = target != ignore_index
    results = (distribution.log_prob(target.where(counts, 0)), distribution.entropy(), logits.logsumexp(-1))
    logps, entropy, logsumexp = (torch.where(counts, t, 0.0) for t in results)
    return logps, entropy, logsumexp


def statistics(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    result = kernels.token_statistics(hidden, weight, target, **options)
    return result.logps, result.entropy, result.logsumexp


def divergence_oracle(
    of: str,
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """The specified result of one of DIVERGENCES for finite logits, computed with torch's `kl_div`."""
    dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    log_q, log_p = ((t.to(dtype) / temperature).log_softmax(-1) for t in (student, teacher))
    kl_div = partial(F.kl_div, reduction="none", log_target=True)  # torch's first argument is the second of KL(. || .)
    if of == "kl_div" or (of == "jsd" and beta == 0):
        parts = kl_div(log_q, log_p)
    elif of == "kl_div-reverse" or (of == "jsd" and beta == 1):
        parts = kl_div(log_p, log_q)
    elif of == "jsd":
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        parts = beta * kl_div(log_m, log_p) + (1 - beta) * kl_div(log_m, log_q)
    else:
        parts = (log_p.exp() - log_q.exp()).abs() / 2
    counts = torch.ones_like(parts[..., 0], dtype=torch.bool) if target is None else target != ignore_index
    losses = parts.sum(-1).masked_fill(~counts, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (max(1, int(counts.sum())) if num_items is None else num_items)


def linear_divergence_oracle(
    of: str,
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    student_softcap: float | None = None,
    student_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    **options: Any,
) -> Tensor:
    student, teacher = (
        transformed(F.linear(hidden, weight, bias), softcap=softcap, logit_scale=scale)
        for hidden, weight, bias, softcap, scale in (
            (student_hidden, student_weight, student_bias, student_softcap, student_logit_scale),
            (teacher_hidden, teacher_weight, teacher_bias, teacher_softcap, teacher_logit_scale),
        )
    )
    return divergence_oracle(of, student, teacher, target, **options)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0) -> Tensor:
    """Normally distributed, requires grad."""
    return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()


def bf16(*shape: int) -> Tensor:
    """Normally distributed, on a GPU, without grad."""
    return torch.randn(shape, device="cuda").bfloat16()


def count_of(n: int) -> Tensor:
    """The number of valid rows, in the form that kernels skipping rows read."""
    return torch.tensor([n], device="cuda", dtype=torch.int32)


def targets(*shape: int, classes: int, device: str = "cpu", ignored: float = 0.3, ignore_index: int = -100) -> Tensor:
    """Random classes, where the fraction `ignored` is replaced by `ignore_index`."""
    target = torch.randint(classes, shape, device=device)
    return target.masked_fill(torch.rand(shape, device=device) < ignored, ignore_index)


def angles(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(cos, sin) of random angles."""
    angle = torch.randn(shape, device=device) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)
